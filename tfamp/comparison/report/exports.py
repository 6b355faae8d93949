"""Exports of the reference's model beside one another: a column each."""

import dataclasses
import re
from collections.abc import Callable

from tfamp.comparison.evidence import Evidence
from tfamp.comparison.exported_models import ExportedModel
from tfamp.comparison.report import figures
from tfamp.records.units import format_bytes, format_seconds, join_words

_MOST_NAMED = 3
# The best float32 is of another runtime for each export.
_RUNTIME = re.compile(r" \((\w+)\)")


@dataclasses.dataclass(frozen=True)
class ExportRow:
    """A figure of every export; `is_main` where a short table has it."""

    label: str
    values: tuple[str, ...]
    is_main: bool = False


def export_rows(evidence: Evidence) -> tuple[ExportRow, ...]:
    """Returns the rows of the table that has a column for each export.

    Rows that nothing is known of are left out.
    """
    found: list[tuple[str, Callable[[ExportedModel], str], bool]] = [
        ("against float32", lambda each: each.verdict, True),
        *((f"{name}, exported", _metric(name), True) for name in _metrics(evidence)),
        ("worse by", _worsening, False),
        ("predictions flipped", _flipped, False),
        *((f"p50, batch {n}", _latency(n), n == 1) for n in _sizes(evidence)),
        *(
            (f"times {name}", _speedup(name), _is_main(name))
            for name in _pairs(evidence)
        ),
        ("size", _size, True),
        ("first answer after", lambda each: _seconds(each.cold_start_seconds), False),
        ("peak memory", lambda each: _bytes(each.peak_bytes), False),
        ("in float32", _kept, False),
    ]
    rows = (
        ExportRow(label, tuple(map(of, evidence.exports)), is_main)
        for label, of, is_main in found
    )
    return tuple(row for row in rows if {*row.values} - {figures.MISSING})


def export_sentences(evidence: Evidence) -> tuple[str, ...]:
    """Returns what was exported, and why some could not be."""
    if not evidence.exports:
        return ()
    first = evidence.exports[0]
    name = evidence.label(first.policy)
    told = [
        f"Exported: the model of {name} with seed {first.seed}, compared with itself "
        "in float32."
    ]
    told += [
        f"{each.name} could not be exported: {each.error}"
        for each in evidence.exports
        if each.error
    ]
    return tuple(told)


def _metrics(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(x.metric for x in evidence.exports if x.metric))


def _sizes(evidence: Evidence) -> list[int]:
    return sorted({each.batch_size for x in evidence.exports for each in x.latencies})


def _pairs(evidence: Evidence) -> list[str]:
    """Returns what exports were timed against, without the runtime of the best one."""
    names = (name for x in evidence.exports for name in x.speedups)
    return sorted(
        dict.fromkeys(_RUNTIME.sub("", name) for name in names),
        key=lambda name: int(name.rpartition(" ")[2]),
    )


def _is_main(name: str) -> bool:
    return name.startswith("SavedModel")


def _metric(name: str) -> Callable[[ExportedModel], str]:
    def of(each: ExportedModel) -> str:
        if each.metric != name or each.exported_metric is None:
            return figures.MISSING
        return f"{each.exported_metric:.4g} for {each.float32_metric:.4g}"

    return of


def _worsening(each: ExportedModel) -> str:
    if each.worsening is None or each.bound is None:
        return figures.MISSING
    return f"{each.worsening:.2%}, at most {each.bound:.2%}"


def _flipped(each: ExportedModel) -> str:
    if each.error:
        return figures.MISSING
    return f"{each.flipped:,} of {each.num_examples:,}"


def _latency(size: int) -> Callable[[ExportedModel], str]:
    def of(each: ExportedModel) -> str:
        found = (x.p50_seconds for x in each.latencies if x.batch_size == size)
        return _seconds(next(found, None))

    return of


def _speedup(name: str) -> Callable[[ExportedModel], str]:
    def of(each: ExportedModel) -> str:
        for against, found in each.speedups.items():
            if _RUNTIME.sub("", against) == name:
                runtime = _RUNTIME.search(against)
                which = f", {runtime[1]}" if runtime else ""
                between = f" ({figures.ends(found)})" if figures.is_known(found) else ""
                return f"{figures.ratio(found.estimate)}{between}{which}"
        return figures.MISSING

    return of


def _size(each: ExportedModel) -> str:
    if each.size_bytes is None:
        return figures.MISSING
    text = format_bytes(each.size_bytes)
    if not each.float32_bytes:
        return text
    return f"{text}, {each.size_bytes / each.float32_bytes:.2f} of the weights"


def _kept(each: ExportedModel) -> str:
    if not each.kept:
        return figures.MISSING
    rest = len(each.kept) - _MOST_NAMED
    more = [f"{rest} more"] if rest > 0 else []
    return join_words([*each.kept[:_MOST_NAMED], *more])


def _seconds(value: float | None) -> str:
    return figures.MISSING if value is None else format_seconds(value)


def _bytes(value: int | None) -> str:
    return figures.MISSING if value is None else format_bytes(value)
