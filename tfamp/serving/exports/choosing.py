"""Tries candidates and takes the fastest that passes the gate, and says why.

`Export` is what `tfamp.export` returns: what was written, what was tried.
"""

import dataclasses
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfamp.records import console
from tfamp.records.checks import short_error
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, format_seconds
from tfamp.serving.exports.candidates import (
    Candidate,
    choose_threads,
    compared,
    write,
)
from tfamp.serving.exports.kept_layers import Kept, write_sparing
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.parity.result import Parity
from tfamp.serving.parity.timings import Pace, raced
from tfamp.serving.runtimes import load_exported
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials.statistics import MIN_GAIN

_TIMED_SECONDS = 10.0
_PART_FOR_TIMING = 0.3
_NO_TIME = "the budget was used up"


@dataclasses.dataclass(frozen=True)
class Tried(TableRecord):
    """A file that was written to see how good and how fast it is.

    Attributes:
        name: Format, dtype and scheme, such as "onnx int8 dynamic".
        outcome: "chosen", "passed", "failed" or "left out".
        reason: Why, in a sentence; "" where there is nothing to say.
        size_bytes: Of all its files.
        seconds: Of a batch of one, the median, measured in turns with the others.
        difference: The largest from float32, over the spread of the outputs.
    """

    name: str
    outcome: str
    reason: str = ""
    size_bytes: int | None = None
    seconds: float | None = None
    difference: float | None = None

    def table(self) -> str:
        """Returns one line."""
        return " ".join(map(str, self.row()))

    def row(self) -> tuple[str, str, str, str, str]:
        """Returns the cells of a table."""
        told = f"{self.outcome}: {self.reason}" if self.reason else self.outcome
        return (
            self.name,
            "" if self.size_bytes is None else format_bytes(self.size_bytes),
            "" if self.seconds is None else format_seconds(self.seconds),
            "" if self.difference is None else f"{self.difference:.1e}",
            told,
        )


@dataclasses.dataclass(frozen=True)
class Export(TableRecord):
    """A model that was exported; `str` is a table.

    Attributes:
        path: The folder.
        format: "saved_model", "litert", "onnx" or "openvino".
        dtype: "float32", "float16", "bfloat16" or "int8".
        scheme: "weights", "dynamic" or "static"; "" for floats.
        verdict: "as good and faster", "as good, not faster", "worse" or "undecided".
        difference: The largest difference of an output from the float32 model's, over
            the spread of that output in the batch that was tried.
        size_bytes: Of all files.
        float32_bytes: Of the model's weights in float32.
        kept: Layer that stays in float32 -> why.
        int8: The search for layers that integers spoil; None where there was none.
        parity: The comparison on validation data; None without any.
        tried: All that was written to be compared.
        threads: Of a prediction, 1 where that was faster here; None for all cores.
        advice: What would add candidates, such as packages that are not installed.
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
    int8: Kept | None = None
    parity: Parity | None = None
    tried: tuple[Tried, ...] = ()
    threads: int | None = None
    advice: tuple[str, ...] = ()

    def load(self, *, threads: int | None = None) -> LoadedModel:
        """Returns the model, as `tfamp.load_exported` does."""
        return load_exported(self.path, threads=threads)

    def table(self) -> str:
        """Returns what was tried, what was written, and the verdict."""
        name = " ".join(filter(None, (self.format, self.dtype, self.scheme)))
        told = [
            f"{self.path}: {name}, {format_bytes(self.size_bytes)} for "
            f"{format_bytes(self.float32_bytes)} of float32 weights; {self.verdict}. "
            f"Largest difference {self.difference:.1e} of the outputs' spread."
        ]
        told += [f"{path} stays in float32: {why}." for path, why in self.kept.items()]
        if self.threads is not None:
            told.append(
                "A prediction takes one thread, which was faster here than all cores; "
                "`load_exported(threads=)` takes more."
            )
        if self.parity is None:
            told.append(
                "Only outputs were compared: pass `validation=(x, y)` for a verdict."
            )
        else:
            told.append(str(self.parity))
        parts = []
        if len(self.tried) > 1:
            rows = [each.row() for each in self.tried]
            parts.append(console.table(_COLUMNS, rows, title="Candidates"))
        return console.text_of(*parts, *told, *self.advice)


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

    Of those that are within 5 % of the fastest it is the most exact one.

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
    # A gain that is not shown is none: then what counts is to be exact.
    close = [name for name in passed if paces[name].slowdown < MIN_GAIN]
    best = min(close, key=lambda name: passed[name].difference)
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
                other = write(source, Request(format, "float32"), folder)
                choose_threads(source, other)
                found.append(other)
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


_COLUMNS: dict[str, Mapping[str, object]] = {
    "candidate": {"no_wrap": True},
    "size": console.RIGHT,
    "batch 1": console.RIGHT,
    "largest difference": console.RIGHT,
    "what became of it": console.FOLD,
}
