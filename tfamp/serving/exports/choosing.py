"""Tries candidates and takes the fastest that passes the gate."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.records.checks import short_error
from tfamp.serving.exports import samples
from tfamp.serving.exports.candidates import Candidate, Source
from tfamp.serving.exports.record import Tried
from tfamp.serving.exports.request import POSSIBLE, Request
from tfamp.serving.exports.sparing import write_sparing
from tfamp.serving.int8.keeping import Kept
from tfamp.serving.parity.gate import check_parity
from tfamp.serving.parity.timings import in_turns, rows
from tfamp.serving.runtimes.manifest import EXTRAS

# What has to be there to write a format, and integers in it.
_NEEDED = {
    "saved_model": ("tensorflow",),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
_TIMED_SECONDS = 4.0
_PART_FOR_TIMING = 0.3


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    return tuple(
        name for name in _NEEDED[format] if importlib.util.find_spec(name) is None
    )


def advice(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns how to add the formats that could not be tried."""
    return tuple(
        f"{format} was not tried: {', '.join(names)} is not installed. Run "
        f"`pip install 'tfamp[{EXTRAS[format]}]'`."
        for format in formats
        if (names := missing(format))
    )


def schemes(
    format: str, dtype: str, scheme: str | None, is_alone: bool, has_data: bool
) -> tuple[str, ...]:
    """Returns the schemes in which a format and dtype are tried.

    Example:
        >>> schemes("onnx", "int8", None, False, True)
        ('dynamic', 'static')
        >>> schemes("onnx", "int8", None, True, True), schemes("onnx", "bfloat16",
        ...                                                    None, False, True)
        (('dynamic',), ())
    """
    possible = POSSIBLE[format].get(dtype, ())
    if scheme is not None and possible != ("",):
        return tuple(way for way in possible if way == scheme)
    if is_alone:
        return possible[:1]
    return tuple(way for way in possible if way != "static" or has_data)


def fastest(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    *,
    validation: Any,
    metric: Any,
    tolerance: float,
    batch_size: int | None,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Candidate, Kept | None, tuple[Tried, ...]]:
    """Writes candidates while the budget lasts, and returns the fastest that passes.

    Raises:
        ValueError: None could be written and passed; the message says why of each.
    """
    began = clock()
    passed: list[Candidate] = []
    spared: dict[str, Kept | None] = {}
    told: dict[str, Tried] = {}
    for number, request in enumerate(requests):
        name = request.name
        if names := missing(request.format):
            told[name] = Tried(name, "left out", f"{', '.join(names)} is missing")
            continue
        if clock() - began > budget_seconds * (1 - _PART_FOR_TIMING) and passed:
            told[name] = Tried(name, "left out", "the budget was used up")
            continue
        folder = scratch / str(number)
        folder.mkdir()
        try:
            candidate, spared[name] = write_sparing(
                *(source, request, folder),
                validation=validation,
                metric=metric,
                tolerance=tolerance,
            )
            why = _why_worse(source, candidate, validation, metric, tolerance)
        except Exception as error:  # noqa: BLE001 - converters raise anything
            told[name] = Tried(name, "failed", short_error(error))
            continue
        told[name] = Tried(
            *(name, "failed" if why else "passed", why),
            size_bytes=candidate.size_bytes,
            difference=candidate.difference,
        )
        if not why:
            passed.append(candidate)
    if not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in told.values())
        raise ValueError(f"No candidate could be exported: {lines}.")
    seconds = _timed(source, passed, batch_size, budget_seconds)
    best = min(passed, key=lambda each: seconds[each.request.name][1])
    for each in passed:
        name = each.request.name
        outcome = "chosen" if each is best else "passed"
        told[name] = dataclasses.replace(
            told[name], outcome=outcome, seconds=seconds[name][0]
        )
    return best, spared[best.request.name], tuple(told.values())


def _why_worse(
    source: Source, candidate: Candidate, validation: Any, metric: Any, tolerance: float
) -> str:
    """Returns why a candidate does not pass the gate, "" where it does."""
    if validation is None:
        return ""
    parity = check_parity(
        *(source.model, candidate.load(), validation),
        metric=metric,
        tolerance=tolerance,
        seconds=0,
        fresh_process=False,
    )
    return parity.reason if parity.verdict == "worse" else ""


def _timed(
    source: Source,
    candidates: Sequence[Candidate],
    batch_size: int | None,
    budget_seconds: float,
) -> dict[str, tuple[float, float]]:
    """Returns the median seconds of batch 1, and the mean of sizes, by candidate.

    The mean is the geometric one, so that no size outweighs the other.
    """
    inputs = samples.tried_inputs(source.traced, source.sample)
    found: dict[str, list[float]] = {each.request.name: [] for each in candidates}
    sizes = sorted({1, batch_size or 1})
    budget = min(_TIMED_SECONDS, budget_seconds * _PART_FOR_TIMING)
    models = {each.request.name: each.load() for each in candidates}
    for size in sizes:
        batch = rows(inputs, size)
        calls = {
            name: _call(model, model.prepared(batch)) for name, model in models.items()
        }
        for call in calls.values():
            call()
        timed = in_turns(calls, seconds=budget / len(sizes))
        for name, turns in timed.items():
            found[name].append(float(np.median([np.median(turn) for turn in turns])))
    return {
        name: (each[0], float(np.exp(np.mean(np.log(each)))))
        for name, each in found.items()
    }


def _call(model: Any, inputs: Any) -> Callable[[], Any]:
    return lambda: model.run(inputs)
