"""What `tfamp.data` makes of image files, CSV and sampling plans.

Prints examples/s of each pipeline and how many times as fast tfamp's is as another way
to write the same: naive and hand-tuned tf.data, and Keras's loader.

Time: about ten minutes on two CPU cores. Use an idle machine.

Images and tables are made here, of random content. The sides live in one process and
take turns, each reading one epoch, timed from its start to its last batch; a ratio is
the median over the turns, its spread the 90 % bootstrap interval. Every side reads
from files that the system holds in memory, so no disk is measured.
"""

import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _pipelines
from benchmarks._turns import ratio, take_turns

# What a pipeline is compared with, and how many times as fast it has to be.
GOALS = {
    ("tfamp", "naive, not optimised"): 2.0,
    ("tfamp", "naive"): None,
    ("tfamp", "hand-tuned"): 0.97,
    ("tfamp", "Keras's loader"): None,
    ("tfamp, memory cache", "naive, not optimised"): 10.0,
    ("tfamp, file cache", "naive, not optimised"): 6.5,
    ("tfamp, memory cache and cast", "naive, not optimised"): None,
    ("tfamp, reshuffled cache", "the same, cast on the CPU"): 5.0,
    ("tfamp, reshuffled cache", "the same, cast by batches"): None,
    ("tfamp, CSV", "CSV row by row"): 8.0,
    ("tfamp, CSV", "make_csv_dataset"): None,
}
# A plan is timed by itself: an epoch with it, less one of the same arrays in order.
PLANS = ("balanced", "weighted", "weighted without replacement")
MAX_EPOCH_END_SECONDS = 0.020
MAX_PLAN_MICROSECONDS = 10.0
FLAGS = (
    ("integer", "turns", 15, "Turns of each side."),
    ("integer", "images", 2000, "Image files."),
    ("integer", "rows", 200_000, "Rows of CSV."),
)


class Epochs:
    """Reads a side epoch by epoch, and keeps the time apart that its end took.

    Args:
        side: What to iterate.

    Attributes:
        num_batches: Batches in an epoch, counted in the first one, which is not timed.
        seconds: Of each epoch, from its start to its last batch.
        ends: Seconds from there until the iterator had ended.
    """

    def __init__(self, side: Iterable) -> None:
        self.side = side
        self.num_batches = sum(1 for _ in side)
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def __call__(self) -> float:
        """Reads one epoch and returns its seconds."""
        start = time.perf_counter()
        iterator = iter(self.side)
        for _ in range(self.num_batches):
            next(iterator)
        last = time.perf_counter()
        if next(iterator, None) is not None:
            raise RuntimeError(f"{self.side!r} has more batches in a later epoch.")
        self.seconds.append(last - start)
        self.ends.append(time.perf_counter() - last)
        return last - start


def read(sides: dict[str, Iterable], turns: int) -> dict[str, Epochs]:
    """Returns the sides after `turns` epochs of each."""
    epochs = {name: Epochs(side) for name, side in sides.items()}
    take_turns(list(epochs.values()), turns)
    return epochs


def ratios(epochs: dict[str, Epochs]) -> dict[str, dict[str, Any]]:
    """Returns how many times as fast as others tfamp's pipelines are."""
    figures = {}
    for (ours, other), goal in GOALS.items():
        if ours in epochs and other in epochs:
            seconds = [np.array(epochs[name].seconds) for name in (other, ours)]
            found = ratio(*seconds)
            met = goal is None or found["ratio"] >= goal
            figures[f"{ours} / {other}"] = {**found, "goal": goal, "met": met}
    return figures


def plan_figures(epochs: dict[str, Epochs], num_examples: int) -> dict[str, Any]:
    """Returns microseconds that each plan adds to an example."""
    plain = np.array(epochs["arrays"].seconds)
    figures = {}
    for plan in PLANS:
        added = np.array(epochs[f"arrays, {plan}"].seconds) - plain
        cost = 1e6 * float(np.median(added)) / num_examples
        figures[plan] = {
            "microseconds": round(cost, 3),
            "met": cost <= MAX_PLAN_MICROSECONDS,
        }
    return figures


def end_figures(epochs: dict[str, Epochs]) -> dict[str, Any]:
    """Returns the longest end of an epoch of tfamp's pipelines, and whose it is."""
    longest = {name: max(side.ends) for name, side in epochs.items() if "tfamp" in name}
    name = max(longest, key=lambda name: longest[name])
    return {
        "longest_milliseconds": round(1e3 * longest[name], 2),
        "pipeline": name,
        "epochs": sum(len(epochs[name].ends) for name in longest),
        "met": longest[name] <= MAX_EPOCH_END_SECONDS,
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, images, rows = settings.turns, settings.images, settings.rows
    if settings.smoke:
        turns, images, rows = 2, 40, 600
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "images")
        paths = _pipelines.write_images(folder, images)
        table = _pipelines.write_rows(Path(name, "rows.csv"), rows)
        epochs = read(_pipelines.image_sides(folder, paths, cores), turns)
        epochs |= read(_pipelines.row_sides(table), turns)
        epochs |= read(_pipelines.plan_sides(rows), turns)
    sizes = {
        name: rows if "CSV" in name or "csv" in name else images for name in epochs
    }
    return {
        "images": images,
        "rows": rows,
        "turns": turns,
        "rates": {
            name: round(sizes[name] / float(np.median(side.seconds)))
            for name, side in epochs.items()
            if not name.startswith("arrays")
        },
        "ratios": ratios(epochs),
        "plans": plan_figures(epochs, rows),
        "epoch_ends": end_figures(epochs),
    }
