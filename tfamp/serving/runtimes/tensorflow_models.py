"""TensorFlow functions that answer: of SavedModels, and of Keras models in memory."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import Call, LoadedModel


def saved_model(folder: Path, found: Manifest, threads: int) -> LoadedModel:
    """Loads a SavedModel, by its concrete function."""
    _set_threads(threads)
    loaded = tf.saved_model.load(str(folder))
    call = _called(loaded.signatures["serving_default"], loaded)
    return LoadedModel("saved_model", folder, found.signature, call)


def keras_model(model: Any, threads: int) -> LoadedModel:
    """Traces a Keras model, in memory or of a `.keras` file."""
    # Not above: a SavedModel is loaded without Keras.
    from tfamp.models import load_model
    from tfamp.serving.exports.tracing import trace
    from tfamp.stepping.arguments import check_built

    _set_threads(threads)
    path = model if isinstance(model, Path) else None
    if path is not None:
        model = load_model(path)
    check_built(model, "load")
    return of_trace(trace(model), path)


def of_trace(traced: Any, path: Path | None = None) -> LoadedModel:
    """Returns a `Traced` model to be asked as exported ones are."""
    function = traced.function
    call = _called(lambda **given: function(*given.values()), traced)
    return LoadedModel("keras", path, traced.signature, call)


def _called(function: Callable[..., Mapping[str, Any]], owner: Any) -> Call:
    """Returns a call of arrays; `owner` has the weights, which would go with it."""

    def call(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = function(**{name: tf.constant(x) for name, x in given.items()})
        return {name: x.numpy() for name, x in found.items()}

    call.owner = owner  # type: ignore[attr-defined]
    return call


def _set_threads(threads: int) -> None:
    """Sets the threads of the whole process, unless it has some or runs already."""
    with contextlib.suppress(RuntimeError):
        if not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(threads)
