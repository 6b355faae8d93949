"""What joined steps, XLA on replicas and int8-aware training bring.

- Steps a second of small models with the `steps_per_execution` that was measured, over
  stock Keras (goal: 3 times).
- What XLA brings on two replicas, as a part of what it brings on one device (0.9).
- What a step costs with the rounding of int8 (at most 1.3).
- Seconds that the look at the user's own layers adds to the first `fit` of ResNet50
  with such a layer behind it (at most 2).
- How much of the accuracy that static int8 costs comes back by training with it, on
  four models where it costs a point or more (0.9); in ONNX Runtime.

Time: about ten minutes on two CPU cores. Use an idle machine.
"""

import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

import tfamp
from benchmarks._runner import compare_fits, fit_side, ratio, take_turns, timed

FLAGS = (("integer", "turns", 9, "Turns of each side."),)
STEPS, WIDE = 1000, 512
layers = keras.layers


def compiled(*parts: Any, **options: Any) -> keras.Model:
    """Returns a compiled network of layers, with a head for ten classes."""
    model = keras.Sequential([keras.Input((64,)), *parts, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(True)
    model.compile(keras.optimizers.Adam(1e-3), loss, **options)
    return model


def mlp(width: int = 32, **options: Any) -> keras.Model:
    """Returns a compiled network of dense layers."""
    hidden = [layers.Dense(width, activation="gelu") for _ in range(2)]
    return compiled(*hidden, **options)


def cnn(**options: Any) -> keras.Model:
    """Returns a compiled small convolutional network."""
    parts = [layers.Reshape((8, 8, 1)), layers.Conv2D(8, 3, activation="relu")]
    return compiled(*parts, layers.Flatten(), **options)


def elementwise(**options: Any) -> keras.Model:
    """Returns a compiled network of operations that XLA fuses."""
    parts = [layers.Dense(WIDE)]
    for _ in range(6):
        parts += [layers.LayerNormalization(), layers.Activation("gelu")]
    return compiled(*parts, **options)


def least(what: str, found: dict[str, Any], goal: float) -> dict[str, Any]:
    """Returns a figure with the goal that it is to reach."""
    return {"what": what, **found, "goal": goal, "met": found["ratio"] >= goal}


def most(what: str, found: dict[str, Any], goal: float) -> dict[str, Any]:
    """Returns a figure with the goal that it is not to pass."""
    return least(what, found, goal) | {"met": found["ratio"] <= goal}


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
    return least(told, ratio(seconds[:, 0], seconds[:, 1]), 3.0)


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
    what = f"XLA: {one} on one device, {two} on two"
    return least(what, ratio(gains[1], gains[0]), 0.9)


def int8_aware(turns: int) -> dict[str, Any]:
    """Returns a step with the rounding of int8 over one without."""
    dataset = tf.data.Dataset.from_tensors(data(256)).repeat()
    models = [mlp(WIDE, jit_compile=False) for _ in range(2)]
    tfamp.quantize_aware(models[1])
    names = zip(("plain", "rounded"), models, strict=True)
    sides = {name: fit_side(model, dataset, [], 15, untimed=5) for name, model in names}
    found = compare_fits(sides, turns, what=0)["rounded"]
    found = {key: found[key] for key in ("ratio", "interval")}
    return most("A step that rounds to int8", found, 1.3)


class Gain(layers.Layer):
    """A layer of the user's own, which no rule knows."""

    def call(self, x: Any) -> Any:
        """Returns inputs over the root of the mean of their squares."""
        return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6)


def first_fit(check: str | None, size: int) -> float:
    """Returns the seconds of the first `fit` of ResNet50, of one step."""
    with tfamp.scope("mixed_bfloat16", check=check):
        base = keras.applications.ResNet50(
            weights=None, include_top=False, pooling="avg", input_shape=(size, size, 3)
        )
        model = keras.Model(base.input, layers.Dense(10)(Gain()(base.output)))
        loss = keras.losses.SparseCategoricalCrossentropy(True)
        model.compile("sgd", loss, jit_compile=False)
    x = np.random.default_rng(0).random((4, size, size, 3), "float32")
    return timed(lambda: model.fit(x, np.arange(4), verbose=0))


def first_look(turns: int, size: int) -> dict[str, Any]:
    """Returns the seconds that `check` adds to a first `fit`."""
    sides = [lambda c=c: first_fit(c, size) for c in (None, "keep")]
    seconds = take_turns(sides, turns)[..., 0]
    found = ratio(seconds[:, 1] - seconds[:, 0], np.ones(turns), digits=2)
    return most(f"seconds, of {np.median(seconds[:, 1]):.1f} in all", found, 2.0)


def digits(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns scikit-learn's digits, each in another light, and their labels."""
    x, y = load_digits(return_X_y=True)
    light = np.random.default_rng(3).lognormal(0, 1.2, size=(len(x), 1))
    return (x * light / 16).reshape(-1, *shape), y


def stack(x: Any, *hidden: Any, num: int) -> Any:
    """Returns what a stack of layers with a head makes of a symbolic input."""
    for layer in (*hidden, layers.Dense(num)):
        x = layer(x)
    return x


def dense(x: Any) -> Any:
    """Returns the logits of a dense network with a norm."""
    first = layers.Dense(64, "relu"), layers.LayerNormalization()
    return stack(x, *first, layers.Dense(32, "relu"), num=10)


def transformer(x: Any) -> Any:
    """Returns the logits of a transformer of one block over the rows of an image."""
    h = layers.Dense(32)(x)
    asked = layers.LayerNormalization()(h)
    h = h + layers.MultiHeadAttention(4, 8)(asked, asked)
    hidden = layers.Dense(64, "gelu")(layers.LayerNormalization()(h))
    h = layers.LayerNormalization()(h + layers.Dense(32)(hidden))
    return stack(h, layers.GlobalAveragePooling1D(), num=10)


def table_of(num: int) -> Any:
    """Returns a network for columns that were not scaled."""

    def make(x: Any) -> Any:
        first = layers.Dense(32, "relu"), layers.BatchNormalization()
        return stack(x, *first, layers.Dense(16, "relu"), num=num)

    return make


# Data, the network, and passes over the data.
ROUNDED = {
    "digits in light and shade, dense": (lambda: digits(64), dense, 60),
    "the same, transformer": (lambda: digits(8, 8), transformer, 60),
    "wine, not scaled": (lambda: load_wine(return_X_y=True), table_of(3), 200),
    "biopsies, not scaled": (
        lambda: load_breast_cancer(return_X_y=True),
        table_of(2),
        100,
    ),
}


def accuracies(name: str, epochs: int | None, seed: int) -> list[float]:
    """Returns accuracy of a model, its int8 export, and that of one trained with it."""
    load, make, passes = ROUNDED[name]
    x, y = load()
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order].astype("float32"), y[order]
    num = int(0.6 * len(x))
    keras.utils.set_random_seed(seed)
    inputs = keras.Input(x.shape[1:])
    model = keras.Model(inputs, make(inputs))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(rate: float, epochs: int) -> None:
        model.compile(keras.optimizers.Adam(rate), loss)
        model.fit(x[:num], y[:num], batch_size=64, epochs=epochs, verbose=0)

    def of(predict: Any) -> float:
        return float(np.mean(predict(x[num:]).argmax(axis=-1) == y[num:]))

    def of_export() -> float:
        int8 = {"format": "onnx", "dtype": "int8", "scheme": "static"}
        with tempfile.TemporaryDirectory() as folder:
            made = tfamp.export(model, f"{folder}/int8", calibration=x[:num], **int8)
            return of(made.load().predict)

    train(3e-3, epochs or passes)
    found = [of(lambda x: model.predict(x, verbose=0)), of_export()]
    tfamp.quantize_aware(model)
    train(3e-4, epochs or passes * 2 // 3)
    return [*found, of_export()]


def points_back(name: str, epochs: int | None, seeds: int) -> dict[str, Any]:
    """Returns the part of the accuracy lost in int8 that training with it brings."""
    found = np.array([accuracies(name, epochs, seed) for seed in range(1, seeds + 1)])
    parts = (found[:, 2] - found[:, 1]) / np.maximum(found[:, 0] - found[:, 1], 1e-3)
    told = "{:.3f}, in int8 {:.3f}, trained with it {:.3f}".format(*found.mean(axis=0))
    middle = round(float(np.median(parts)), 2)
    spread = [round(float(parts.min()), 2), round(float(parts.max()), 2)]
    return least(told, {"ratio": middle, "interval": spread}, 0.9)


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, steps = (2, 8) if settings.smoke else (settings.turns, STEPS)
    cpu = tf.config.list_physical_devices("CPU")[0]
    two = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, two)
    epochs, seeds, size = (1, 1, 32) if settings.smoke else (None, 3, 96)
    cases = {
        "Small MLP, over stock": joined(mlp, turns, steps),
        "Small CNN, over stock": joined(cnn, turns, steps),
        "Gain kept on replicas": xla_on_replicas(turns),
        "int8-aware over plain": int8_aware(turns),
        "First look at own layers": first_look(seeds, size),
        **{f"Points back: {n}": points_back(n, epochs, seeds) for n in ROUNDED},
    }
    return {"cases": cases, "turns": turns}
