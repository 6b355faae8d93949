"""LiteRT, which phones run too: one file, `model.tflite`."""

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfamp.records import checks
from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import LoadedModel, dtype_named

FILE = "model.tflite"


def load(folder: Path, manifest: Manifest, threads: int) -> LoadedModel:
    """Returns a model that LiteRT runs."""
    return LiteRTModel(folder, manifest, threads)


class LiteRTModel(LoadedModel):
    """A model that LiteRT runs, one batch at a time: an interpreter is not shared."""

    runtime = "litert"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        super().__init__(folder, manifest.signature)
        interpreter = checks.require(
            "ai_edge_litert.interpreter",
            extra="litert",
            purpose=f"Running {str(folder)!r}",
        )
        made = interpreter.Interpreter(
            model_path=str(folder / FILE), num_threads=threads
        )
        self._interpreter = made
        self._runner = made.get_signature_runner()
        self._lock = threading.Lock()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        with self._lock:
            found = self._runner(**inputs)
            return {
                spec.name: np.array(found[spec.name], dtype_named(spec.dtype))
                for spec in self.signature.outputs
            }
