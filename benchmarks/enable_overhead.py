"""What `tfamp.enable` adds to a training step and to building a model.

Prints two ratios, both from one run:
- the training step of a model built under tfamp over the same model with the same
  dtypes set by hand, layer by layer, in stock Keras (goal: at most 1.02);
- building and compiling a 200-layer Functional model under tfamp over stock Keras
  with the same global policy (goal: at most 1.10).

Time: about five minutes on two CPU cores. Use an idle machine.

Both sides live in one process and take turns of a few milliseconds; the ratio is the
median over the turns, the spread its 90 % bootstrap interval. The ratio of processor
time is disturbed least: where the two disagree, the machine was not idle.
"""

import gc
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks._runner import ratio, take_turns, timed
from tfamp.dtypes import hooks

MAX_STEP_RATIO = 1.02
MAX_BUILD_RATIO = 1.10
NUM_LAYERS = 200
BATCH_SIZE = 32
FLAGS = (
    ("string", "policy", "", "Policy; by default what suits the device."),
    ("integer", "turns", 500, "Turns of either side in the step benchmark."),
    ("integer", "turn_steps", 2, "Training steps in a turn."),
    ("integer", "builds", 30, "Builds of either side after a first one."),
)


def convolutional_model(dtypes: Mapping[str, str]) -> keras.Model:
    """Returns a compiled network; `dtypes` holds the policies set by hand, by layer."""

    def named(name: str) -> dict[str, str]:
        return {"name": name} | ({"dtype": dtypes[name]} if dtypes else {})

    images = keras.Input((32, 32, 3), dtype="uint8", name="images")
    x = keras.layers.Rescaling(1 / 255, **named("scale"))(images)
    for block, filters in enumerate((32, 64, 128)):
        x = keras.layers.Conv2D(filters, 3, padding="same", **named(f"conv{block}"))(x)
        x = keras.layers.BatchNormalization(**named(f"norm{block}"))(x)
        x = keras.layers.ReLU(**named(f"relu{block}"))(x)
        x = keras.layers.MaxPooling2D(**named(f"pool{block}"))(x)
    x = keras.layers.Flatten(**named("flatten"))(x)
    x = keras.layers.LayerNormalization(**named("layer_norm"))(x)
    x = keras.layers.Dense(256, activation="relu", **named("hidden"))(x)
    logits = keras.layers.Dense(10, **named("logits"))(x)
    model = keras.Model(images, logits)
    optimizer = keras.optimizers.Adam(1e-3)
    if "mixed_float16" in dtypes.values():
        # What Keras does by itself under a global policy of that name.
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True))
    return model


def deep_model() -> keras.Model:
    """Returns a compiled Functional model of `NUM_LAYERS` layers."""
    inputs = x = keras.Input((16,))
    for _ in range(NUM_LAYERS // 4):
        skip = x
        x = keras.layers.LayerNormalization()(x)
        x = keras.layers.Dense(16, activation="relu")(x)
        x = keras.layers.Dropout(0.1)(x)
        x = keras.layers.Add()([skip, x])
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def policies_by_hand(model: keras.Model) -> dict[str, str]:
    """Returns the stock policy of each layer that gives the dtypes tfamp chose."""
    found = {layer.name: layer.compute_dtype for layer in model.layers}
    return {n: d if d == "float32" else f"mixed_{d}" for n, d in found.items()}


def figures(seconds: np.ndarray, goal: float) -> dict[str, Any]:
    """Returns medians, the median ratio of second to first side, and its interval."""
    stock, ours = np.median(seconds[..., 0], axis=0) * 1e3
    found = ratio(seconds[:, 1, 0], seconds[:, 0, 0], digits=4)
    processor = ratio(seconds[:, 1, 1], seconds[:, 0, 1], digits=4)
    return {
        "stock_milliseconds": round(float(stock), 3),
        "tfamp_milliseconds": round(float(ours), 3),
        **{**found, "processor_ratio": processor["ratio"], "turns": len(seconds)},
        **{"goal": goal, "met": found["ratio"] <= goal},
    }


def measure_step(policy: str, turns: int, steps: int) -> dict[str, Any]:
    """Returns the cost of a training step under tfamp over stock Keras."""
    rng = np.random.default_rng(0)
    images = tf.constant(rng.integers(0, 256, (BATCH_SIZE, 32, 32, 3), np.uint8))
    labels = tf.constant(rng.integers(0, 10, BATCH_SIZE))

    def seconds_a_step(model: keras.Model) -> tuple[float, float]:
        return timed(lambda: model.train_on_batch(images, labels), steps)

    with tfamp.scope(policy):
        chosen = policies_by_hand(convolutional_model({}))
    gc.collect()
    hooks.remove()
    stock = convolutional_model(chosen)
    # Traced before tfamp is on, so that no hook has a part in it.
    seconds_a_step(stock)
    with tfamp.scope(policy):
        ours = convolutional_model({})
    if policies_by_hand(ours) != chosen:
        raise RuntimeError("The two sides compute in different dtypes.")
    sides = [lambda: seconds_a_step(stock), lambda: seconds_a_step(ours)]
    take_turns(sides, 5)
    return figures(take_turns(sides, turns), MAX_STEP_RATIO)


def measure_build(policy: str, builds: int) -> dict[str, Any]:
    """Returns the cost of building a deep model under tfamp over stock Keras."""

    def under_stock() -> tuple[float, float]:
        gc.collect()
        hooks.remove()  # they stand from the first use
        keras.config.set_dtype_policy(policy)
        try:
            return timed(deep_model)
        finally:
            keras.config.set_dtype_policy("float32")

    def under_tfamp() -> tuple[float, float]:
        gc.collect()
        with tfamp.scope(policy):
            return timed(deep_model)

    sides = [under_stock, under_tfamp]
    take_turns(sides, 1)
    return figures(take_turns(sides, builds), MAX_BUILD_RATIO)


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, steps, builds = settings.turns, settings.turn_steps, settings.builds
    if settings.smoke:
        turns, steps, builds = 2, 1, 1
    is_gpu = bool(tf.config.list_physical_devices("GPU"))
    policy = settings.policy or ("mixed_float16" if is_gpu else "mixed_bfloat16")
    # Building comes first: without hooks, managed models would not be what they are.
    build = measure_build(policy, builds)
    step = measure_step(policy, turns, steps) | {"turn_steps": steps}
    return {"policy": policy, "batch_size": BATCH_SIZE, "step": step, "build": build}
