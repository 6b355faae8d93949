"""Measures what `Throughput` and `DeviceStats` add to a step of `fit`.

Prints, from one run, the time of a step with no callback, and how many times as long
it takes with each and with both, for a model whose step takes about a millisecond,
the worst case, and one of ten. The goal is 1.01. Then trains on a pipeline that is made
slow, and prints which part of the time `Throughput` says was waited, and which was:
1 - step without the pipeline / step with it.

Command: python benchmarks/callbacks_cost.py [--json=FILE]
Time: about four minutes on two CPU cores. Use an idle machine.

The sides live in one process and take turns, so that another program slows all alike;
a ratio is the median over the turns, its spread the 90 % bootstrap interval. A turn is
a `fit`, whose first steps are not timed. Of it the median step counts; what happens
between steps, now and then or in other threads is in the processor time, which is
that of the whole turn.
"""

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
from _callback_turns import MEDIAN, Side, cells, measure, side  # noqa: E402
from absl import flags  # noqa: E402

import tfamp  # noqa: E402
from tfamp.callbacks import DeviceStats, Throughput  # noqa: E402

GOAL = 1.01
# Width of two Dense layers, batch size, steps of a turn.
CASES = {"small": (32, 32, 400), "medium": (512, 256, 80)}
# Milliseconds to make a batch and to train on it.
PIPELINES = {"input-bound": (30, 10), "balanced": (20, 15), "compute-bound": (5, 20)}
SIDES: dict[str, Callable[[], list[keras.callbacks.Callback]]] = {
    "none": list,
    "Throughput": lambda: [Throughput()],
    "DeviceStats": lambda: [DeviceStats()],
    "both": lambda: [Throughput(), DeviceStats()],
}


def define_flags() -> flags.FlagValues:
    """Returns the flags with their defaults."""
    values = flags.FlagValues()
    flags.DEFINE_integer("turns", 40, "Turns of each side.", flag_values=values)
    flags.DEFINE_string("json", "", "File to write the figures to.", flag_values=values)
    flags.DEFINE_boolean(
        "smoke",
        False,
        "Few steps, two turns; the figures mean nothing.",
        flag_values=values,
    )
    return values


def make_model(width: int) -> keras.Model:
    """Returns a compiled model of two layers."""
    model = keras.Sequential(
        [
            keras.Input((width,)),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse")
    return model


def make_side(name: str, width: int, batch: int, steps: int) -> Side:
    """Returns a turn of a side."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4 * batch, width)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    dataset = dataset.batch(batch).cache().repeat().prefetch(2)
    return side(make_model(width), dataset, SIDES[name](), steps)


def measure_case(width: int, batch: int, steps: int, turns: int) -> dict[str, Any]:
    """Returns the figures of one case."""
    sides = {name: make_side(name, width, batch, steps) for name in SIDES}
    figures = measure(sides, turns, what=MEDIAN)
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

    model = keras.Sequential(
        [keras.Input((8,)), Sleeping(train_ms), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    found = {}
    for name in ("alone", "slow"):
        told = model.fit(
            batches(is_slow=name == "slow"),
            epochs=2,
            verbose=0,
            callbacks=[Throughput()],
        ).history
        found[name] = {key: told[key][-1] for key in ("step_seconds", "input_wait")}
    alone, slow = found["alone"]["step_seconds"], found["slow"]["step_seconds"]
    return {
        "told": round(found["slow"]["input_wait"], 3),
        "waited": round(max(0.0, 1 - alone / slow), 3),
    }


def show(result: dict[str, Any]) -> None:
    """Prints the figures as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    versions = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    table = Table(title=f"A step over that without; {result['device']}; {versions}")
    for column in ("model", "step", *list(SIDES)[1:]):
        table.add_column(column)
    for case, figures in result["cases"].items():
        ratios = cells(figures, list(SIDES)[1:])
        table.add_row(case, f"{figures['step_milliseconds']} ms", *ratios)
    console.print(table)
    table = Table(title="Part of the time that is waited for input")
    for column in ("pipeline", "Throughput says", "1 - step alone / step"):
        table.add_column(column)
    for case, wait in result["input_wait"].items():
        table.add_row(case, f"{wait['told']:.2f}", f"{wait['waited']:.2f}")
    console.print(table)


def main(argv: Sequence[str]) -> int:
    """Measures, prints tables and a last line of JSON."""
    settings = define_flags()
    settings(argv)
    cases, turns, wait_steps = CASES, settings.turns, 100
    if settings.smoke:
        cases, turns, wait_steps = {"small": (4, 4, 20)}, 2, 4
    device = tfamp.status().devices[0]
    result = {
        "benchmark": "callbacks_cost",
        "device": f"{device.name}, {os.cpu_count()} cores",
        "versions": _figures.versions(),
        "goal": GOAL,
        "cases": {case: measure_case(*size, turns) for case, size in cases.items()},
        "input_wait": {
            name: measure_wait(*milliseconds, wait_steps)
            for name, milliseconds in PIPELINES.items()
        },
    }
    show(result)
    _figures.finish(result, settings.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
