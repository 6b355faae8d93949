"""TensorFlow's SavedModel, which TF Serving takes as it is."""

from pathlib import Path
from typing import Any

import tensorflow as tf

from tfamp.serving.runtimes.manifest import XLA, Manifest
from tfamp.serving.runtimes.tensorflow_model import TensorFlowModel

_SIGNATURE = "serving_default"


def load(folder: Path, manifest: Manifest, threads: int) -> TensorFlowModel:
    """Returns a model that TensorFlow runs."""
    return SavedModel(folder, manifest, threads)


class SavedModel(TensorFlowModel):
    """A SavedModel, by its concrete function, or by that under XLA.

    The threads of TensorFlow are those of the whole process: they are set where
    TensorFlow has not started yet.
    """

    runtime = "saved_model"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        set_threads(threads)
        loaded = tf.saved_model.load(str(folder))
        function = loaded.signatures[_SIGNATURE]
        names = [spec.name for spec in manifest.signature.inputs]

        def call(*tensors: Any, owner: Any = loaded) -> Any:  # its weights go with it
            return function(**dict(zip(names, tensors, strict=True)))

        compiled = [
            int(size)
            for size, found in manifest.execution.items()
            if found["chosen"] == XLA
        ]
        super().__init__(folder, manifest.signature, call, compiled)


def set_threads(threads: int) -> None:
    """Sets the threads of TensorFlow, unless that was done or it runs already."""
    try:
        if not tf.config.threading.get_intra_op_parallelism_threads():
            tf.config.threading.set_intra_op_parallelism_threads(threads)
    except RuntimeError:
        pass
