"""`tfamp.export`: a model as files that are smaller, faster, and still right."""

import dataclasses
import functools
import itertools
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import checks
from tfamp.records.checks import short_error
from tfamp.serving.exports import int8_layers
from tfamp.serving.exports.candidates import Candidate, write_sparing
from tfamp.serving.exports.folders import check_target, place, said_if_full
from tfamp.serving.exports.request import (
    DTYPES,
    POSSIBLE,
    SCHEMES,
    Request,
    missing,
    scheme_for,
)
from tfamp.serving.exports.results import Export, Tried
from tfamp.serving.exports.source import (
    BATCH,
    Source,
    calibration_batches,
    first_inputs,
    float32_copy,
    spread_text,
    tried_inputs,
)
from tfamp.serving.gate import check_parity, reference_of
from tfamp.serving.parity import Parity
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.serving.runtimes.tensorflow_models import TensorFlowModel
from tfamp.serving.turns import median, raced, slowdowns, speedup
from tfamp.stepping.arguments import check_built, dataset_of
from tfamp.trials.run_records import Latency
from tfamp.trials.statistics import MIN_GAIN

_AUTO = "auto"
# The part of the budget that timing may take, and the most of it.
_PART_FOR_TIMING, _MOST_SECONDS = 0.3, 10.0
# For one thread against all of one candidate, and for the chosen one against others.
_THREADS_SECONDS, _GATE_SECONDS = 0.6, 3.0
_NO_TIME = "the budget was used up"


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
        scheme: For integers: "weights" rounds only them, "dynamic" measures the range
            of activations at each call, "static" once, on `calibration`. None takes
            the one that suits the format, or tries all of them under "auto".
        calibration: Inputs for "static": x, (x, y), or a dataset of batches; at most
            512 examples are read. Float inputs must be finite.
        validation: (x, y) or a dataset of batches, on which the metric is compared; or
            x alone, for the outputs. Without it the verdict is "undecided".
        metric: As in `tfamp.compare`'s gate: a Keras metric's name or a function of
            targets and outputs; None takes the accuracy where labels are classes.
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
    check_target(target)
    if _AUTO not in (format, dtype):
        scheme = scheme_for(format, dtype, scheme)
    check_built(model, "export")
    formats = RUNTIMES if format == _AUTO else (format,)
    dtypes = ("float32", "int8") if dtype == _AUTO else (dtype,)
    sizes = [weight.value.shape.num_elements() or 0 for weight in model.weights]
    ends = time.monotonic() + budget_seconds * (1 - _PART_FOR_TIMING)
    seconds = min(_MOST_SECONDS, budget_seconds * _PART_FOR_TIMING)
    # Read more than once, and a generator cannot be begun again.
    validation, calibration = (
        None if data is None else dataset_of(data, size, needs_targets=False, name=name)
        for data, size, name in (
            (validation, batch_size or BATCH, "validation"),
            (calibration, BATCH, "calibration"),
        )
    )
    with tempfile.TemporaryDirectory(prefix="tfamp-export-") as scratch:
        with said_if_full(4 * sum(sizes)):
            copy = float32_copy(model)
            copy.loss = getattr(model, "loss", None)  # what the gate compares by
            source = Source(copy, first_inputs(validation, calibration))
            requests = _requests(
                *(source, formats, dtypes, scheme, calibration, keep_float32),
                is_judged=validation is not None,
            )
            source.check_runs()
            compare = None
            if validation is not None:
                names = [spec.name for spec in source.traced.signature.outputs]
                reference = reference_of(copy, validation, names, batch_size)
                compare = functools.partial(
                    check_parity, reference, metric=metric, tolerance=tolerance
                )
            passed, tried = _written(
                source, requests, Path(scratch), ends, compare, may_fail=write_failed
            )
            best = _fastest(source, passed, batch_size, seconds)
            parity = best.parity
            if parity is not None:
                others = [each for each in passed if each.request.dtype == "float32"]
                notes: list[str] = []
                if not others:
                    names = [each for each in formats if each != "saved_model"]
                    asked = [Request(each, "float32") for each in names]
                    others, left = _written(
                        source, asked, Path(scratch), ends, None, is_needed=False
                    )
                    notes = [
                        f"{each.name} was not timed beside it: {each.reason}."
                        for each in left.values()
                        if each.outcome != "passed"
                    ]
                    if others:
                        others = [_fastest(source, others, batch_size, seconds)]
                used = best.request.calibration
                inputs = [x for x, _ in reference.batches]
                if used and source.share_among(used, inputs) > 0.5:
                    notes.append(
                        "Most validation examples are among those of `calibration`, "
                        "which gave the integers their ranges: others may fare worse. "
                        "Pass other examples."
                    )
                parity = _timed(source, best, others, batch_size)
                parity = dataclasses.replace(parity, notes=(*parity.notes, *notes))
        verdict = parity.verdict if parity else "undecided"
        found = parity.to_dict() if parity else None
        gate = {"verdict": verdict, "difference": best.difference, "parity": found}
        dataclasses.replace(best.manifest, gate=gate, threads=best.threads).write(
            best.folder
        )
        place(best.folder, target)
        return Export(
            *(str(target), best.request.format, best.request.dtype),
            scheme=best.request.scheme,
            verdict=verdict,
            difference=best.difference,
            size_bytes=best.size_bytes,
            float32_bytes=4 * sum(sizes),
            kept=dict(best.request.keep),
            int8=best.kept,
            parity=parity,
            tried=_outcomes(tried, passed, best),
            threads=best.threads,
            advice=tuple(
                f"{each} was not tried: {', '.join(lacking)} is not installed. Run "
                f"`pip install 'tfamp[{each}]'`."
                for each in formats
                if (lacking := missing(each))
            ),
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
            batches = source.held_out(batches)
    keep = int8_layers.layers_kept(source.model, keep_float32)
    found = []
    for dtype, format in itertools.product(dtypes, formats):
        for way in POSSIBLE[format].get(dtype, ()):
            is_open = scheme is None and (way != "static" or batches)
            if not (is_open or way in ("", scheme)):
                continue
            kept = dict(keep) if way else {}
            if (format, way) == ("onnx", "dynamic"):
                kept |= int8_layers.convolutions(source.model)
            found.append(
                Request(
                    *(format, dtype, way),
                    calibration=batches if way == "static" else (),
                    keep=kept,
                    products_only=int8_layers.has_attention(source.model),
                    reduces_range=int8_layers.reduces_range(),
                )
            )
    is_static = any(request.scheme == "static" for request in found)
    if is_static and text:
        warnings.warn(text, stacklevel=3)
        if not is_judged:  # else they would be tried on themselves
            source.tried = tried_inputs(source.traced)
    if is_static and not batches:
        raise ValueError(
            "`scheme` is 'static', and there is no `calibration`; expected inputs that "
            "tell the ranges of activations. Pass some tens of training examples."
        )
    if not found:
        raise ValueError(
            f"No format has {' or '.join(dtypes)} with scheme {scheme!r}. Leave out "
            "`scheme`."
        )
    return found


def _written(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    ends: float,
    compare: Callable[[LoadedModel], Parity] | None,
    *,
    is_needed: bool = True,
    may_fail: bool = False,
) -> tuple[list[Candidate], dict[str, Tried]]:
    """Writes candidates until the budget ends; returns those that pass, and all tried.

    Where they are needed, the only one is written whatever it takes, and what is wrong
    with it is raised.
    """
    is_alone = is_needed and len(requests) == 1
    passed: list[Candidate] = []
    tried: dict[str, Tried] = {}
    for request in requests:
        name = request.name
        lacking = () if is_alone else missing(request.format)
        if lacking and not is_needed:
            continue
        why = f"{', '.join(lacking)} is missing" if lacking else ""
        if time.monotonic() > ends and (passed or not is_needed):
            why = _NO_TIME
        if why:
            tried[name] = Tried(name, "left out", why)
            continue
        folder = scratch / str(len(os.listdir(scratch)))
        folder.mkdir()
        try:
            found = write_sparing(source, request, folder, compare)
        except Exception as error:  # converters raise anything
            if is_alone:
                raise
            tried[name] = Tried(name, "failed", short_error(error))
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
        tried[name] = Tried(name, outcome, why, size_bytes=size, difference=off)
        if not is_worse or is_alone:
            passed.append(found)
    if is_needed and not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in tried.values())
        raise ValueError(f"No candidate could be exported: {lines}.")
    return passed, tried


def _fastest(
    source: Source,
    candidates: Sequence[Candidate],
    batch_size: int | None,
    seconds: float,
) -> Candidate:
    """Returns the fastest candidate, each on one thread where that is faster.

    Steps of a recurrent layer, and of any small model, are over before other threads
    have woken up. The threads of TensorFlow are those of the whole process. Of those
    that are within 5 % of the fastest it is the most exact one: a gain that is not
    shown is none.
    """
    models: dict[tuple[str, int | None], LoadedModel] = {}
    for each in candidates:
        name = each.request.name
        models[name, None] = each.load()
        if num_usable_cpus() > 1 and each.request.format != "saved_model":
            models[name, 1] = each.load(threads=1)
    if len(models) == 1:
        return candidates[0]
    if len(candidates) == 1:
        seconds = min(seconds, _THREADS_SECONDS)
    sizes = {1, batch_size or 1}
    turns = raced(models, source.tried_inputs(), sizes, seconds=seconds)
    paces = slowdowns(turns, sizes)
    for each in candidates:
        name = each.request.name
        gain = paces[name, None] / paces.get((name, 1), math.inf)
        each.threads = 1 if gain > MIN_GAIN else None
        each.slowdown = paces[name, each.threads]
        each.seconds = median(turns[(name, each.threads), 1])
    least = min(each.slowdown for each in candidates)
    close = [each for each in candidates if each.slowdown < MIN_GAIN * least]
    return min(close, key=lambda each: each.difference)


def _timed(
    source: Source,
    best: Candidate,
    float32: Sequence[Candidate],
    batch_size: int | None,
) -> Parity:
    """Returns the gate's comparison, with the speed over a SavedModel and float32."""
    models = {"": best.load(threads=best.threads)}
    if (best.request.format, best.request.dtype) != ("saved_model", "float32"):
        traced = source.traced
        models["SavedModel"] = TensorFlowModel(None, traced.signature, traced.function)
    others = [
        each
        for each in float32
        if each is not best and each.request.format != "saved_model"
    ]
    if others:
        other = min(others, key=lambda each: each.slowdown)
        name = f"best float32 ({other.request.format})"
        models[name] = other.load(threads=other.threads)
    sizes = sorted({1, batch_size or BATCH})
    turns = raced(models, source.tried_inputs(), sizes, seconds=_GATE_SECONDS)
    latencies = [
        Latency.of(size, [s for turn in turns["", size] for s in turn])
        for size in sizes
    ]
    speedups = [
        speedup(turns[name, size], turns["", size], against=name, batch_size=size)
        for size in sizes
        for name in models
        if name
    ]
    parity = best.parity
    if parity is None:
        raise RuntimeError(f"{best.request.name} was not compared.")
    found = parity.timed(latencies, speedups)
    return dataclasses.replace(found, processes=(best.cost,))


def _outcomes(
    tried: Mapping[str, Tried], passed: Sequence[Candidate], best: Candidate
) -> tuple[Tried, ...]:
    """Returns all that was tried, with the seconds of those that passed."""
    found = dict(tried)
    for each in passed:
        name = each.request.name
        outcome = "chosen" if each is best else "passed"
        found[name] = dataclasses.replace(
            found[name], outcome=outcome, seconds=each.seconds
        )
    return tuple(found.values())
