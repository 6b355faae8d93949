"""How long `tfamp.sensitivity` takes on models of ten million parameters.

Prints, for each model and dtype, the seconds of a pass over three batches, the slowest
of the runs, and how many train steps in float32 would take as long. The goal is 60
seconds.

Time: about five minutes on two CPU cores. Use an idle machine.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import tfamp
from benchmarks import _models
from benchmarks._runner import timed
from tfamp.machine import cpus

GOAL = 60.0
# What builds a model of about ten million parameters.
CASES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "MLP": (_models.mlp, {"width": 2048}),
    "transformer": (_models.transformer, {"width": 512, "length": 64}),
}
DTYPES = ("float16", "bfloat16")
STEPS = 10
FLAGS = (("integer", "runs", 3, "Passes of each kind."),)


def measure_case(case: str, options: dict[str, int], runs: int) -> dict[str, Any]:
    """Returns the figures of one model."""
    build, own = CASES[case]
    model, data, _ = build(**own | options)
    model.fit(data.take(STEPS), verbose=0)
    step = timed(lambda: model.fit(data.take(STEPS), verbose=0))[0] / STEPS
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


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cpus.avoid_broken_amx()  # ahead of the first product
    runs, cases, options = settings.runs, list(CASES), {}
    if settings.smoke:
        runs, cases, options = 1, ["MLP"], {"width": 16}
    found = {case: measure_case(case, options, runs) for case in cases}
    return {"goal": GOAL, "runs": runs, "cases": found}
