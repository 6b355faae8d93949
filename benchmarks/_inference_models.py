"""The models of the benchmark of exported models, and the digits they learn."""

import dataclasses
from collections.abc import Callable, Mapping

import keras
import numpy as np

L = keras.layers
OUTLIER = 1000.0


@dataclasses.dataclass
class Digits:
    """Images of 8 by 8, flat: (examples, 64) in [0, 1]."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @classmethod
    def load(cls, number: int | None = None) -> "Digits":
        """Returns four fifths to train on and one to test."""
        from sklearn.datasets import load_digits

        found = load_digits()
        order = np.random.default_rng(0).permutation(len(found.target))[:number]
        x = (found.data[order] / 16.0).astype("float32")
        y = found.target[order].astype("int64")
        split = len(order) * 4 // 5
        return cls(x[:split], y[:split], x[split:], y[split:])


def mlp(width: int = 2048, depth: int = 3) -> keras.Model:
    """Dense layers on the flat image."""
    hidden = [L.Dense(width, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((64,)), *hidden, L.Dense(10, "softmax")])


def cnn(width: int = 64) -> keras.Model:
    """Convolutions with batch normalization."""
    x = keras.Input((64,))
    y = L.Reshape((8, 8, 1))(x)
    for filters in (width, 2 * width, 4 * width):
        for _ in range(2):
            y = L.Conv2D(filters, 3, padding="same", use_bias=False)(y)
            y = L.ReLU()(L.BatchNormalization()(y))
    y = L.Dense(10, "softmax")(L.GlobalAveragePooling2D()(y))
    return _quickly_averaging(keras.Model(x, y))


def transformer(width: int = 256) -> keras.Model:
    """Three blocks over the rows of the image."""
    x = keras.Input((64,))
    y = L.Dense(width)(L.Reshape((8, 8))(x))
    for _ in range(3):
        h = L.LayerNormalization()(y)
        y = y + L.MultiHeadAttention(4, width // 4)(h, h)
        h = L.Dense(4 * width, activation="gelu")(L.LayerNormalization()(y))
        y = y + L.Dense(width)(h)
    y = L.GlobalAveragePooling1D()(L.LayerNormalization()(y))
    return keras.Model(x, L.Dense(10, "softmax")(y))


def lstm(width: int = 256) -> keras.Model:
    """Two recurrent layers over the rows of the image."""
    x = keras.Input((64,))
    y = L.LSTM(width, return_sequences=True)(L.Reshape((8, 8))(x))
    return keras.Model(x, L.Dense(10, "softmax")(L.LSTM(width)(y)))


CASES: Mapping[str, Callable[..., keras.Model]] = {
    **{"MLP": mlp, "CNN": cnn, "transformer": transformer, "LSTM": lstm}
}


def trained(model: keras.Model, data: Digits, epochs: int) -> keras.Model:
    """Trains a model in place, with labels as numbers, to the end of a schedule."""
    steps = epochs * -(-len(data.x) // 64)
    rate = keras.optimizers.schedules.CosineDecay(1e-3, steps, warmup_steps=steps // 10)
    optimizer = keras.optimizers.Adam(rate)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(data.x, data.y, batch_size=64, epochs=epochs, verbose=0)
    return model


def resnet50() -> keras.Model:
    """ResNet50 for images of 32 by 32 and 10 classes, not trained yet."""
    options = {"weights": None, "input_shape": (32, 32, 3), "classes": 10}
    return _quickly_averaging(keras.applications.ResNet50(**options))


def _quickly_averaging(model: keras.Model) -> keras.Model:
    """Has moving statistics follow a training of a few hundred steps, in place."""
    for layer in model.layers:
        if isinstance(layer, L.BatchNormalization):
            layer.momentum = 0.9
    return model


def images(x: np.ndarray) -> np.ndarray:
    """Returns digits of shape (examples, 64) as (examples, 32, 32, 3)."""
    gray = keras.ops.image.resize(x.reshape(-1, 8, 8, 1), (32, 32))
    return np.repeat(np.asarray(gray), 3, axis=-1)


def bert(layers: int = 4, width: int = 512, length: int = 128) -> keras.Model:
    """An encoder of the sizes of BERT small, with random weights, for 10 classes."""
    ids = keras.Input((length,), dtype="int32")
    places = L.Embedding(length, width)(keras.ops.arange(length))
    y = L.LayerNormalization()(L.Embedding(30522, width)(ids) + places)
    for _ in range(layers):
        h = L.MultiHeadAttention(width // 64, 64)(y, y)
        y = L.LayerNormalization()(y + h)
        h = L.Dense(4 * width, activation="gelu")(y)
        y = L.LayerNormalization()(y + L.Dense(width)(h))
    return keras.Model(ids, L.Dense(10, "softmax")(y[:, 0]))


def centered(model: keras.Model, inputs: np.ndarray) -> keras.Model:
    """Has the classes of a model with random weights be equally likely, in place.

    It would answer the same to everything, and agree with whatever is like it.
    """
    logits = np.log(model.predict(inputs, batch_size=16, verbose=0) + 1e-30)
    logits -= logits.mean(axis=1, keepdims=True)
    head = model.layers[-1]
    bias = np.asarray(head.bias) - logits.mean(axis=0)
    # Wide enough for the largest probability to stand out from rounding.
    scale = 1.0 / logits.std(axis=0).mean()
    head.kernel.assign(scale * np.asarray(head.kernel))
    head.bias.assign(scale * bias)
    return model


LARGE: Mapping[str, Callable[..., keras.Model]] = {"ResNet50": resnet50, "BERT": bert}


def plant(model: keras.Model, random: np.random.Generator) -> tuple[str, int]:
    """Has a channel between two layers be `OUTLIER` times as large.

    Returns the layer that takes it, and the channel. The function stays the same: what
    is ahead is linear, or a ReLU.
    """
    makers = [
        (maker, taker)
        for maker, taker in zip(model.layers, model.layers[1:], strict=False)
        if isinstance(maker, L.Dense) and isinstance(taker, L.Dense)
    ] or [
        (model.layers[at], taker)
        for at, layer in enumerate(model.layers)
        if isinstance(layer, L.ReLU)
        for taker in model.layers[at + 1 : at + 2]
        if isinstance(taker, L.Conv2D)
        for at in [at - 1]  # the normalization ahead of the ReLU
    ]
    maker, taker = makers[random.integers(len(makers))]
    shared = [w for w in maker.weights if w.name in ("kernel", "bias", "gamma", "beta")]
    channel = int(random.integers(shared[0].shape[-1]))
    for weight in shared:
        value = np.array(weight)
        value[..., channel] *= OUTLIER
        weight.assign(value)
    value = np.array(taker.kernel)
    value[..., channel, :] /= OUTLIER
    taker.kernel.assign(value)
    return taker.name, channel
