"""Prints estimates of memory: a row for each kind, and the largest layers."""

import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from tfamp.memory.estimate.breakdown import KINDS
from tfamp.records import console
from tfamp.records.units import format_bytes

_MAX_LAYERS = 8


def table(estimates: Sequence[Any]) -> str:
    """Returns `MemoryEstimate`s as text of at most 110 columns.

    Args:
        estimates: Of one model.
    """
    first = estimates[0]
    step = "training step" if first.training else "step of predict"
    parts = [f"Memory of a {step} of {first.model!r}", _kinds(estimates)]
    if len(estimates) == 1:
        parts.append(_layers(first))
    notes = dict.fromkeys(note for each in estimates for note in each.notes)
    lines = [f"Peak at {first.at}." if len(estimates) == 1 else ""]
    lines += [f"Note: {note}" for note in notes]
    parts += ["\n".join(textwrap.wrap(line, console.WIDTH)) for line in lines if line]
    return console.text_of(*parts)


def _kinds(estimates: Sequence[Any]) -> Table:
    found = Table(box=box.SIMPLE, show_edge=False)
    found.add_column("")
    for each in estimates:
        found.add_column(f"{each.policy}\nbatch {each.batch_size:,}", justify="right")
    for kind in KINDS:
        if any(kind in each.by_kind for each in estimates):
            sizes = (each.by_kind.get(kind, 0) for each in estimates)
            found.add_row(kind, *(format_bytes(n) if n else "-" for n in sizes))
    found.add_section()
    found.add_row("peak", *(format_bytes(each.peak_bytes) for each in estimates))
    found.add_row(
        "of which the step makes",
        *(format_bytes(each.step_bytes) for each in estimates),
    )
    if any(each.resident_bytes is not None for each in estimates):
        sizes = (each.resident_bytes for each in estimates)
        cells = ("-" if size is None else format_bytes(size) for size in sizes)
        found.add_row("resident size of the process", *cells)
    return found


def _layers(estimate: Any) -> Any:
    sizes = list(estimate.by_layer.items())
    rows = [(path, format_bytes(size)) for path, size in sizes[:_MAX_LAYERS]]
    if rest := sizes[_MAX_LAYERS:]:
        others = format_bytes(sum(size for _, size in rest))
        rows.append((f"{len(rest)} others", others))
    columns = {"largest layers": console.FOLD, "at the peak": console.RIGHT}
    return console.table(columns, rows, box=box.SIMPLE, show_edge=False)
