"""Measures what `FlightRecorder` and `NanRecovery` add to a step of `fit`.

Prints, from one run, the time of a step with no callback, and how many times as long
it takes with each of them and with both, for four models. The goal is 1.02 for both.

Command: python benchmarks/guards.py [--json=FILE]
Time: about twenty minutes on two CPU cores. Use an idle machine.

The sides live in one process and take turns, so that another program slows all alike;
a ratio is the median over the turns, its spread the 90 % bootstrap interval. A turn is
a `fit` of about six seconds, of which the first third is not timed: each `fit` begins
with snapshots and writes the first good one. Then they come as rarely as they do in a
long run. The mean step counts, with all snapshots that were due.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _figures  # noqa: E402
import _models  # noqa: E402
import keras  # noqa: E402  (TensorFlow reads its log level when it is imported)
from _callback_turns import MEAN, cells, measure, side  # noqa: E402
from absl import flags, logging  # noqa: E402

import tfamp  # noqa: E402
from tfamp.callbacks import FlightRecorder, NanRecovery  # noqa: E402

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
    "FlightRecorder": lambda folder: [FlightRecorder(folder / "bundles")],
    "NanRecovery": lambda folder: [NanRecovery(folder / "good")],
    "both": lambda folder: [
        FlightRecorder(folder / "bundles both"),
        NanRecovery(folder / "good both"),
    ],
}


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_integer("turns", 8, "Turns of each side.", flag_values=values)
    flags.DEFINE_multi_string(
        "case", list(CASES), "Models to measure.", flag_values=values
    )
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_boolean(
        "smoke",
        False,
        "A small model, few steps, two turns; the figures mean nothing.",
        flag_values=values,
    )
    return values


def measure_case(case: str, turns: int, steps: int, folder: Path) -> dict[str, Any]:
    """Returns the figures of one model."""
    build, options, _ = CASES[case]
    sides = {}
    for name, make in SIDES.items():
        # Without an end, so that all turns train on alike.
        model, data, _ = build(steps=10**9, **options)
        sides[name] = side(model, data, make(folder), steps, untimed=steps // 3)
    figures = measure(sides, turns, what=MEAN)
    figures["parameters"] = model.count_params()
    figures["met"] = figures["both"]["ratio"] <= GOAL
    return figures


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"A step over that without; {result['device']}; {versions}")
    for column in ("model", "parameters", "step", *list(SIDES)[1:]):
        table.add_column(column)
    for case, figures in result["cases"].items():
        ratios = cells(figures, list(SIDES)[1:])
        size = f"{figures['parameters']:,}"
        table.add_row(case, size, f"{figures['step_milliseconds']} ms", *ratios)
    Console(width=120).print(table)


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    # Folders are used again by each turn, which would be told of.
    logging.set_verbosity(logging.ERROR)
    turns, chosen = settings.turns, {name: CASES[name][2] for name in settings.case}
    if settings.smoke:
        turns, chosen = 2, {"small MLP": 20}
    device = tfamp.status().devices[0]
    cases = {}
    for case, steps in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            cases[case] = measure_case(case, turns, steps, Path(folder))
    result = {
        "benchmark": "guards",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "cases": cases,
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
