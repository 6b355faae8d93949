"""One candidate: written into a folder, run in a fresh process, compared, loaded."""

import dataclasses
import importlib
import importlib.metadata
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfamp.keras_hooks import structure
from tfamp.machine.cpus import instruction_sets, num_usable_cpus
from tfamp.serving.exports import float32_copy, samples
from tfamp.serving.exports.racing import raced
from tfamp.serving.exports.request import Request
from tfamp.serving.exports.tracing import Traced, trace
from tfamp.serving.frozen import freeze
from tfamp.serving.runtimes import fresh_process
from tfamp.serving.runtimes.loader import open_model
from tfamp.serving.runtimes.manifest import Manifest, digests
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.runtimes.tensorflow_model import TensorFlowModel

_WRITERS = {
    "saved_model": "saved_model_files",
    "litert": "litert_files",
    "onnx": "onnx_files",
    "openvino": "openvino_files",
}
_WITHOUT_LOOPS = ("litert", "openvino")
_PACKAGES = {
    "saved_model": (),
    "litert": ("ai-edge-litert", "ai-edge-quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
# Of the spread of an output: what float32 sums in another order come to, and more.
MAX_FLOAT32_DIFFERENCE = 1e-2
# How long one thread is timed against all cores, and the gain that one has to show.
_THREADS_SECONDS, _MIN_GAIN = 0.3, 1.05


@dataclasses.dataclass
class Source:
    """The model that all candidates are made from, traced as each of them needs it.

    Attributes:
        model: In float32.
        sample: Inputs as it takes them; None where nobody gave any.
        batch_size: Of the calls that are to be fast, beside those of one example.
        traces: By what they were traced for.
    """

    model: keras.Model
    sample: Any
    batch_size: int | None = None
    traces: dict[str, Traced] = dataclasses.field(default_factory=dict)

    @property
    def traced(self) -> Traced:
        """The trace in float32."""
        return self.trace_for(Request("saved_model", "float32"))

    def trace_for(self, request: Request) -> Traced:
        """Returns the trace that a format is written from.

        Raises:
            ValueError: The model has loops, and the format has none.
        """
        kind = request.dtype if request.format == "saved_model" else "float32"
        if request.format in _WITHOUT_LOOPS:
            kind = "unrolled"
        if kind not in self.traces:
            self.traces[kind] = self._trace(kind)
        return self.traces[kind]

    def _trace(self, kind: str) -> Traced:
        model = self.model
        if kind in ("float16", "bfloat16"):
            model = freeze(model, kind, sample=self.sample)
        elif kind == "unrolled" and self._has_loops():
            model = float32_copy.float32_copy(model)
            looping = float32_copy.unroll(model)
            if looping:
                raise ValueError(
                    f"Layers {looping!r} loop over steps that are unknown or more than "
                    f"{float32_copy.MAX_UNROLLED_STEPS}, for which LiteRT and OpenVINO "
                    "have no operation. Export to 'onnx' or 'saved_model', or give the "
                    "input a fixed number of steps."
                )
        return trace(model, self.sample)

    def _has_loops(self) -> bool:
        layers = (layer for _, layer, _ in structure.walk(self.model))
        return any(isinstance(layer, keras.layers.RNN) for layer in layers)


@dataclasses.dataclass
class Candidate:
    """An export that was written and runs."""

    request: Request
    folder: Path
    manifest: Manifest
    difference: float

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*"))

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model in its runtime, from where it was written."""
        return open_model(self.folder, self.manifest, threads)


def write(source: Source, request: Request, folder: Path) -> Candidate:
    """Writes an export with `export.json` into an empty folder, and runs it.

    Raises:
        ImportError: A package is missing.
        ValueError: The format cannot express the model, the file cannot be loaded or
            run in a fresh process, or answers otherwise than the model.
    """
    traced = source.trace_for(request)
    place = f"tfamp.serving.exports.{_WRITERS[request.format]}"
    importlib.import_module(place).write(traced, folder, request)
    manifest = Manifest(
        runtime=request.format,
        dtype=request.dtype,
        scheme=request.scheme,
        signature=source.traced.signature,
        files=digests(folder),
        versions=_versions(request.format),
        processor={"name": platform.processor(), "flags": list(instruction_sets())},
        kept=dict(request.keep),
        plan=request.to_dict(),
    )
    manifest.write(folder)
    inputs = samples.tried_inputs(source.traced, source.sample)
    found = fresh_process.answers(folder, inputs)
    difference = largest_difference(source.traced.call(inputs), found)
    is_wrong = request.dtype == "float32" and difference > MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(difference):
        raise ValueError(
            f"The exported file answers otherwise than the model, by {difference:.1e} "
            "of the outputs' spread. Export another format or dtype."
        )
    candidate = Candidate(request, folder, manifest, difference)
    sizes = {1, source.batch_size or 1}
    model = candidate.load() if request.format == "saved_model" else None
    if isinstance(model, TensorFlowModel):
        changes: dict[str, Any] = {"execution": model.choose(inputs, sizes)}
    else:
        changes = {"threads": _fastest_threads(candidate, inputs, sizes)}
    candidate.manifest = dataclasses.replace(manifest, **changes)
    candidate.manifest.write(folder)
    return candidate


def _fastest_threads(
    candidate: Candidate, inputs: Mapping[str, np.ndarray], sizes: set[int]
) -> int | None:
    """Returns 1 where one thread is faster than all cores, None where it is not.

    Steps of a recurrent layer, and of any small model, are over before other threads
    have woken up.
    """
    if num_usable_cpus() == 1:
        return None
    ways = {"one": candidate.load(threads=1), "all": candidate.load()}
    paces = raced(ways, inputs, sizes, seconds=_THREADS_SECONDS)
    return 1 if paces["all"].slowdown > _MIN_GAIN else None


def largest_difference(
    wanted: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray]
) -> float:
    """Returns an output's largest difference over its spread, inf if not finite.

    Example:
        >>> largest_difference({"y": np.array([0.0, 2.0])}, {"y": np.array([0.0, 1.9])})
        0.1
    """
    largest = 0.0
    for name, exact in wanted.items():
        other = np.asarray(found[name])
        if exact.dtype.kind not in "fiub":
            same = np.array_equal(exact.astype(str), other.astype(str))
            largest = max(largest, 0.0 if same else float("inf"))
            continue
        exact, other = exact.astype(np.float64), other.astype(np.float64)
        if exact.shape != other.shape or not np.array_equal(
            np.isfinite(exact), np.isfinite(other)
        ):
            return float("inf")
        held = np.isfinite(exact)
        if not held.any():
            continue
        spread = float(exact[held].std()) or float(abs(exact[held]).max()) or 1.0
        largest = max(largest, float(abs(exact - other)[held].max()) / spread)
    return round(largest, 12)


def _versions(format: str) -> dict[str, str]:
    """Returns the versions of what wrote an export."""
    import tfamp

    found = {"tfamp": tfamp.__version__, "python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", *_PACKAGES[format]):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
