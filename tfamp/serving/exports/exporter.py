"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import functools
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from tfamp.keras_hooks import fake_quantization, structure
from tfamp.records import checks, console
from tfamp.records.checks import short_error
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_bytes, format_seconds
from tfamp.serving import gate
from tfamp.serving.exports import int8_layers, tracing, writers
from tfamp.serving.exports.tracing import Traced, trace
from tfamp.serving.exports.writers import DTYPES, POSSIBLE, Request
from tfamp.serving.frozen import freeze
from tfamp.serving.gate import Parity
from tfamp.serving.runtimes import PACKAGES, load_exported, of_trace, open_model
from tfamp.serving.runtimes import manifest as folders
from tfamp.serving.runtimes.manifest import RUNTIMES, Manifest
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.stepping.arguments import check_built, dataset_of, first_batch
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import MIN_GAIN, interval_of_ratios

BATCH = 32
_TURNS, _MIN_TURNS = 9, 5
_MIN_CALLS, _MAX_CALLS, _UNTIMED = 2, 200, 2
_AUTO = "auto"
_PART_FOR_TIMING, _MOST_SECONDS = 0.3, 10.0  # of the budget
_MAX_FLOAT32_DIFFERENCE = 1e-2  # of the spread of an output, by the order of sums
_SAVED_MODEL = "saved_model float32"
_FIGURES = dict.fromkeys(("size", "batch 1", "difference"), console.RIGHT)
_COLUMNS = {"candidate": console.WHOLE, **_FIGURES, "what became": console.FOLD}
Turns = list[list[float]]  # the seconds of each call, turn by turn
Raced = dict[tuple[str, int], Turns]  # by model and batch size


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
    """A model that was exported; `print` shows what was tried and the verdict."""

    path: str
    format: str
    dtype: str
    scheme: str  # "dynamic" or "static"; "" for floats
    verdict: str  # "as good and faster", "as good, not faster", "worse" or "undecided"
    difference: float  # of outputs from float32's, a root mean square over their spread
    size_bytes: int  # of all files
    float32_bytes: int  # of the model's weights in float32
    kept: dict[str, str] = dataclasses.field(default_factory=dict)  # layer -> why
    parity: Parity | None = None  # the comparison on validation data, if there is any
    latency: tuple[Latency, ...] = ()  # by batch size; empty where nothing was timed
    tried: tuple[Tried, ...] = ()

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model, as `tfamp.load_exported` does."""
        return load_exported(self.path, threads=threads)

    def table(self) -> str:
        """Returns what was tried, what was written, and the verdict."""
        rows = [
            (
                x.name,
                "" if x.size_bytes is None else format_bytes(x.size_bytes),
                "" if x.seconds is None else format_seconds(x.seconds),
                "" if x.difference is None else f"{x.difference:.1e}",
                f"{x.outcome}: {x.reason}" if x.reason else x.outcome,
            )
            for x in self.tried
        ]
        advice = "Only outputs were compared: pass `validation=(x, y)` for a verdict."
        size, full = format_bytes(self.size_bytes), format_bytes(self.float32_bytes)
        told = [
            f"{self.path}: {size} for {full} of float32 weights; {self.verdict}.",
            *(f"{path} stays in float32: {why}." for path, why in self.kept.items()),
            advice if self.parity is None else str(self.parity),
        ]
        return console.text_of(console.table(_COLUMNS, rows), *told)


class _Candidate(NamedTuple):
    """An export that was written and runs."""

    request: Request
    folder: Path  # where it lies until it is chosen
    manifest: Manifest
    model: LoadedModel
    difference: float
    size_bytes: int
    parity: Parity | None  # None without validation data


class _Source(NamedTuple):
    """What all candidates are made from and held against."""

    model: keras.Model  # in float32
    sample: Any  # inputs as it takes them; None where nobody gave any
    traced: Traced
    unrolled: Callable[[], Traced]  # without loops
    plain: LoadedModel  # the same in TensorFlow
    inputs: dict[str, np.ndarray]  # by name, to try exports with
    reference: gate.Reference | None  # None without validation data
    tolerance: float


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

    A copy goes back to float32 and is lowered by the runtime's own tools, under any
    policy. It is loaded, run, and compared on the validation data before it is written.

    Args:
        model: A built model, compiled or not.
        path: The folder to write: a new name, or a former export, which is replaced.
        format: "saved_model", "litert", "onnx" or "openvino"; "auto" keeps the fastest
            that passes of all that are installed, the most exact within 5 % of it.
        dtype: "float32", "float16", "bfloat16" or "int8" for the weights; inputs and
            outputs stay as they are. "auto" tries float32 and int8.
        scheme: For integers: "dynamic" measures the range of activations at each call,
            "static" once, on `calibration`. None takes what the format has, or all.
        calibration: Inputs for "static": x, (x, y), or a dataset of batches.
        validation: (x, y) or a dataset of batches, on which accuracy or loss are
            compared; of x alone outputs are. Without it the verdict is "undecided".
        tolerance: By how much the metric may be worse.
        keep_float32: Paths of layers that stay in float32, beside the head and those
            that integers spoil on the validation data.
        budget_seconds: For writing and timing; later candidates are left out.
        write_failed: Whether an export that is worse is written nevertheless.

    Raises:
        ValueError: The format cannot express the model or dtype, or it is worse than
            the tolerance allows. What was at `path` stays.
    """
    target = Path(path)
    if of_a_file := {".onnx": "onnx", ".tflite": "litert"}.get(target.suffix):
        raise ValueError(
            f"`path` is {str(path)!r}, the name of a file; expected one of a folder. "
            f"Write `tfamp.export(model, {target.stem!r}, format={of_a_file!r})`."
        )
    checks.choice("format", format, (_AUTO, *RUNTIMES))
    checks.choice("dtype", dtype, (*DTYPES, _AUTO))
    checks.choice("scheme", scheme or "static", ("dynamic", "static"))
    checks.fraction("tolerance", tolerance, closed=False)
    checks.positive("budget_seconds", budget_seconds)
    ends = time.monotonic() + budget_seconds * (1 - _PART_FOR_TIMING)
    is_one = _AUTO not in (format, dtype)
    ways = POSSIBLE[format].get(dtype, ()) if is_one else ("",)
    if not ways or scheme is not None and is_one and scheme not in ways:
        others = [name for name, dtypes in POSSIBLE.items() if dtype in dtypes]
        told = f"Format {format!r} has no {dtype} {scheme or ''}".rstrip()
        told += f", or no runtime that loads it; it has {POSSIBLE[format]}."
        raise ValueError(f"{told} Formats with {dtype}: {others}.")
    check_built(model, "export")
    folders.check_target(target)
    validation, calibration = (
        x if x is None else dataset_of(x, BATCH, needs_targets=False, name=name)
        for x, name in ((validation, "validation"), (calibration, "calibration"))
    )
    copy, ranges = tracing.float32_copy(model), fake_quantization.ranges_of(model)
    fake_quantization.detach_all(copy)
    if is_one and scheme is None:  # by the ranges that it was trained with, if any
        trained = any(ranges.values()) and calibration is not None and dtype == "int8"
        # LiteRT would round the outputs of products, too, which no training has seen.
        scheme = "static" if trained and format != "litert" else ways[0]
    given = calibration if validation is None else validation
    first = None if given is None else first_batch(given)
    sample = first[0] if isinstance(first, tuple) else first
    traced = trace(copy, sample)
    plain = of_trace(traced)
    batches: tuple[Any, ...] = ()
    if calibration is not None:
        batches = tracing.calibration_batches(calibration, traced)
    elif scheme == "static":
        told = "`scheme` is 'static' without `calibration`, which tells ranges."
        raise ValueError(f"{told} Pass some tens of training examples.")
    keep = int8_layers.layers_kept(copy, keep_float32)
    for layer_path, layer, _ in structure.walk(copy) if ranges else ():
        if fake_quantization.kernels_of(layer) and layer_path not in ranges:
            keep.setdefault(layer_path, "it was trained without rounding")
    kinds = int8_layers.WITH_ATTENTION
    products_only = any(isinstance(x, kinds) for x in structure.layers_of(copy))
    requests = [
        Request(
            *(kind, number, way),
            calibration=batches if way == "static" else (),
            keep=keep if way else {},
            ranges={n: (x[0][0], x[0][1]) for n, x in ranges.items() if x and x[0][2]},
            products_only=products_only,
        )
        for number in (("float32", "int8") if dtype == _AUTO else (dtype,))
        for kind in (RUNTIMES if format == _AUTO else (format,))
        for way in POSSIBLE[kind].get(number, ())
        if way in ("", scheme) or (scheme is None and (way != "static" or batches))
    ]
    inputs, reference = tracing.tried_inputs(plain, traced, sample), None
    if validation is not None:
        exact = plain
        if ranges:  # it answers as it was trained
            fake_quantization.attach_all(copy, ranges)
            exact = of_trace(trace(copy, sample))
            fake_quantization.detach_all(copy)
        loss = getattr(model, "loss", None)
        reference = gate.reference_of(exact, validation, traced.by_name, loss)
    unrolled = functools.cache(functools.partial(tracing.unrolled, copy, sample))
    made = _Source(copy, sample, traced, unrolled, plain, inputs, reference, tolerance)
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        passed, tried = _written(made, Path(scratch), requests, ends, write_failed)
        models = {each.request.name: each.model for each in passed}
        sizes = [1] if reference is None else [1, BATCH]
        if reference is not None:
            models.setdefault(_SAVED_MODEL, plain)
        taken: Raced = {}
        if len(models) > 1 or reference is not None:
            seconds = min(_MOST_SECONDS, budget_seconds * _PART_FOR_TIMING)
            taken = raced(models, inputs, sizes, seconds=seconds)
        # A gain that is not shown is none: then the more exact one it is.
        paces = {name: median(taken[name, 1]) for name in models if taken}
        most = MIN_GAIN * min(paces.get(x.request.name, 0) for x in passed)
        close = [x for x in passed if paces.get(x.request.name, 0) <= most]
        best = min(close, key=lambda each: each.difference)
        chosen, parity = best.request, best.parity
        if parity is not None:
            against = {"SavedModel": _SAVED_MODEL}
            plains = [x.request for x in passed if x.request.dtype == "float32"]
            if rivals := [x for x in plains if x.name != _SAVED_MODEL]:
                rival = min(rivals, key=lambda each: paces[each.name])
                against[f"best float32 ({rival.format})"] = rival.name
            speedups = []
            for size, (name, other) in itertools.product(sizes, against.items()):
                pairs = zip(taken[other, size], taken[chosen.name, size], strict=True)
                ratios = [float(np.median(x) / np.median(y)) for x, y in pairs]
                found = gate.Speedup(name, size, interval_of_ratios(ratios))
                speedups += [found] if other != chosen.name else []
            parity = parity.timed(speedups)
        verdict = parity.verdict if parity else "undecided"
        judged = {"verdict": verdict, "parity": parity.to_dict() if parity else None}
        dataclasses.replace(best.manifest, gate=judged).write(best.folder)
        folders.place(best.folder, target)
    for at, each in enumerate(tried):
        outcome = "chosen" if each.name == chosen.name else each.outcome
        pace = paces.get(each.name) if outcome in ("chosen", "passed") else None
        tried[at] = dataclasses.replace(each, outcome=outcome, seconds=pace)
    own = {n: itertools.chain(*taken[chosen.name, n]) for n in sizes if taken}
    return Export(
        *(str(target), chosen.format, chosen.dtype, chosen.scheme),
        verdict=verdict,
        difference=best.difference,
        size_bytes=best.size_bytes,
        float32_bytes=4 * sum(x.value.shape.num_elements() or 0 for x in model.weights),
        kept=dict(chosen.keep),
        parity=parity,
        latency=tuple(Latency.of(size, [*each]) for size, each in own.items()),
        tried=tuple(tried),
    )


def _written(
    made: _Source, scratch: Path, requests: list[Request], ends: float, may_fail: bool
) -> tuple[list[_Candidate], list[Tried]]:
    """Writes candidates until the budget ends: those that pass, and all tried."""
    is_alone = len(requests) == 1
    passed: list[_Candidate] = []
    tried: list[Tried] = []
    for request in requests:
        outcome, why, known = "left out", "", dict[str, Any]()
        lacking = () if is_alone else writers.missing(request.format)
        if lacking:
            extra = f"`pip install 'tfamp[{request.format}]'`"
            why = f"{', '.join(lacking)} is not installed, {extra}"
        elif time.monotonic() > ends and passed:
            why = "the budget was used up"
        else:
            try:
                write = functools.partial(_write, made, scratch)
                found = int8_layers.sparing(made.model, made.sample, request, write)
                parity, outcome = found.parity, "passed"
                known = {"size_bytes": found.size_bytes, "difference": found.difference}
                if parity is not None and parity.verdict == "worse":
                    outcome, why = "failed", parity.reason
                if outcome == "passed" or may_fail and is_alone:
                    passed.append(found)
            except Exception as error:  # converters raise anything
                if is_alone:
                    raise
                outcome, why = "failed", short_error(error)
        tried.append(Tried(request.name, outcome, why, **known))
    if not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in tried)
        told = f"Nothing was written, as no candidate is as good as float32: {lines} "
        raise ValueError(f"{told}Pass `keep_float32=`, or `write_failed=True`.")
    return passed, tried


def _write(made: _Source, scratch: Path, request: Request) -> _Candidate:
    """Writes an export with `export.json` into a folder of its own, and runs it."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    traced = made.traced
    if traced.looping and request.format in ("litert", "openvino"):
        traced = made.unrolled()
    if request.format == "saved_model" and request.dtype != "float32":
        lowered = freeze(made.model, request.dtype, sample=made.sample)
        traced = trace(lowered, made.sample)
    writers.write(traced, folder, request)
    names = ("tfamp", "tensorflow", "keras", "numpy", *PACKAGES[request.format])
    loaded = ((name, sys.modules.get(name)) for name in names)
    manifest = Manifest(
        *(request.format, request.dtype, request.scheme),
        signature=made.traced.signature,
        files=folders.digests(folder),
        versions={n: str(getattr(x, "__version__", "unknown")) for n, x in loaded},
        kept=dict(request.keep),
    )
    manifest.write(folder)
    model = open_model(folder, manifest)
    wanted = made.plain.run(made.inputs)
    model.run({name: x[:1] for name, x in made.inputs.items()})  # another batch
    found = model.run(made.inputs)
    off = max(gate.difference(found[name], exact) for name, exact in wanted.items())
    is_wrong = request.dtype == "float32" and off > _MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(off):
        told = f"The exported file answers otherwise than the model, by {off:.1e} of "
        raise ValueError(f"{told}outputs' spread. Export another format or dtype.")
    parity = None
    if made.reference is not None:
        parity = gate.check_parity(made.reference, model, tolerance=made.tolerance)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return _Candidate(request, folder, manifest, model, off, size, parity)


def raced(
    models: Mapping[str, LoadedModel],
    inputs: Mapping[str, np.ndarray],
    sizes: Collection[int],
    *,
    seconds: float,
) -> Raced:
    """Returns the seconds of each call by model, batch size and turn.

    Every side calls for the same time within a turn, so that what slows the machine
    slows all of them; who goes first changes. Where calls are slow turns are fewer.
    """
    clock = time.perf_counter
    keys = [(name, size) for size in sizes for name in models]
    found: Raced = {key: [] for key in keys}
    length = seconds / _TURNS / len(keys)
    ends = clock() + 2 * seconds  # what warms up has its time, too
    for turn in range(_TURNS):
        if turn >= _MIN_TURNS and clock() >= ends:
            break
        first = turn % len(keys)
        for key in keys[first:] + keys[:first]:
            run, size = models[key[0]].run, key[1]
            batch = {name: x[np.arange(size) % len(x)] for name, x in inputs.items()}
            for _ in range(_UNTIMED):
                run(batch)  # caches are cold again
            taken: list[float] = []
            until = clock() + length
            while len(taken) < (_MAX_CALLS if clock() < until else _MIN_CALLS):
                began = clock()
                run(batch)
                taken.append(clock() - began)
            found[key].append(taken)
    return found


def median(turns: Turns) -> float:
    """Returns the median over turns of the median call."""
    return float(np.median([*map(np.median, turns)]))
