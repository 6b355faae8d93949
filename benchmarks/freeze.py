"""How fast models predict whose weights are stored in half precision.

Prints for several batch sizes the examples a second of Keras's own mixed_bfloat16, of
tfamp's, and of `tfamp.freeze`, each over those of float32. The goals for a frozen MLP
are 1.5 at batch 1 and 1.8 at batch 512.

Time: about three minutes on two CPU cores. Use an idle machine.

The sides live in one process and take turns, so that another program slows all alike;
a turn is as many calls of a traced function as take a third of a second.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks import _models
from benchmarks._turns import ratio, take_turns, timed
from tfamp.machine import cpus

GOALS = {"MLP": {1: 1.5, 512: 1.8}}
BATCH_SIZES = (1, 32, 512)
CASES: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "MLP": (_models.mlp, {"width": 2048}),
    "transformer": (_models.transformer, {"width": 256, "length": 64}),
}
TURN_SECONDS = 0.3
SIDES = ("float32", "Keras mixed_bfloat16", "tfamp mixed_bfloat16", "frozen")
FLAGS = (("integer", "turns", 9, "Turns of each side."),)


def sides_of(case: str, options: dict[str, int]) -> dict[str, keras.Model]:
    """Returns the same model in each way of storing and computing."""
    build, own = CASES[case]
    models = {"float32": build(**own | options)[0]}
    keras.config.set_dtype_policy("mixed_bfloat16")
    models["Keras mixed_bfloat16"] = build(**own | options)[0]
    keras.config.set_dtype_policy("float32")
    managed = build(**own | options)[0]
    tfamp.apply(managed, "mixed_bfloat16")
    models["tfamp mixed_bfloat16"] = managed
    for model in models.values():
        model.set_weights(models["float32"].get_weights())
    models["frozen"] = tfamp.freeze(managed)
    return models


def calls(model: keras.Model, x: Any) -> Callable[[], Any]:
    """Returns a traced call of a model."""
    function = tf.function(lambda x: model(x, training=False), autograph=False)
    return lambda: function(x).numpy()


def measure_case(
    case: str, options: dict[str, int], turns: int, sizes: Sequence[int]
) -> Any:
    """Returns the figures of one model by batch size."""
    models = sides_of(case, options)
    spec = models["float32"].inputs[0]
    figures: dict[str, Any] = {
        "bytes": {name: num_bytes(models[name]) for name in ("float32", "frozen")}
    }
    for size in sizes:
        x = tf.cast(
            tf.random.stateless_uniform((size, *spec.shape[1:]), (0, 0)), spec.dtype
        )
        run = {name: calls(model, x) for name, model in models.items()}
        np.testing.assert_array_equal(run["frozen"](), run["tfamp mixed_bfloat16"]())
        repeats = {name: repeats_of(call) for name, call in run.items()}

        def turn(name: str, run: Any = run, repeats: Any = repeats) -> Any:
            return lambda: timed(run[name], repeats[name])

        steps = take_turns([turn(name) for name in SIDES], turns)[..., 0]
        found: dict[str, Any] = {
            name: ratio(steps[:, 0], steps[:, i]) for i, name in enumerate(SIDES) if i
        }
        goal = GOALS.get(case, {}).get(size)
        found["float32_milliseconds"] = round(1e3 * float(np.median(steps[:, 0])), 3)
        found["goal"] = goal
        found["met"] = None if goal is None else found["frozen"]["ratio"] >= goal
        figures[str(size)] = found
    return figures


def repeats_of(call: Callable[[], Any]) -> int:
    """Returns how many calls take about as long as a turn."""
    call()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < TURN_SECONDS:
        call()
        count += 1
    return max(1, count)


def num_bytes(model: keras.Model) -> int:
    """Returns the bytes of all weights."""
    return sum(np.asarray(weight).nbytes for weight in model.weights)


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    cpus.avoid_broken_amx()  # ahead of the first product
    tf.get_logger().setLevel("ERROR")  # each shape and model is a trace of its own
    turns, sizes, options = settings.turns, BATCH_SIZES, {}
    chosen = list(CASES)
    if settings.smoke:
        turns, sizes, options, chosen = 2, (1,), {"width": 16}, ["MLP"]
    cases = {case: measure_case(case, options, turns, sizes) for case in chosen}
    return {"turns": turns, "cases": cases}
