"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import logging

from tfamp.keras_hooks import fake_quantization, structure
from tfamp.machine.cpus import instruction_sets
from tfamp.records import checks, console
from tfamp.records.checks import short_error
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_seconds
from tfamp.serving.exports import int8_layers, turns, writers
from tfamp.serving.exports.folders import check_target, place
from tfamp.serving.exports.source import (
    calibration_batches,
    float32_copy,
    inputs_in,
    tried_inputs,
)
from tfamp.serving.exports.tracing import Traced, trace
from tfamp.serving.exports.turns import Raced, median
from tfamp.serving.exports.writers import (
    DTYPES,
    PACKAGES,
    POSSIBLE,
    SCHEMES,
    Request,
    check_possible,
    missing,
)
from tfamp.serving.frozen import freeze
from tfamp.serving.gate import (
    Parity,
    Reference,
    Speedup,
    check_parity,
    difference,
    reference_of,
)
from tfamp.serving.runtimes import load_exported, open_model
from tfamp.serving.runtimes.manifest import RUNTIMES, Manifest, digests
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.runtimes.tensorflow_models import of_trace
from tfamp.stepping.arguments import check_built, dataset_of, first_batch
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import MIN_GAIN

BATCH = 32
_AUTO = "auto"
# The part of the budget that timing may take, and the most of it.
_PART_FOR_TIMING, _MOST_SECONDS = 0.3, 10.0
# Of the spread of an output: what float32 sums in another order come to, and more.
_MAX_FLOAT32_DIFFERENCE = 1e-2
_SAVED_MODEL = "saved_model float32"
_COLUMNS: dict[str, dict[str, Any]] = {
    "candidate": console.WHOLE,
    "size": console.RIGHT,
    "batch 1": console.RIGHT,
    "difference": console.RIGHT,
    "what became of it": console.FOLD,
}


@dataclasses.dataclass(frozen=True)
class Tried(Record):
    """A file that was written to see how good and how fast it is."""

    name: str  # format, dtype and scheme, such as "onnx int8 dynamic"
    outcome: str  # "chosen", "passed", "failed" or "left out"
    reason: str = ""
    size_bytes: int | None = None
    seconds: float | None = None  # of a batch of one, in turns with the others
    difference: float | None = None  # of its outputs from float32's, over their spread


@dataclasses.dataclass(frozen=True)
class Export(TableRecord):
    """A model that was exported.

    Attributes:
        path: The folder.
        format: The runtime that loads it.
        dtype: "float32", "float16", "bfloat16" or "int8".
        scheme: "dynamic" or "static"; "" for floats.
        verdict: "as good and faster", "as good, not faster", "worse" or "undecided".
        difference: Of its outputs from float32's on the examples that were tried, a
            root mean square over their spread.
        size_bytes: Of all files.
        float32_bytes: Of the model's weights in float32.
        kept: Layer that stays in float32 -> why.
        parity: The comparison on validation data; None without any.
        latency: How long calls take, by batch size; empty where nothing was timed.
        tried: All that was written to be compared.
    """

    path: str
    format: str
    dtype: str
    scheme: str
    verdict: str
    difference: float
    size_bytes: int
    float32_bytes: int
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    parity: Parity | None = None
    latency: tuple[Latency, ...] = ()
    tried: tuple[Tried, ...] = ()

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model, as `tfamp.load_exported` does."""
        return load_exported(self.path, threads=threads)

    def table(self) -> str:
        """Returns what was tried, what was written, and the verdict."""
        rows = [
            (
                each.name,
                "" if each.size_bytes is None else format_bytes(each.size_bytes),
                "" if each.seconds is None else format_seconds(each.seconds),
                "" if each.difference is None else f"{each.difference:.1e}",
                ": ".join(filter(None, (each.outcome, each.reason))),
            )
            for each in self.tried
        ]
        told = [
            f"{self.path}: {format_bytes(self.size_bytes)} for "
            f"{format_bytes(self.float32_bytes)} of float32 weights; {self.verdict}.",
            *(f"{path} stays in float32: {why}." for path, why in self.kept.items()),
            "Only outputs were compared: pass `validation=(x, y)` for a verdict."
            if self.parity is None
            else str(self.parity),
        ]
        return console.text_of(console.table(_COLUMNS, rows), *told)


@dataclasses.dataclass
class _Candidate:
    """An export that was written and runs."""

    request: Request
    folder: Path  # where it lies until it is chosen
    manifest: Manifest
    model: LoadedModel
    difference: float
    size_bytes: int
    parity: Parity | None  # None without validation data


@dataclasses.dataclass
class _Source:
    """What all candidates are made from and held against."""

    model: keras.Model  # in float32
    sample: Any  # inputs as it takes them; None where nobody gave any
    traced: Traced
    inputs: dict[str, np.ndarray]  # by name, to try exports with
    reference: Reference | None  # None without validation data
    tolerance: float
    scratch: Path


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    format: str = _AUTO,
    dtype: str = "float32",
    scheme: str | None = None,
    calibration: Any = None,
    validation: Any = None,
    tolerance: float = 0.005,
    keep_float32: Iterable[str] = (),
    budget_seconds: float = 120.0,
    write_failed: bool = False,
) -> Export:
    """Writes a model for a runtime that only predicts, and compares it with float32.

    A copy of the model goes back to float32 and is lowered by the runtime's own tools,
    so that models under any policy, and frozen ones, can be exported; the model itself
    stays as it is. The file is loaded, run, and compared on the validation data, before
    it takes its place.

    Args:
        model: A built model, compiled or not. Preprocessing layers come along where the
            format has their operations.
        path: The folder to write: a new name, or a former export, which is replaced.
        format: "saved_model", "litert", "onnx" or "openvino". "auto" writes all that
            are installed, times them in turns, and keeps the fastest that passes; the
            most exact one of those within 5 % of it.
        dtype: "float32", "float16", "bfloat16" or "int8" for the weights; inputs and
            outputs stay as they are. "auto" tries float32 and int8.
        scheme: For integers: "dynamic" measures the range of activations at each call,
            "static" once, on `calibration`. None takes the first that the format has,
            or tries all under "auto".
        calibration: Inputs for "static": x, (x, y), or a dataset of batches; at most
            512 examples are read. Float inputs must be finite.
        validation: (x, y) or a dataset of batches, on which the accuracy is compared
            where labels are classes, else the loss of `compile`; or x alone, for the
            outputs. Without it the verdict is "undecided".
        tolerance: By how much the metric may be worse.
        keep_float32: Paths of layers that stay in float32, beside the head and those
            that integers spoil, which are found where there is validation data.
        budget_seconds: For writing and timing candidates; what it does not suffice for
            is left out, but the first.
        write_failed: Whether an export that is worse is written nevertheless.

    Returns:
        What was written: `.verdict`, `.parity`, `.size_bytes`, `.latency`, `.kept`,
        `.tried`, and `.load()`; `print` shows a table.

    Raises:
        FileExistsError: Something else than an export is at `path`.
        ImportError: A package is missing; the message names the extra of tfamp.
        OSError: The disk is full, or does not let the folder be written.
        TypeError: `model` is not a Keras model.
        ValueError: The format cannot express the model or dtype, the file does not run,
            or it is worse than the tolerance allows. What was at `path` stays.

    Example:
        >>> import keras, tempfile
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> path = f"{tempfile.mkdtemp()}/model"
        >>> export(model, path, format="onnx", dtype="bfloat16")
        Traceback (most recent call last):
        ...
        ValueError: Format 'onnx' has no bfloat16, or no runtime that loads it; ...
        >>> found = export(model, path)  # doctest: +SKIP
        >>> found.load().predict([[1.0, 2.0, 3.0, 4.0]]).shape  # doctest: +SKIP
        (1, 2)
    """
    target = Path(path)
    checks.choice("format", format, (_AUTO, *RUNTIMES))
    checks.choice("dtype", dtype, (*DTYPES, _AUTO))
    if scheme is not None:
        checks.choice("scheme", scheme, SCHEMES)
    checks.fraction("tolerance", tolerance, closed=False)
    checks.positive("budget_seconds", budget_seconds)
    is_told = scheme is not None or _AUTO in (format, dtype) or dtype != "int8"
    if _AUTO not in (format, dtype):
        check_possible(format, dtype, scheme)
        scheme = scheme or POSSIBLE[format][dtype][0]
    check_built(model, "export")
    check_target(target)
    formats = RUNTIMES if format == _AUTO else (format,)
    dtypes = ("float32", "int8") if dtype == _AUTO else (dtype,)
    validation, calibration = (
        None
        if data is None
        else dataset_of(data, BATCH, needs_targets=False, name=name)
        for data, name in ((validation, "validation"), (calibration, "calibration"))
    )
    ends = time.monotonic() + budget_seconds * (1 - _PART_FOR_TIMING)
    copy, ranges = float32_copy(model), fake_quantization.ranges_of(model)
    fake_quantization.detach_all(copy)
    if any(ranges.values()) and calibration is not None and not is_told:
        scheme = "static"  # by the ranges that it was trained with
    copy.loss = getattr(model, "loss", None)  # what the gate compares by
    given = calibration if validation is None else validation
    sample = None if given is None else inputs_in(first_batch(given))
    traced = trace(copy, sample)
    requests = _requests(
        copy, traced, formats, dtypes, scheme, calibration, keep_float32, ranges
    )
    inputs, reference = tried_inputs(traced, sample), None
    if validation is not None:
        names = [spec.name for spec in traced.signature.outputs]
        fake_quantization.attach_all(copy, ranges)  # it answers as it was trained
        reference = reference_of(copy, validation, names)
        fake_quantization.detach_all(copy)
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        source = _Source(
            copy, sample, traced, inputs, reference, tolerance, Path(scratch)
        )
        passed, tried = _written(source, requests, ends, may_fail=write_failed)
        seconds = min(_MOST_SECONDS, budget_seconds * _PART_FOR_TIMING)
        best, taken = _fastest(source, passed, seconds)
        tried = [
            dataclasses.replace(each, seconds=median(taken[each.name, 1]))
            if taken and each.outcome == "passed"
            else each
            for each in tried
        ]
        chosen, parity = best.request, best.parity
        if parity is not None:
            parity = parity.timed(_speedups(best, passed, taken))
        verdict = parity.verdict if parity else "undecided"
        gate = {"verdict": verdict, "parity": parity.to_dict() if parity else None}
        dataclasses.replace(best.manifest, gate=gate).write(best.folder)
        place(best.folder, target)
    own = {size: each for (name, size), each in taken.items() if name == chosen.name}
    latency = [Latency.of(n, [*itertools.chain(*own[n])]) for n in sorted(own)]
    return Export(
        *(str(target), chosen.format, chosen.dtype, chosen.scheme),
        verdict=verdict,
        difference=best.difference,
        size_bytes=best.size_bytes,
        float32_bytes=4 * sum(x.value.shape.num_elements() or 0 for x in model.weights),
        kept=dict(chosen.keep),
        parity=parity,
        latency=tuple(latency),
        tried=tuple(
            dataclasses.replace(each, outcome="chosen")
            if each.name == chosen.name
            else each
            for each in tried
        ),
    )


def _requests(
    model: keras.Model,
    traced: Traced,
    formats: Sequence[str],
    dtypes: Sequence[str],
    scheme: str | None,
    calibration: Any,
    keep_float32: Iterable[str],
    ranges: Mapping[str, Any],
) -> list[Request]:
    """Returns what to write, in the order in which it is tried."""
    has_batches = calibration is not None
    batches = calibration_batches(calibration, traced) if has_batches else ()
    keep = int8_layers.layers_kept(model, keep_float32)
    for path, layer, _ in structure.walk(model) if ranges else ():
        if fake_quantization.kernels_of(layer) and path not in ranges:
            keep.setdefault(path, "it was trained without rounding")
    seen = {path: found[0] for path, found in ranges.items() if found and found[0][2]}
    products_only = int8_layers.has_attention(model)
    found = [
        Request(
            *(format, dtype, way),
            calibration=batches if way == "static" else (),
            keep=keep if way else {},
            ranges={path: (low, high) for path, (low, high, _) in seen.items()},
            products_only=products_only,
        )
        for dtype, format in itertools.product(dtypes, formats)
        for way in POSSIBLE[format].get(dtype, ())
        if way in ("", scheme) or (scheme is None and (way != "static" or batches))
    ]
    if not batches and any(request.scheme == "static" for request in found):
        raise ValueError(
            "`scheme` is 'static', and there is no `calibration`; expected inputs that "
            "tell the ranges of activations. Pass some tens of training examples."
        )
    return found


def _written(
    source: _Source, requests: Sequence[Request], ends: float, *, may_fail: bool
) -> tuple[list[_Candidate], list[Tried]]:
    """Writes candidates until the budget ends: those that pass, and all tried."""
    is_alone = len(requests) == 1
    passed: list[_Candidate] = []
    tried: list[Tried] = []
    for request in requests:
        name = request.name
        lacking = () if is_alone else missing(request.format)
        extra = f"`pip install 'tfamp[{request.format}]'`"
        why = f"{', '.join(lacking)} is not installed, {extra}" if lacking else ""
        if time.monotonic() > ends and passed:
            why = "the budget was used up"
        if why:
            tried.append(Tried(name, "left out", why))
            continue
        try:
            found = _sparing(source, request)
        except Exception as error:  # converters raise anything
            if is_alone:
                raise
            tried.append(Tried(name, "failed", short_error(error)))
            continue
        is_worse = found.parity is not None and found.parity.verdict == "worse"
        why = found.parity.reason if found.parity is not None and is_worse else ""
        if is_worse and is_alone and not may_fail:
            raise ValueError(
                f"{name} is worse than float32: {why} Nothing was written. Keep "
                "layers by `keep_float32=`, take another dtype, or pass "
                "`write_failed=True`."
            )
        outcome = "failed" if is_worse else "passed"
        size, off = found.size_bytes, found.difference
        tried.append(Tried(name, outcome, why, size_bytes=size, difference=off))
        if not is_worse or is_alone:
            passed.append(found)
    if not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in tried)
        raise ValueError(f"No candidate could be exported: {lines}.")
    return passed, tried


def _sparing(source: _Source, request: Request) -> _Candidate:
    """Writes an export, of integers with as many layers in float as the gate asks."""
    written: list[_Candidate] = []

    def evaluate(keep: dict[str, str]) -> Any:
        asked = dataclasses.replace(request, keep={**request.keep, **keep})
        written.append(_write(source, asked))
        return written[-1].parity

    if source.reference is None or request.dtype != "int8":
        evaluate({})
        return written[0]
    kept = int8_layers.spoilt(
        *(source.model, source.sample, evaluate),
        scheme=request.scheme,
        fixed=request.keep,
    )
    if kept:
        logging.info("%s keeps %s in float32.", request.name, tuple(kept))
    keep = {**request.keep, **kept}
    return next(each for each in written if each.request.keep == keep)


def _write(source: _Source, request: Request) -> _Candidate:
    """Writes an export with `export.json` into a folder of its own, and runs it."""
    folder = Path(tempfile.mkdtemp(dir=source.scratch))
    traced = source.traced
    if request.format == "saved_model" and request.dtype != "float32":
        lowered = freeze(source.model, request.dtype, sample=source.sample)
        traced = trace(lowered, source.sample)
    writers.write(traced, folder, request)
    packages = ("tensorflow", "keras", "numpy", *PACKAGES[request.format])
    names = ("tfamp", *(package.replace("_", "-") for package in packages))
    manifest = Manifest(
        *(request.format, request.dtype, request.scheme),
        signature=source.traced.signature,
        files=digests(folder),
        versions={name: _version(name) for name in names},
        processor={"name": platform.processor(), "flags": list(instruction_sets())},
        kept=dict(request.keep),
    )
    manifest.write(folder)
    model = open_model(folder, manifest)
    wanted = source.traced.call(source.inputs)
    prepared = model.prepared(source.inputs)
    model.run({name: value[:1] for name, value in prepared.items()})  # another batch
    found = model.run(prepared)
    off = max(difference(found[name], exact) for name, exact in wanted.items())
    is_wrong = request.dtype == "float32" and off > _MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(off):
        raise ValueError(
            f"The exported file answers otherwise than the model, by {off:.1e} "
            "of the outputs' spread. Export another format or dtype."
        )
    parity = None
    if source.reference is not None:
        parity = check_parity(source.reference, model, tolerance=source.tolerance)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return _Candidate(request, folder, manifest, model, off, size, parity)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _fastest(
    source: _Source, passed: Sequence[_Candidate], seconds: float
) -> tuple[_Candidate, Raced]:
    """Returns the fastest candidate, and the seconds of all by name and batch size.

    Of those within 5 % of the fastest it is the most exact one: a gain that is not
    shown is none. They are timed beside float32 in TensorFlow where they are judged.
    """
    models = {each.request.name: each.model for each in passed}
    is_judged = source.reference is not None
    if is_judged:
        models.setdefault(_SAVED_MODEL, of_trace(source.traced))
    elif len(models) == 1:
        return passed[0], {}
    sizes = {1, BATCH} if is_judged else {1}
    taken = turns.raced(models, source.inputs, sizes, seconds=seconds)
    paces = {each.request.name: median(taken[each.request.name, 1]) for each in passed}
    most = MIN_GAIN * min(paces.values())
    close = [each for each in passed if paces[each.request.name] < most]
    return min(close, key=lambda each: each.difference), taken


def _speedups(
    best: _Candidate, others: Sequence[_Candidate], taken: Raced
) -> list[Speedup]:
    """Returns the speed over a SavedModel, and over the fastest float32 elsewhere."""
    own = best.request.name
    against = {"SavedModel": _SAVED_MODEL}
    plain = [x.request for x in others if x.request.dtype == "float32"]
    if rivals := [x for x in plain if x.name not in (own, _SAVED_MODEL)]:
        rival = min(rivals, key=lambda each: median(taken[each.name, 1]))
        against[f"best float32 ({rival.format})"] = rival.name
    return [
        turns.speedup(taken, other, own, size, against=name)
        for size in (1, BATCH)
        for name, other in against.items()
        if other != own
    ]
