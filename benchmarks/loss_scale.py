"""What a loss-scale optimizer adds to the step of the optimizer inside.

Prints the time of a step of Adam on given gradients, and how many times as long Keras's
`LossScaleOptimizer` and tfamp's take: for 200 variables of 64x64 and 4 of 2048x2048,
in a graph and compiled by XLA.

Time: about five minutes on two CPU cores. Use an idle machine.

The three sides live in one process and take turns; a ratio is the median over the
turns, its spread the 90 % bootstrap interval.
Seconds to trace and compile are those of the first call, measured once.
"""

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks._runner import ratio, take_turns, timed

CASES = {"200 of 64x64": (200, 64), "4 of 2048x2048": (4, 2048)}
MODES = {"graph": False, "XLA": True}
WARM_UP = 5
SIDES = ("bare", "keras", "tfamp")
FLAGS = (("integer", "turns", 200, "Turns of each side."),)


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
    draws = [rng.normal(size=shape).astype("float32") for _ in variables]
    gradients = [tf.constant(each) for each in draws]
    optimizer = make_optimizer(side)
    optimizer.build(variables)

    @tf.function(jit_compile=jit_compile)
    def step(gradients: list[tf.Tensor]) -> tf.Tensor:
        optimizer.apply(gradients, variables)
        return optimizer.iterations + 0

    start = time.perf_counter()
    step(gradients).numpy()
    return lambda: step(gradients).numpy(), time.perf_counter() - start


def measure_case(
    num_variables: int, width: int, jit_compile: bool, turns: int
) -> dict[str, Any]:
    """Returns the figures of one case."""
    gc.collect()
    made = [make_step(side, num_variables, width, jit_compile) for side in SIDES]
    steps = [functools.partial(timed, step) for step, _ in made]
    take_turns(steps, WARM_UP)
    seconds = take_turns(steps, turns)[..., 0]
    return {
        "bare_milliseconds": round(1e3 * float(np.median(seconds[:, 0])), 2),
        "first_call_seconds": {
            side: round(first, 1) for side, (_, first) in zip(SIDES, made, strict=True)
        },
        "keras": ratio(seconds[:, 1], seconds[:, 0]),
        "tfamp": ratio(seconds[:, 2], seconds[:, 0]),
        "turns": turns,
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cases, turns = CASES, settings.turns
    if settings.smoke:
        cases, turns = {"3 of 4x4": (3, 4)}, 2
    return {
        "cases": {
            f"{case}, {mode}": measure_case(*size, jit_compile, turns)
            for case, size in cases.items()
            for mode, jit_compile in MODES.items()
        }
    }
