"""One candidate: written, run in a fresh process, and compared."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from absl import logging

from tfamp.machine.cpus import instruction_sets
from tfamp.serving.exports import onnx_files, writers
from tfamp.serving.exports.int8_layers import Kept, keep_guilty
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.gate import size_of
from tfamp.serving.parity import FreshProcess, Parity
from tfamp.serving.runtimes import fresh_process, open_model
from tfamp.serving.runtimes.manifest import Manifest, digests
from tfamp.serving.runtimes.signature import LoadedModel

WRITERS = {
    "saved_model": writers.write_saved_model,
    "litert": writers.write_litert,
    "onnx": onnx_files.write,
    "openvino": writers.write_openvino,
}
# Of the spread of an output: what float32 sums in another order come to, and more.
MAX_FLOAT32_DIFFERENCE = 1e-2


@dataclasses.dataclass
class Candidate:
    """An export that was written and runs.

    Attributes:
        request: What it was to be.
        folder: Where it lies until it is chosen.
        manifest: What its `export.json` says.
        difference: The largest from the float32 model's outputs, over their spread.
        cost: What it took a fresh process.
        parity: What the gate says of it; None without validation data.
        kept: The search for layers that integers spoil; None where there was none.
        threads: Of a prediction; None for all cores.
        slowdown: Times the fastest one it takes.
        seconds: Of a call with one example; None where it was not timed.
    """

    request: Request
    folder: Path
    manifest: Manifest
    difference: float
    cost: FreshProcess
    parity: Parity | None = None
    kept: Kept | None = None
    threads: int | None = None
    slowdown: float = 1.0
    seconds: float | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files."""
        return size_of(self.folder) or 0

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model in its runtime, from where it was written."""
        return open_model(self.folder, self.manifest, threads)


def write(source: Source, request: Request, folder: Path) -> Candidate:
    """Writes an export with `export.json` into an empty folder, and runs it."""
    WRITERS[request.format](source.trace_for(request), folder, request)
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
    inputs = source.tried_inputs()
    answered = fresh_process.ask(folder, inputs)
    difference = largest_difference(source.traced.call(inputs), answered.outputs)
    is_wrong = request.dtype == "float32" and difference > MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(difference):
        raise ValueError(
            f"The exported file answers otherwise than the model, by {difference:.1e} "
            "of the outputs' spread. Export another format or dtype."
        )
    cost = FreshProcess(request.format, answered.seconds, answered.peak_bytes)
    return Candidate(request, folder, manifest, difference, cost)


def write_sparing(
    source: Source,
    request: Request,
    folder: Path,
    compare: Callable[[LoadedModel], Parity] | None,
) -> Candidate:
    """Writes an export, of integers with as many layers in float as the gate asks for.

    Layers that the request keeps stay kept. `compare` is the gate, None without
    validation data.
    """
    if compare is None or request.dtype != "int8":
        alone = write(source, request, folder)
        alone.parity = compare(alone.load()) if compare else None
        return alone
    written: dict[tuple[str, ...], Candidate] = {}

    def evaluate(paths: tuple[str, ...]) -> Parity:
        place = folder / str(len(written))
        place.mkdir()
        reasons = dict.fromkeys(paths, "int8 spoils it") | dict(request.keep)
        trial = write(source, dataclasses.replace(request, keep=reasons), place)
        trial.parity = compare(trial.load())
        written[paths] = trial
        return trial.parity

    kept = keep_guilty(
        *(source.model, source.sample, evaluate),
        scheme=request.scheme,
        fixed=request.keep,
    )
    found = written[tuple(kept.layers)]
    if kept.layers:
        logging.info("%s keeps %s in float32.", request.name, tuple(kept.layers))
    keep = {**request.keep, **kept.layers}
    plan = {**(found.manifest.plan or {}), "int8": kept.to_dict()}
    return dataclasses.replace(
        found,
        request=dataclasses.replace(request, keep=keep),
        manifest=dataclasses.replace(found.manifest, kept=keep, plan=plan),
        kept=kept,
    )


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
        held = np.isfinite(exact)
        if exact.shape != other.shape or (held != np.isfinite(other)).any():
            return float("inf")
        if held.any():
            spread = exact[held].std() or abs(exact[held]).max() or 1.0
            largest = max(largest, float(abs(exact - other)[held].max() / spread))
    return round(largest, 12)


def _versions(format: str) -> dict[str, str]:
    """Returns the versions of what wrote an export."""
    import tfamp

    found = {"tfamp": tfamp.__version__, "python": platform.python_version()}
    for package in ("tensorflow", "keras", "numpy", *PACKAGES[format]):
        try:
            found[package.replace("_", "-")] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
