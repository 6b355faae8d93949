"""What joined steps, XLA on replicas and int8-aware training bring.

- Steps a second of small models with the `steps_per_execution` that was measured, over
  stock Keras (goal: 3 times).
- What XLA brings on two replicas, as a part of what it brings on one device (0.9).
- What a step costs with the rounding of int8 (at most 1.3).

Time: about four minutes on two CPU cores. Use an idle machine.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from benchmarks._runner import compare_fits, fit_side, ratio, take_turns, timed

FLAGS = (("integer", "turns", 9, "Turns of each side."),)
STEPS, WIDE = 1000, 512
layers = keras.layers


def mlp(width: int = 32, **options: Any) -> keras.Model:
    """Returns a compiled network of dense layers."""
    hidden = [layers.Dense(width, activation="gelu") for _ in range(2)]
    model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **options)
    return model


def cnn(**options: Any) -> keras.Model:
    """Returns a compiled small convolutional network."""
    parts = [layers.Reshape((8, 8, 1)), layers.Conv2D(8, 3, activation="relu")]
    head = [layers.Flatten(), layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *parts, *head])
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **options)
    return model


def elementwise(**options: Any) -> keras.Model:
    """Returns a compiled network of operations that XLA fuses."""
    parts = [keras.Input((64,)), layers.Dense(WIDE)]
    for _ in range(6):
        parts += [layers.LayerNormalization(), layers.Activation("gelu")]
    model = keras.Sequential([*parts, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **options)
    return model


def data(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns some examples."""
    x = np.random.default_rng(0).normal(size=(num, 64)).astype("float32")
    return x, (np.abs(x[:, :10])).argmax(axis=1)


def joined(make: Any, turns: int, steps: int) -> dict[str, Any]:
    """Returns seconds of an epoch in stock over those with measured joined steps."""
    x, y = data(32 * steps)
    stock = make(jit_compile=False)
    stock.fit(x, y, verbose=0)
    with tfamp.scope("measure"):
        ours = make(jit_compile=False)
        ours.fit(x, y, verbose=0)
    sides = [lambda m=m: timed(lambda: m.fit(x, y, verbose=0)) for m in (stock, ours)]
    seconds = take_turns(sides, turns)[..., 0]
    told = f"{ours.steps_per_execution} steps a call"
    found = ratio(seconds[:, 0], seconds[:, 1])
    return {"what": told, **found, "goal": 3.0, "met": found["ratio"] >= 3.0}


def xla_on_replicas(turns: int) -> dict[str, Any]:
    """Returns the gain of XLA on two replicas over its gain on one device."""
    batch = data(512)
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    sides = []
    for place in (tf.distribute.get_strategy(), strategy):
        for jit in (False, True):
            with place.scope(), tfamp.scope("float32"):
                model = elementwise(jit_compile=jit)
            dataset = tf.data.Dataset.from_tensors(batch).repeat()
            sides.append(fit_side(model, dataset, [], 15, untimed=5))
    seconds = take_turns(sides, turns)[..., 0]
    gains = seconds[:, 0] / seconds[:, 1], seconds[:, 2] / seconds[:, 3]
    one, two = (round(float(np.median(each)), 2) for each in gains)
    found = ratio(gains[1], gains[0])
    what = f"XLA: {one} on one device, {two} on two"
    return {"what": what, **found, "goal": 0.9, "met": found["ratio"] >= 0.9}


def int8_aware(turns: int) -> dict[str, Any]:
    """Returns a step with the rounding of int8 over one without."""
    dataset = tf.data.Dataset.from_tensors(data(256)).repeat()
    models = [mlp(WIDE, jit_compile=False) for _ in range(2)]
    tfamp.quantize_aware(models[1])
    names = zip(("plain", "rounded"), models, strict=True)
    sides = {name: fit_side(model, dataset, [], 15, untimed=5) for name, model in names}
    found = compare_fits(sides, turns, what=0)["rounded"]
    found = {key: found[key] for key in ("ratio", "interval")}
    what = "A step that rounds to int8"
    return {"what": what, **found, "goal": 1.3, "met": found["ratio"] <= 1.3}


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, steps = (2, 8) if settings.smoke else (settings.turns, STEPS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    cases = {
        "Small MLP, over stock": joined(mlp, turns, steps),
        "Small CNN, over stock": joined(cnn, turns, steps),
        "Gain kept on replicas": xla_on_replicas(turns),
        "int8-aware over plain": int8_aware(turns),
    }
    return {"cases": cases, "turns": turns}
