"""A Keras model in memory, such as `tfamp.freeze` returns, or from a `.keras` file."""

from pathlib import Path

import keras
from absl import logging

from tfamp.models import load_model
from tfamp.serving.exports.samples import tried_inputs
from tfamp.serving.exports.tracing import trace
from tfamp.serving.runtimes.manifest import execution_text
from tfamp.serving.runtimes.saved_model import set_threads
from tfamp.serving.runtimes.tensorflow_model import TensorFlowModel
from tfamp.stepping.arguments import check_built


def load(model: keras.Model | Path, threads: int) -> TensorFlowModel:
    """Returns a Keras model that answers by one function, traced and chosen here.

    Raises:
        TypeError: It is no Keras model.
        ValueError: It is not built, or its inputs cannot be told.
    """
    set_threads(threads)
    path = model if isinstance(model, Path) else None
    return KerasModel(load_model(path) if path else model, path)


class KerasModel(TensorFlowModel):
    """A Keras model by its concrete function, or by that under XLA for batches of 1.

    Attributes:
        execution: What was chosen for batches of 1, by how much.
    """

    runtime = "keras"

    def __init__(self, model: keras.Model, path: Path | None) -> None:
        check_built(model, "load")
        traced = trace(model)
        super().__init__(path, traced.signature, traced.function)
        self._traced = traced  # holds the variables
        self.execution = self.choose(tried_inputs(traced, None), (1,))
        logging.info("%r: %s", model.name, *execution_text(self.execution))
