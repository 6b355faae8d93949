"""OpenVINO, on processors of Intel and others: `model.xml` and `model.bin`."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.records import checks
from tfamp.serving.runtimes.manifest import Manifest
from tfamp.serving.runtimes.signature import LoadedModel

FILE = "model.xml"


def load(folder: Path, manifest: Manifest, threads: int) -> LoadedModel:
    """Returns a model that OpenVINO runs."""
    return OpenVINOModel(folder, manifest, threads)


class OpenVINOModel(LoadedModel):
    """A model that OpenVINO runs, with a request of its own in each thread."""

    runtime = "openvino"

    def __init__(self, folder: Path, manifest: Manifest, threads: int) -> None:
        super().__init__(folder, manifest.signature)
        openvino = checks.require(
            "openvino", extra="openvino", purpose=f"Running {str(folder)!r}"
        )
        self._compiled = openvino.Core().compile_model(
            str(folder / FILE),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "f32",
            },
        )
        self._requests = threading.local()

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the outputs by name for one batch of all inputs by name."""
        found = self._request().infer(dict(inputs))
        return {
            spec.name: np.array(found[spec.name]) for spec in self.signature.outputs
        }

    def _request(self) -> Any:
        request = getattr(self._requests, "request", None)
        if request is None:
            request = self._requests.request = self._compiled.create_infer_request()
        return request
