"""TensorFlow's SavedModel, which TF Serving takes as it is."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import LoadedModel

_SIGNATURE = "serving_default"


def load(folder: Path, manifest: Manifest, threads: int) -> LoadedModel:
    """Returns a model that TensorFlow runs."""
    return SavedModel(folder, manifest, threads)


class SavedModel(LoadedModel):
    """A SavedModel, by its concrete function.

    The threads of TensorFlow are those of the whole process: they are set where
    TensorFlow has not started yet.
    """

    runtime = "saved_model"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        super().__init__(folder, manifest.signature)
        try:
            if not tf.config.threading.get_intra_op_parallelism_threads():
                tf.config.threading.set_intra_op_parallelism_threads(threads)
        except RuntimeError:
            pass  # it runs already, with threads of its own
        self._loaded = tf.saved_model.load(str(folder))
        self._function = self._loaded.signatures[_SIGNATURE]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        found = self._function(
            **{name: tf.constant(value) for name, value in inputs.items()}
        )
        return {spec.name: found[spec.name].numpy() for spec in self.signature.outputs}
