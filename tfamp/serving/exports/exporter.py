"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import importlib.metadata
import itertools
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from absl import logging

from tfamp.machine.cpus import instruction_sets, num_usable_cpus
from tfamp.records import checks
from tfamp.records.checks import short_error
from tfamp.serving.exports import int8_layers, writers
from tfamp.serving.exports.folders import check_target, place
from tfamp.serving.exports.request import (
    DTYPES,
    PACKAGES,
    POSSIBLE,
    SCHEMES,
    Request,
    check_possible,
    missing,
)
from tfamp.serving.exports.results import Export, Tried
from tfamp.serving.exports.source import (
    Source,
    calibration_batches,
    float32_copy,
    inputs_in,
    spread_text,
)
from tfamp.serving.gate import check_parity, largest_difference, reference_of
from tfamp.serving.parity import FreshProcess, Parity
from tfamp.serving.runtimes import fresh_process, open_model
from tfamp.serving.runtimes.manifest import RUNTIMES, Manifest, digests
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.runtimes.tensorflow_models import of_trace
from tfamp.serving.turns import Turns, median, pace, raced, speedup
from tfamp.stepping.arguments import check_built, dataset_of
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import MIN_GAIN

BATCH = 32
_AUTO = "auto"
# The part of the budget that timing may take, and the most of it; and for one thread
# against all, where there is nothing else to time.
_PART_FOR_TIMING, _MOST_SECONDS, _THREADS_SECONDS = 0.3, 10.0, 0.6
# Of the spread of an output: what float32 sums in another order come to, and more.
_MAX_FLOAT32_DIFFERENCE = 1e-2
_SAVED_MODEL = ("saved_model float32", None)
Compare = Callable[[LoadedModel], Parity]


@dataclasses.dataclass
class Candidate:
    """An export that was written and runs."""

    request: Request
    folder: Path  # where it lies until it is chosen
    manifest: Manifest
    difference: float  # the largest from the float32 model's outputs, over their spread
    cost: FreshProcess  # what it took a fresh process
    size_bytes: int
    parity: Parity | None = None  # None without validation data
    threads: int | None = None  # of a prediction; None for all cores

    @property
    def key(self) -> tuple[str, int | None]:
        """Returns what it is called where it is timed."""
        return self.request.name, self.threads


def export(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    format: str = _AUTO,
    dtype: str = "float32",
    scheme: str | None = None,
    calibration: Any = None,
    validation: Any = None,
    metric: Any = None,
    tolerance: float = 0.005,
    keep_float32: Iterable[str] = (),
    batch_size: int | None = None,
    budget_seconds: float = 120.0,
    write_failed: bool = False,
) -> Export:
    """Writes a model for a runtime that only predicts, and compares it with float32.

    A copy of the model goes back to float32 and is lowered by the runtime's own tools,
    so that models under any policy, and frozen ones, can be exported; the model itself
    stays as it is. The file is loaded and run in a fresh process, and compared on the
    validation data, before it takes its place.

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
        validation: (x, y) or a dataset of batches, on which the metric is compared; or
            x alone, for the outputs. Without it the verdict is "undecided".
        metric: A Keras metric's name or a function of targets and outputs; None takes
            the accuracy where labels are classes, else the loss of `compile`.
        tolerance: By how much the metric may be worse.
        keep_float32: Paths of layers that stay in float32, beside the head and those
            that integers spoil, which are found where there is validation data.
        batch_size: Examples in the calls that are to be fast, timed beside one.
        budget_seconds: For writing and timing candidates, and the float32 that integers
            are timed against; what it does not suffice for is left out, but the first.
        write_failed: Whether an export that is worse is written nevertheless.

    Returns:
        What was written: `.verdict`, `.parity`, `.size_bytes`, `.kept`, `.tried`, and
        `.load()`; `print` shows a table.

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
    if batch_size is not None:
        checks.positive_int("batch_size", batch_size)
    if _AUTO not in (format, dtype):
        check_possible(format, dtype, scheme)
        scheme = scheme or POSSIBLE[format][dtype][0]
    check_built(model, "export")
    check_target(target)
    formats = RUNTIMES if format == _AUTO else (format,)
    dtypes = ("float32", "int8") if dtype == _AUTO else (dtype,)
    # Read more than once, and a generator cannot be begun again.
    validation, calibration = (
        None if data is None else dataset_of(data, size, needs_targets=False, name=name)
        for data, size, name in (
            (validation, batch_size or BATCH, "validation"),
            (calibration, BATCH, "calibration"),
        )
    )
    given = [each for each in (validation, calibration) if each is not None]
    ends = time.monotonic() + budget_seconds * (1 - _PART_FOR_TIMING)
    seconds = min(_MOST_SECONDS, budget_seconds * _PART_FOR_TIMING)
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        copy = float32_copy(model)
        copy.loss = getattr(model, "loss", None)  # what the gate compares by
        source = Source(copy, inputs_in(next(iter(given[0]))) if given else None)
        requests = _requests(
            *(source, formats, dtypes, scheme, calibration, keep_float32),
            is_judged=validation is not None,
        )
        source.check_runs()
        compare = None
        if validation is not None:
            names = [spec.name for spec in source.traced.signature.outputs]
            reference = reference_of(copy, validation, names)

            def compare(loaded: LoadedModel) -> Parity:
                return check_parity(
                    reference, loaded, metric=metric, tolerance=tolerance
                )

        passed, tried = _written(
            source, requests, Path(scratch), ends, compare, may_fail=write_failed
        )
        others: list[Candidate] = []
        if compare is not None and dtypes == ("int8",):
            asked = [Request(each, "float32") for each in formats if not missing(each)]
            others, left = _written(
                *(source, asked, Path(scratch), ends, None), is_needed=False
            )
            notes += [
                f"{each.name} was not timed beside it: {each.reason}."
                for each in left
                if each.outcome != "passed"
            ]
        best, turns = _fastest(
            source, passed, others, batch_size, seconds, is_judged=compare is not None
        )
        parity = best.parity
        if parity is not None:
            used = best.request.calibration
            if used:
                inputs = [x for x, _ in reference.batches]
                if source.share_among(used, inputs) > 0.5:
                    notes.append(
                        "Most validation examples are among those of `calibration`, "
                        "which gave the integers their ranges: others may fare worse. "
                        "Pass other examples."
                    )
            parity = dataclasses.replace(
                _timed(parity, best, [*passed, *others], turns),
                notes=(*parity.notes, *notes),
                processes=(best.cost,),
            )
        verdict = parity.verdict if parity else "undecided"
        found = parity.to_dict() if parity else None
        gate = {"verdict": verdict, "difference": best.difference, "parity": found}
        dataclasses.replace(best.manifest, gate=gate, threads=best.threads).write(
            best.folder
        )
        place(best.folder, target)
    seconds_of = {each.request.name: turns.get((each.key, 1)) for each in passed}
    return Export(
        *(str(target), best.request.format, best.request.dtype, best.request.scheme),
        verdict=verdict,
        difference=best.difference,
        size_bytes=best.size_bytes,
        float32_bytes=4 * sum(x.value.shape.num_elements() or 0 for x in model.weights),
        kept=dict(best.request.keep),
        parity=parity,
        tried=tuple(
            dataclasses.replace(
                each,
                outcome="chosen" if each.name == best.request.name else each.outcome,
                seconds=median(taken) if (taken := seconds_of.get(each.name)) else None,
            )
            for each in tried
        ),
        threads=best.threads,
    )


def _requests(
    source: Source,
    formats: Sequence[str],
    dtypes: Sequence[str],
    scheme: str | None,
    calibration: Any,
    keep_float32: Iterable[str],
    *,
    is_judged: bool,
) -> list[Request]:
    """Returns what to write, in the order in which it is tried.

    Without a scheme all are tried, "static" where there is something to calibrate on.
    """
    batches: tuple[Any, ...] = ()
    text = ""
    if calibration is not None:
        batches = calibration_batches(calibration, source.traced)
        text = spread_text(batches)
        if not is_judged:
            batches = source.hold_out(batches)
    keep = int8_layers.layers_kept(source.model, keep_float32)
    products_only = int8_layers.has_attention(source.model)
    found = [
        Request(
            *(format, dtype, way),
            calibration=batches if way == "static" else (),
            keep=keep if way else {},
            products_only=products_only,
        )
        for dtype, format in itertools.product(dtypes, formats)
        for way in POSSIBLE[format].get(dtype, ())
        if way in ("", scheme) or (scheme is None and (way != "static" or batches))
    ]
    is_static = any(request.scheme == "static" for request in found)
    if is_static and text:
        warnings.warn(text, stacklevel=3)
        if not is_judged:  # else they would be tried on themselves
            source.tried = source.made_up()
    if is_static and not batches:
        raise ValueError(
            "`scheme` is 'static', and there is no `calibration`; expected inputs that "
            "tell the ranges of activations. Pass some tens of training examples."
        )
    return found


def _written(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    ends: float,
    compare: Compare | None,
    *,
    is_needed: bool = True,
    may_fail: bool = False,
) -> tuple[list[Candidate], list[Tried]]:
    """Writes candidates until the budget ends; returns those that pass, and all tried.

    Where they are needed, the only one is written whatever it takes, and what is wrong
    with it is raised.
    """
    is_alone = is_needed and len(requests) == 1
    passed: list[Candidate] = []
    tried: list[Tried] = []
    for request in requests:
        name = request.name
        lacking = () if is_alone else missing(request.format)
        extra = f"`pip install 'tfamp[{request.format}]'`"
        why = f"{', '.join(lacking)} is not installed, {extra}" if lacking else ""
        if time.monotonic() > ends and (passed or not is_needed):
            why = "the budget was used up"
        if why:
            tried.append(Tried(name, "left out", why))
            continue
        try:
            found = _sparing(source, request, scratch, compare)
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
    if is_needed and not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in tried)
        raise ValueError(f"No candidate could be exported: {lines}.")
    return passed, tried


def _sparing(
    source: Source, request: Request, scratch: Path, compare: Compare | None
) -> Candidate:
    """Writes an export, of integers with as many layers in float as the gate asks."""
    written: list[Candidate] = []

    def evaluate(keep: dict[str, str]) -> Parity:
        asked = dataclasses.replace(request, keep={**request.keep, **keep})
        found = _write(source, asked, Path(tempfile.mkdtemp(dir=scratch)))
        written.append(found)
        if compare is not None:
            found.parity = compare(open_model(found.folder, found.manifest))
        return found.parity  # type: ignore[return-value]  # of the one call without

    if compare is None or request.dtype != "int8":
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


def _write(source: Source, request: Request, folder: Path) -> Candidate:
    """Writes an export with `export.json` into an empty folder, and runs it."""
    traced = source.trace_for(request.format, request.dtype)
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
    inputs = source.tried_inputs()
    answered = fresh_process.ask(folder, inputs)
    difference = largest_difference(source.traced.call(inputs), answered.outputs)
    is_wrong = request.dtype == "float32" and difference > _MAX_FLOAT32_DIFFERENCE
    if is_wrong or not np.isfinite(difference):
        raise ValueError(
            f"The exported file answers otherwise than the model, by {difference:.1e} "
            "of the outputs' spread. Export another format or dtype."
        )
    cost = FreshProcess(request.format, answered.seconds, answered.peak_bytes)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Candidate(request, folder, manifest, difference, cost, size)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _fastest(
    source: Source,
    passed: Sequence[Candidate],
    others: Sequence[Candidate],
    batch_size: int | None,
    seconds: float,
    *,
    is_judged: bool,
) -> tuple[Candidate, dict[tuple[Any, int], Turns]]:
    """Returns the fastest candidate, and the seconds of all by name, threads and size.

    Each is timed on all cores and on one thread, which it gets where that is faster by
    5 %. Of those within 5 % of the fastest it is the most exact one: a gain that is not
    shown is none. `others` are timed, and not taken.
    """
    models: dict[tuple[str, int | None], LoadedModel] = {}
    for each in (*passed, *others):
        models[each.key] = open_model(each.folder, each.manifest)
        # The threads of TensorFlow are those of the whole process.
        if each.request.format != "saved_model" and num_usable_cpus() > 1:
            models[each.request.name, 1] = open_model(each.folder, each.manifest, 1)
    if is_judged and _SAVED_MODEL not in models:
        models[_SAVED_MODEL] = of_trace(source.traced)
    if len(models) == 1 and not is_judged:
        return passed[0], {}
    if len(passed) == 1 and not is_judged:
        seconds = min(seconds, _THREADS_SECONDS)
    sizes = {1, batch_size or 1}
    timed = sizes | ({batch_size or BATCH} if is_judged else set())
    turns = raced(models, source.tried_inputs(), timed, seconds=seconds)
    paces = {key: pace(turns, key, sizes) for key in models}
    for each in (*passed, *others):
        one = paces.get((each.request.name, 1))
        if one is not None and paces[each.key] / one > MIN_GAIN:
            each.threads = 1
    least = min(paces[each.key] for each in passed)
    close = [each for each in passed if paces[each.key] < MIN_GAIN * least]
    return min(close, key=lambda each: each.difference), turns


def _timed(
    parity: Parity,
    best: Candidate,
    others: Sequence[Candidate],
    turns: dict[tuple[Any, int], Turns],
) -> Parity:
    """Returns the gate's comparison with the speed over a SavedModel and float32."""
    sizes = sorted({size for _, size in turns})
    against: dict[str, Any] = {}
    if best.key != _SAVED_MODEL:
        against["SavedModel"] = _SAVED_MODEL
    rivals = [
        each
        for each in others
        if each.request.dtype == "float32"
        and each.request.format != "saved_model"
        and each is not best
    ]
    if rivals:
        rival = min(rivals, key=lambda each: pace(turns, each.key, {1}))
        against[f"best float32 ({rival.request.format})"] = rival.key
    latencies = [
        Latency.of(size, list(itertools.chain(*turns[best.key, size])))
        for size in sizes
    ]
    speedups = [
        speedup(turns[key, size], turns[best.key, size], against=name, batch_size=size)
        for size in sizes
        for name, key in against.items()
    ]
    return parity.timed(latencies, speedups)
