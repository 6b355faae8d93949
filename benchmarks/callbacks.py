"""What the callbacks of tfamp add to a step of `fit`.

Prints the time of a step with no callback, and how many times as long it takes with
each, for four models. The goal is 1.02.

Time: about ten minutes on two CPU cores. Use an idle machine.

The sides live in one process and take turns; a ratio is the median over the turns, its
spread the 90 % bootstrap interval. A turn is a `fit` of about six seconds, of which the
first third is not timed: each begins with snapshots, which later come as rarely as in a
long run. The mean step counts, with all snapshots that were due.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from absl import logging

from benchmarks import _models
from benchmarks._runner import MEAN, compare_fits, fit_side
from tfamp.callbacks import DeviceStats, NanRecovery, Throughput

GOAL = 1.02
# What builds a model, and the steps of a turn.
CASES: dict[str, tuple[Callable[..., Any], dict[str, int], int]] = {
    "small MLP": (_models.mlp, {"width": 64}, 1800),
    "MLP": (_models.mlp, {"width": 512}, 300),
    "CNN": (_models.cnn, {"size": 16}, 150),
    "transformer": (_models.transformer, {"width": 64, "length": 64}, 130),
}
SIDES: dict[str, Callable[[Path], list[keras.callbacks.Callback]]] = {
    "none": lambda folder: [],
    "NanRecovery": lambda folder: [NanRecovery(folder / "good")],
    "Throughput and DeviceStats": lambda folder: [Throughput(), DeviceStats()],
}
FLAGS = (
    ("integer", "turns", 8, "Turns of each side."),
    ("multi_string", "case", list(CASES), "Models to measure."),
)


def measure_case(case: str, turns: int, steps: int, folder: Path) -> dict[str, Any]:
    """Returns the figures of one model."""
    build, options, _ = CASES[case]
    sides = {}
    for name, make in SIDES.items():
        # Without an end, so that all turns train on alike.
        model, data, _ = build(steps=10**9, **options)
        sides[name] = fit_side(model, data, make(folder), steps, untimed=steps // 3)
    figures = compare_fits(sides, turns, what=MEAN)
    figures["parameters"] = model.count_params()
    for name in list(SIDES)[1:]:
        figures[name]["met"] = figures[name]["ratio"] <= GOAL
    return figures


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    # Folders are used again by each turn, which would be told of.
    logging.set_verbosity(logging.ERROR)
    turns, chosen = settings.turns, {name: CASES[name][2] for name in settings.case}
    if settings.smoke:
        turns, chosen = 2, {"small MLP": 20}
    cases = {}
    for case, steps in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            cases[case] = measure_case(case, turns, steps, Path(folder))
    return {"goal": GOAL, "cases": cases}
