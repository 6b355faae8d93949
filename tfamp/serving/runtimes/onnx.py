"""ONNX Runtime: one file, `model.onnx`, which servers and browsers run too."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfamp.records import checks
from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import LoadedModel

FILE = "model.onnx"
_ERRORS_ONLY = 3


def load(folder: Path, manifest: Manifest, threads: int) -> LoadedModel:
    """Returns a model that ONNX Runtime runs."""
    return OnnxModel(folder, manifest, threads)


class OnnxModel(LoadedModel):
    """A model that ONNX Runtime runs."""

    runtime = "onnx"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        super().__init__(folder, manifest.signature)
        onnxruntime = checks.require(
            "onnxruntime", extra="onnx", purpose=f"Running {str(folder)!r}"
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _ERRORS_ONLY
        # Threads that spin while they wait take the cores of others.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(folder / FILE), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [spec.name for spec in manifest.signature.outputs]

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        found = self._session.run(self._outputs, dict(inputs))
        return dict(zip(self._outputs, found, strict=True))
