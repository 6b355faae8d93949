"""Draws predicted memory against batch size."""

import os
from collections.abc import Sequence
from typing import Any

from tfamp.records import checks
from tfamp.records.units import format_bytes

_COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#72b7b2")


def plot(estimates: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Draws a line for each policy, and a dot for each size that was asked for.

    Args:
        estimates: `MemoryEstimate`s of one model.
        path: An image file; its ending says its kind.

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
