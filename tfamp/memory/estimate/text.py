"""Estimates of memory as text and as a picture: kinds, layers, policies."""

import os
import textwrap
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from tfamp.memory.estimate.breakdown import KINDS
from tfamp.records import checks, console
from tfamp.records.units import format_bytes

_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#72b7b2")
_MAX_LAYERS = 8


def plot(estimates: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Draws a line for each policy, and a dot for each size that was asked for.

    Raises:
        ImportError: matplotlib is not installed.
    """
    checks.require("matplotlib", extra="report", purpose="`MemoryEstimate.plot`")
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures and picks a display.
    figure = Figure(figsize=(8.0, 5.0), layout="constrained")
    axes = figure.subplots()
    policies = list(dict.fromkeys(each.policy for each in estimates))
    for number, policy in enumerate(policies):
        own = [each for each in estimates if each.policy == policy]
        colour = _COLOURS[number % len(_COLOURS)]
        points = sorted({point for each in own for point in each.curve})
        axes.plot(
            [size for size, _ in points],
            [peak for _, peak in points],
            color=colour,
            label=policy,
        )
        axes.plot(
            [each.batch_size for each in own],
            [each.peak_bytes for each in own],
            "o",
            color=colour,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    axes.set_xlabel("batch size")
    axes.set_ylabel("peak memory (predicted)")
    axes.set_title(f"Memory of a step of {estimates[0].model}")
    axes.grid(alpha=0.3)
    axes.legend(title="policy")
    figure.savefig(path)


def table(estimates: Sequence[Any]) -> str:
    """Returns `MemoryEstimate`s as text of at most 110 columns."""
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
