"""What `Throughput` and `DeviceStats` add to a step of `fit`.

Prints the time of a step with no callback, and how many times as long it takes with
each and with both, for a model whose step takes about a millisecond, the worst case,
and one of ten. The goal is 1.01. Then trains on a pipeline that is made slow, and
prints which part of the time `Throughput` says was waited, and which was: 1 - step
without the pipeline / step with it.

Time: about four minutes on two CPU cores. Use an idle machine.

The sides live in one process and take turns, so that another program slows all alike;
a ratio is the median over the turns, its spread the 90 % bootstrap interval. A turn is
a `fit`, whose first steps are not timed. Of it the median step counts; what happens
between steps, now and then or in other threads is in the processor time, which is
that of the whole turn.
"""

import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks._turns import MEDIAN, Side, compare_fits, fit_side
from tfamp.callbacks import DeviceStats, Throughput

GOAL = 1.01
FLAGS = (("integer", "turns", 40, "Turns of each side."),)
# Width of two Dense layers, batch size, steps of a turn.
CASES = {"small": (32, 32, 400), "medium": (512, 256, 80)}
SMOKE = {"small": (4, 4, 20)}
# Milliseconds to make a batch and to train on it.
PIPELINES = {"input-bound": (30, 10), "balanced": (20, 15), "compute-bound": (5, 20)}
SIDES: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "none": list,
    "Throughput": lambda: [Throughput()],
    "DeviceStats": lambda: [DeviceStats()],
    "both": lambda: [Throughput(), DeviceStats()],
}


def make_side(name: str, width: int, batch: int, steps: int) -> Side:
    """Returns a turn of a side."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * batch, width)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    dataset = dataset.batch(batch).cache().repeat().prefetch(2)
    hidden = keras.layers.Dense(width, activation="relu")
    model = keras.Sequential([keras.Input((width,)), hidden, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return fit_side(model, dataset, SIDES[name](), steps)


def measure_case(width: int, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """Returns the figures of one case."""
    sides = {name: make_side(name, width, batch, steps) for name in SIDES}
    figures = compare_fits(sides, turns, what=MEDIAN)
    for name in list(SIDES)[1:]:
        figures[name]["met"] = figures[name]["ratio"] <= GOAL
    return figures


class Sleeping(keras.layers.Layer):
    """Takes so many milliseconds in the forward pass."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.milliseconds = milliseconds

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns its input, later."""

        def sleep(value: np.ndarray) -> np.ndarray:
            time.sleep(self.milliseconds / 1e3)
            return value

        slept = tf.numpy_function(sleep, [tf.stop_gradient(x)], x.dtype)
        return x + 0 * tf.ensure_shape(slept, x.shape)


def measure_wait(make_ms: float, train_ms: float, steps: int) -> dict[str, float]:
    """Returns the part of the time that is waited, as told and as it is."""

    def make(index: np.ndarray) -> np.ndarray:
        time.sleep(make_ms / 1e3)
        return np.ones((8, 8), "float32")

    def batches(*, is_slow: bool) -> tf.data.Dataset:
        dataset = tf.data.Dataset.range(steps)
        if not is_slow:
            return dataset.map(lambda i: (tf.ones((8, 8)), tf.ones((8, 1))))
        return dataset.map(
            lambda i: (
                tf.ensure_shape(tf.numpy_function(make, [i], tf.float32), (8, 8)),
                tf.ones((8, 1)),
            )
        ).prefetch(2)

    layers = [keras.Input((8,)), Sleeping(train_ms), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    found = {}
    for name in ("alone", "slow"):
        data, told = batches(is_slow=name == "slow"), Throughput()
        history = model.fit(data, epochs=2, verbose=0, callbacks=[told]).history
        found[name] = {key: history[key][-1] for key in ("step_seconds", "input_wait")}
    alone, slow = found["alone"]["step_seconds"], found["slow"]["step_seconds"]
    return {
        "told": round(found["slow"]["input_wait"], 3),
        "waited": round(max(0.0, 1 - alone / slow), 3),
    }


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cases, turns, steps = CASES, settings.turns, 100
    if settings.smoke:
        cases, turns, steps = SMOKE, 2, 4
    return {
        "goal": GOAL,
        "cases": {case: measure_case(*size, turns) for case, size in cases.items()},
        "input_wait": {
            name: measure_wait(*milliseconds, steps)
            for name, milliseconds in PIPELINES.items()
        },
    }
