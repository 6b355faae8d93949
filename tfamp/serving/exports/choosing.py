"""Tries candidates and takes the fastest that passes the gate."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfamp.records.checks import short_error
from tfamp.serving.exports import samples
from tfamp.serving.exports.candidates import Candidate, Source, write
from tfamp.serving.exports.racing import Pace, raced
from tfamp.serving.exports.record import Tried
from tfamp.serving.exports.request import POSSIBLE, Request
from tfamp.serving.exports.sparing import write_sparing
from tfamp.serving.int8.keeping import Kept
from tfamp.serving.parity.gate import check_parity
from tfamp.serving.runtimes.manifest import EXTRAS, RUNTIMES

# What has to be there to write a format, and integers in it.
_NEEDED = {
    "saved_model": ("tensorflow",),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}
_TIMED_SECONDS = 10.0
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


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and what it is compared with.

    Attributes:
        best: The fastest that passed.
        spared: The search for layers that integers spoil in it; None where none was.
        tried: All that was tried; empty where there was nothing to choose from.
        float32: Those that were written in float32 and run.
    """

    best: Candidate
    spared: Kept | None
    tried: tuple[Tried, ...] = ()
    float32: tuple[Candidate, ...] = ()


def fastest(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    *,
    validation: Any,
    metric: Any,
    tolerance: float,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Choice:
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
    paces = _raced(source, passed, budget_seconds)
    best = min(passed, key=lambda each: paces[each.request.name].slowdown)
    for each in passed:
        name = each.request.name
        outcome = "chosen" if each is best else "passed"
        told[name] = dataclasses.replace(
            told[name], outcome=outcome, seconds=paces[name].seconds
        )
    return Choice(
        best,
        spared[best.request.name],
        tuple(told.values()),
        tuple(each for each in passed if each.request.dtype == "float32"),
    )


def best_float32(
    source: Source,
    choice: Choice,
    scratch: Path,
    *,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Candidate | None, tuple[str, ...]]:
    """Returns the fastest float32 of the other runtimes, for the gate to time against.

    A SavedModel is not written for that: the gate has one.

    Args:
        source: The float32 model.
        choice: What was chosen, and the float32 files that are there already.
        scratch: An empty folder.
        budget_seconds: After these no further runtime is written.
        clock: Tells the seconds.

    Returns:
        The candidate, None where what was chosen is the fastest itself or nothing else
        is installed; and notes on runtimes that are not in it.
    """
    began = clock()
    found = list(choice.float32)
    notes = []
    if choice.best.request.dtype == "float32" and choice.best not in found:
        found.append(choice.best)
    written = {each.request.format for each in found}
    for format in RUNTIMES[1:]:
        if format in written or missing(format):
            continue
        why = "the budget was used up"
        if clock() - began <= budget_seconds * (1 - _PART_FOR_TIMING):
            folder = scratch / format
            folder.mkdir(parents=True)
            try:
                found.append(write(source, Request(format, "float32"), folder))
                continue
            except Exception as error:  # noqa: BLE001 - converters raise anything
                why = short_error(error)
        notes.append(f"The float32 of {format} was not timed: {why}")
    if not found or found == [choice.best]:
        return None, tuple(notes)
    paces = _raced(source, found, budget_seconds)
    best = min(found, key=lambda each: paces[each.request.name].slowdown)
    return (None if best is choice.best else best), tuple(notes)


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


def _raced(
    source: Source, candidates: Sequence[Candidate], budget_seconds: float
) -> dict[str, Pace]:
    return raced(
        {each.request.name: each.load() for each in candidates},
        samples.tried_inputs(source.traced, source.sample),
        {1, source.batch_size or 1},
        seconds=min(_TIMED_SECONDS, budget_seconds * _PART_FOR_TIMING),
    )
