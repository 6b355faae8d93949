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
        path: Path | None,
        signature: Signature,
        call: Callable[..., Mapping[str, Any]],
    ) -> None:
        super().__init__(path, signature)
        self._call = call
        self._names = [spec.name for spec in signature.inputs]
        self._answers = {spec.name: spec.in_file for spec in signature.outputs}

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        tensors = [tf.constant(inputs[name]) for name in self._names]
        found = self._call(*tensors)
        return {name: found[key].numpy() for name, key in self._answers.items()}


class SavedModel(TensorFlowModel):
    """A SavedModel, by its concrete function.

    The threads of TensorFlow are those of the whole process: they are set where
    TensorFlow has not started yet.
    """

    runtime = "saved_model"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        _set_threads(threads)
        loaded = tf.saved_model.load(str(folder))
        function = loaded.signatures[_SIGNATURE]
        names = [spec.in_file for spec in manifest.signature.inputs]

        def call(*tensors: Any, owner: Any = loaded) -> Any:  # its weights go with it
            return function(**dict(zip(names, tensors, strict=True)))

        super().__init__(folder, manifest.signature, call)


class KerasModel(TensorFlowModel):
    """A Keras model in memory, such as `tfamp.freeze` returns, or of a `.keras` file.

    It answers by one concrete function.
    """

    runtime = "keras"

    def __init__(self, model: Any, threads: int) -> None:
        # Not above: a SavedModel is loaded without Keras.
        from tfamp.models import load_model
        from tfamp.serving.exports.tracing import trace
        from tfamp.stepping.arguments import check_built

        _set_threads(threads)
        path = model if isinstance(model, Path) else None
        if path is not None:
            model = load_model(path)
        check_built(model, "load")
        traced = trace(model)
        super().__init__(path, traced.signature, traced.function)
        self._traced = traced  # holds the variables


def _set_threads(threads: int) -> None:
    """Sets the threads of TensorFlow, unless that was done or it runs already."""
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        pass
