"""Draws speed and memory against the batch size."""

import os
from typing import Any

from tfamp.records import checks

_BLUE, _RED, _GREEN, _GREY = "#4c78a8", "#e45756", "#54a24b", "#888888"
_GIB = 2**30


def plot(found: Any, path: str | os.PathLike[str]) -> None:
    """Draws two panels, one below the other: examples/s, and peak memory.

    Args:
        found: A `BatchSearch`.
        path: An image file; its ending says its kind.

    Raises:
        ImportError: matplotlib is not installed.
    """
    checks.require("matplotlib", extra="report", purpose="`BatchSearch.plot`")
    from matplotlib.figure import Figure

    # Without pyplot, which keeps figures and picks a display.
    figure = Figure(figsize=(8.0, 6.5), layout="constrained")
    speed, memory = figure.subplots(2, 1, sharex=True)
    _draw_speed(speed, found)
    _draw_memory(memory, found)
    sizes = sorted({trial.batch_size for trial in found.trials})
    memory.set_xscale("log", base=2)
    memory.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=45)
    memory.minorticks_off()
    memory.set_xlabel("batch size")
    for axes in (speed, memory):
        axes.axvline(
            found.batch_size,
            color=_GREEN,
            label=f"chosen: {found.batch_size:,} (ended by {found.stopped_by})",
        )
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small", loc="lower right")
    title = f"{found.model}, {found.policy}"
    if found.accumulation_steps > 1:
        title += f": {found.accumulation_steps} steps of {found.batch_size:,} an update"
    speed.set_title(title, loc="left")
    figure.savefig(path, dpi=120)


def _draw_speed(axes: Any, found: Any) -> None:
    points = sorted(
        (trial.batch_size, trial.examples_per_second)
        for trial in found.trials
        if trial.fits and trial.examples_per_second is not None
    )
    sizes, speeds = zip(*points, strict=True)
    axes.plot(sizes, speeds, color=_BLUE, marker="o", label="examples/s")
    if found.min_gain is not None:
        # Whatever lies above it is as good as the best.
        axes.axhline(
            (1 - found.min_gain) * max(speeds),
            color=_GREY,
            linestyle=":",
            label=f"within {found.min_gain:.0%} of the best",
        )
    axes.set_ylabel("examples/s")


def _draw_memory(axes: Any, found: Any) -> None:
    known = sorted(
        (trial.batch_size, trial.peak_bytes / _GIB, trial.fits)
        for trial in found.trials
        if trial.peak_bytes is not None
    )
    fitting = [(size, peak) for size, peak, fits in known if fits]
    axes.plot(*zip(*fitting, strict=True), color=_BLUE, marker="o", label="peak memory")
    allowed = found.allowed_bytes
    highest = max(peak for _, peak in fitting)
    is_over = any(trial.outcome == "over the limit" for trial in found.trials)
    # A limit far above all that was held would press the curve flat.
    if allowed is not None and (is_over or allowed / _GIB < 4 * highest):
        highest = allowed / _GIB
        axes.axhline(
            found.limit.free_bytes / _GIB,
            color=_RED,
            linestyle=":",
            label=f"limit: {found.limit.source}",
        )
        axes.axhline(
            highest, color=_RED, linestyle="--", label=f"less {found.margin:.0%} margin"
        )
    # A trial that was ended had no peak yet: it stands at the limit.
    failed = sorted({trial.batch_size for trial in found.trials if not trial.fits})
    if failed:
        axes.plot(
            failed,
            [highest] * len(failed),
            color=_RED,
            marker="x",
            linestyle="",
            label="does not fit",
        )
    axes.set_ylabel("peak memory in GiB")
