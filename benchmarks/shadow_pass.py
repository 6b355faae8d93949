"""Measures how long `tfamp.sensitivity` takes on models of ten million parameters.

Prints, for each model and dtype, the seconds of a pass over three batches, the slowest
of the runs, and how many train steps in float32 would take as long. The goal is 60
seconds.

Command: python benchmarks/shadow_pass.py [--json=FILE]
Time: about five minutes on two CPU cores. Use an idle machine.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _figures  # noqa: E402
import _models  # noqa: E402
import numpy as np  # noqa: E402  (TensorFlow reads its log level when it is imported)
from absl import flags  # noqa: E402

import tfamp  # noqa: E402
from tfamp.machine import amx  # noqa: E402

GOAL = 60.0
# What builds a model of about ten million parameters.
CASES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "MLP": (_models.mlp, {"width": 2048}),
    "transformer": (_models.transformer, {"width": 512, "length": 64}),
}
DTYPES = ("float16", "bfloat16")
STEPS = 10


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_integer("runs", 3, "Passes of each kind.", flag_values=values)
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_boolean(
        "smoke",
        False,
        "A tiny model, one pass; the figures mean nothing.",
        flag_values=values,
    )
    return values


def measure(case: str, options: dict[str, int], runs: int) -> dict[str, Any]:
    """Returns the figures of one model."""
    build, own = CASES[case]
    model, data, _ = build(**own | options)
    model.fit(data.take(STEPS), verbose=0)
    start = time.perf_counter()
    model.fit(data.take(STEPS), verbose=0)
    step = (time.perf_counter() - start) / STEPS
    figures: dict[str, Any] = {
        "parameters": model.count_params(),
        "step_milliseconds": round(1e3 * step, 2),
    }
    for dtype in DTYPES:
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            found = tfamp.sensitivity(model, data, dtype=dtype)
            seconds.append(time.perf_counter() - start)
        figures[dtype] = {
            "seconds": round(float(np.median(seconds)), 2),
            "slowest": round(max(seconds), 2),
            "steps": round(float(np.median(seconds)) / step, 1),
            "verdict": found.verdict,
            "met": max(seconds) <= GOAL,
        }
    return figures


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"A shadow pass; {result['device']}; {versions}")
    for column in ("model", "parameters", "dtype", "seconds", "slowest", "steps"):
        table.add_column(column)
    for case, figures in result["cases"].items():
        for dtype in DTYPES:
            own = figures[dtype]
            numbers = (own["seconds"], own["slowest"], own["steps"])
            size = f"{figures['parameters']:,}"
            table.add_row(case, size, dtype, *map(str, numbers))
    Console(width=120).print(table)


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    amx.avoid()  # ahead of the first product
    runs, cases, options = settings.runs, list(CASES), {}
    if settings.smoke:
        runs, cases, options = 1, ["MLP"], {"width": 16}
    device = tfamp.status().devices[0]
    result = {
        "benchmark": "shadow_pass",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "runs": runs,
        "cases": {case: measure(case, options, runs) for case in cases},
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
