"""TensorFlow functions that answer: of SavedModels, and of Keras models in memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import LoadedModel, Signature

_SIGNATURE = "serving_default"


class TensorFlowModel(LoadedModel):
    """A function of tensors."""

    def __init__(
        self,
        runtime: str,
        path: Path | None,
        signature: Signature,
        call: Callable[[dict[str, Any]], Mapping[str, Any]],
        owner: Any = None,
    ) -> None:
        super().__init__(path, signature)
        self.runtime = runtime
        self._call = call
        self._owner = owner  # of the weights, which would go with it

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        given = self.in_file(inputs)
        found = self._call({name: tf.constant(x) for name, x in given.items()})
        outputs = self.signature.outputs
        return {spec.name: found[spec.in_file].numpy() for spec in outputs}


def saved_model(folder: Path, found: Manifest, threads: int) -> TensorFlowModel:
    """Loads a SavedModel, by its concrete function."""
    _set_threads(threads)
    loaded = tf.saved_model.load(str(folder))
    function = loaded.signatures[_SIGNATURE]

    def call(given: dict[str, Any]) -> Mapping[str, Any]:
        return function(**given)

    return TensorFlowModel("saved_model", folder, found.signature, call, loaded)


def keras_model(model: Any, threads: int) -> TensorFlowModel:
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


def of_trace(traced: Any, path: Path | None = None) -> TensorFlowModel:
    """Returns a `Traced` model to be asked as exported ones are."""
    function = traced.function

    def call(given: dict[str, Any]) -> Mapping[str, Any]:
        return function(*given.values())

    return TensorFlowModel("keras", path, traced.signature, call, traced)


def _set_threads(threads: int) -> None:
    """Sets the threads of the whole process, unless it has some or runs already."""
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        pass
