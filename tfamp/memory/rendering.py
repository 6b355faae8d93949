"""Prints estimates of memory: a row for each kind, and the largest layers."""

import io
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from tfamp._units import format_bytes
from tfamp.memory.accounting import KINDS

_WIDTH = 110
_MAX_LAYERS = 8


def table(estimates: Sequence[Any]) -> str:
    """Returns `MemoryEstimate`s as text of at most 110 columns.

    Args:
        estimates: Of one model.
    """
    console = Console(
        file=io.StringIO(), width=_WIDTH, color_system=None, legacy_windows=False
    )
    first = estimates[0]
    step = "training step" if first.training else "step of predict"
    console.print(f"Memory of a {step} of {first.model!r}", markup=False)
    console.print(_kinds(estimates))
    if len(estimates) == 1:
        console.print(_layers(first))
    notes = dict.fromkeys(note for each in estimates for note in each.notes)
    lines = [f"Peak at {first.at}." if len(estimates) == 1 else ""]
    lines += [f"Note: {note}" for note in notes]
    for line in filter(None, lines):
        console.print("\n".join(textwrap.wrap(line, _WIDTH)), markup=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


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
    return found


def _layers(estimate: Any) -> Table:
    found = Table(box=box.SIMPLE, show_edge=False)
    found.add_column("largest layers", overflow="fold")
    found.add_column("at the peak", justify="right")
    rows = list(estimate.by_layer.items())
    for path, size in rows[:_MAX_LAYERS]:
        found.add_row(path, format_bytes(size))
    if rows[_MAX_LAYERS:]:
        rest = sum(size for _, size in rows[_MAX_LAYERS:])
        found.add_row(f"{len(rows) - _MAX_LAYERS} others", format_bytes(rest))
    return found
