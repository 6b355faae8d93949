"""Tries candidates and takes the fastest that passes the gate."""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tfamp.records.checks import short_error
from tfamp.serving.exports.candidates import Candidate, compared, write
from tfamp.serving.exports.kept_layers import Kept, write_sparing
from tfamp.serving.exports.record import Tried
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.parity.timings import Pace, raced
from tfamp.serving.runtimes.manifest import RUNTIMES

_TIMED_SECONDS = 10.0
_PART_FOR_TIMING = 0.3
_NO_TIME = "the budget was used up"


def missing(format: str) -> tuple[str, ...]:
    """Returns the packages that a format needs and that are not installed."""
    return tuple(
        name for name in PACKAGES[format] if importlib.util.find_spec(name) is None
    )


def advice(formats: Sequence[str]) -> tuple[str, ...]:
    """Returns how to add the formats that could not be tried."""
    return tuple(
        f"{format} was not tried: {', '.join(names)} is not installed. Run "
        f"`pip install 'tfamp[{format}]'`."
        for format in formats
        if (names := missing(format))
    )


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


def choose(
    source: Source,
    requests: Sequence[Request],
    scratch: Path,
    *,
    budget_seconds: float,
) -> Choice:
    """Writes candidates while the budget lasts, and returns the fastest that passes.

    Raises:
        ValueError: None could be written and passed; the message says why of each.
    """
    ends = time.monotonic() + budget_seconds * (1 - _PART_FOR_TIMING)
    passed: dict[str, Candidate] = {}
    spared: dict[str, Kept | None] = {}
    tried: dict[str, Tried] = {}
    for number, request in enumerate(requests):
        name = request.name
        if names := missing(request.format):
            tried[name] = Tried(name, "left out", f"{', '.join(names)} is missing")
            continue
        if time.monotonic() > ends and passed:
            tried[name] = Tried(name, "left out", _NO_TIME)
            continue
        folder = scratch / str(number)
        folder.mkdir()
        try:
            candidate, spared[name] = write_sparing(source, request, folder)
            why = _why_worse(source, candidate)
        except Exception as error:  # noqa: BLE001 - converters raise anything
            tried[name] = Tried(name, "failed", short_error(error))
            continue
        tried[name] = Tried(
            *(name, "failed" if why else "passed", why),
            size_bytes=candidate.size_bytes,
            difference=candidate.difference,
        )
        if not why:
            passed[name] = candidate
    if not passed:
        lines = "; ".join(f"{each.name}: {each.reason}" for each in tried.values())
        raise ValueError(f"No candidate could be exported: {lines}.")
    paces = _raced(source, [*passed.values()], budget_seconds)
    best = min(passed, key=lambda name: paces[name].slowdown)
    for name in passed:
        tried[name] = dataclasses.replace(
            tried[name],
            outcome="chosen" if name == best else "passed",
            seconds=paces[name].seconds,
        )
    float32 = (each for each in passed.values() if each.request.dtype == "float32")
    return Choice(passed[best], spared[best], tuple(tried.values()), tuple(float32))


def best_float32(
    source: Source,
    choice: Choice,
    scratch: Path,
    *,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Candidate | None, tuple[str, ...]]:
    """Returns the fastest float32 of the other runtimes, for the gate to time against.

    Those that are not there yet are written while the budget lasts, but no SavedModel:
    the gate has one.

    Returns:
        The candidate, None where what was chosen is the fastest itself or nothing else
        is installed; and notes on runtimes that were not timed.
    """
    ends = clock() + budget_seconds * (1 - _PART_FOR_TIMING)
    found = list(choice.float32)
    notes = []
    if choice.best.request.dtype == "float32" and choice.best not in found:
        found.append(choice.best)
    written = {each.request.format for each in found}
    for format in RUNTIMES[1:]:
        if format in written or missing(format):
            continue
        why = _NO_TIME
        if clock() <= ends:
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


def _why_worse(source: Source, candidate: Candidate) -> str:
    """Returns why a candidate does not pass the gate, "" where it does."""
    if source.validation is None:
        return ""
    parity = compared(source, candidate, seconds=0)
    return parity.reason if parity.verdict == "worse" else ""


def _raced(
    source: Source, candidates: Sequence[Candidate], budget_seconds: float
) -> dict[str, Pace]:
    return raced(
        {each.request.name: each.load() for each in candidates},
        source.tried_inputs(),
        {1, source.batch_size or 1},
        seconds=min(_TIMED_SECONDS, budget_seconds * _PART_FOR_TIMING),
    )
