"""Measures what a loss-scale optimizer adds to the step of the optimizer inside.

Prints, from one run, the time of a step of Adam on given gradients, and how many
times as long Keras's `LossScaleOptimizer` and tfamp's take: for 200 variables of
64x64 and 4 of 2048x2048, in a graph and compiled by XLA.

Command: python benchmarks/loss_scale.py [--json=FILE]
Time: about five minutes on two CPU cores. Use an idle machine.

The three sides live in one process and take turns, so that another program slows all
alike; a ratio is the median over the turns, its spread the 90 % bootstrap interval.
Seconds to trace and compile are those of the first call, measured once.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _figures  # noqa: E402
import keras  # noqa: E402  (TensorFlow reads its log level when it is imported)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from _turns import ratio, take_turns  # noqa: E402
from absl import flags  # noqa: E402

import tfamp  # noqa: E402

CASES = {
    "200 of 64x64": (200, 64),
    "4 of 2048x2048": (4, 2048),
}
MODES = {"graph": False, "XLA": True}
WARM_UP = 5
SIDES = ("bare", "keras", "tfamp")


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_integer("turns", 200, "Turns of each side.", flag_values=values)
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_boolean(
        "smoke",
        False,
        "Tiny variables, two turns; the figures mean nothing.",
        flag_values=values,
    )
    return values


def make_optimizer(side: str) -> keras.optimizers.Optimizer:
    """Returns Adam, bare or in one of the two wrappers."""
    adam = keras.optimizers.Adam(1e-3)
    if side == "bare":
        return adam
    if side == "keras":
        return keras.optimizers.LossScaleOptimizer(adam)
    optimizer = tfamp.LossScaleOptimizer(adam)
    optimizer.scale_loss(0.0)  # the gradients below are given, not computed
    return optimizer


def make_step(
    side: str, num_variables: int, width: int, jit_compile: bool
) -> tuple[Callable[[], Any], float]:
    """Returns a step that takes no arguments, and the seconds its first call took."""
    rng = np.random.default_rng(0)
    shape = (width, width)
    variables = [
        keras.Variable(rng.normal(size=shape).astype("float32"))
        for _ in range(num_variables)
    ]
    gradients = [
        tf.constant(rng.normal(size=shape).astype("float32")) for _ in variables
    ]
    optimizer = make_optimizer(side)
    optimizer.build(variables)

    @tf.function(jit_compile=jit_compile)
    def step(gradients: list[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, variables)
        return optimizer.iterations + 0

    start = time.perf_counter()
    step(gradients).numpy()
    return lambda: step(gradients).numpy(), time.perf_counter() - start


def measure(num_variables: int, width: int, jit_compile: bool, turns: int) -> dict:
    """Returns the figures of one case."""
    gc.collect()
    made = [make_step(side, num_variables, width, jit_compile) for side in SIDES]
    steps = [step for step, _ in made]
    take_turns(steps, WARM_UP)
    seconds = take_turns(steps, turns)
    return {
        "bare_milliseconds": round(1e3 * float(np.median(seconds[:, 0])), 2),
        "first_call_seconds": {
            side: round(first, 1) for side, (_, first) in zip(SIDES, made, strict=True)
        },
        "keras": ratio(seconds[:, 1], seconds[:, 0]),
        "tfamp": ratio(seconds[:, 2], seconds[:, 0]),
        "turns": turns,
    }


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"A step over bare Adam's; {result['device']}; {versions}")
    for column in ("variables", "mode", "bare", "Keras", "tfamp", "first call, s"):
        table.add_column(column)
    for name, figures in result["cases"].items():
        case, mode = name.rsplit(", ", 1)
        ratios = [
            f"{figures[side]['ratio']:.3f} {figures[side]['interval']}"
            for side in SIDES[1:]
        ]
        first = " / ".join(str(figures["first_call_seconds"][side]) for side in SIDES)
        bare = f"{figures['bare_milliseconds']} ms"
        table.add_row(case, mode, bare, *ratios, first)
    Console(width=120).print(table)


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    cases, turns = CASES, settings.turns
    if settings.smoke:
        cases, turns = {"3 of 4x4": (3, 4)}, 2
    device = tfamp.status().devices[0]
    result = {
        "benchmark": "loss_scale",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "cases": {
            f"{case}, {mode}": measure(*size, jit_compile, turns)
            for case, size in cases.items()
            for mode, jit_compile in MODES.items()
        },
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
