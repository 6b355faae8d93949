"""Models of usual sizes with synthetic inputs, built and compiled, and their data.

Each function ahead of `family` returns (model, train, None). Targets follow from the
inputs, so that a loss that falls shows that the model learns; a few batches lie in
memory and come again and again, so that no input pipeline is timed.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.machine import cpus

NUM_CLASSES = 10
_BATCHES = 4


def mlp(seed: int = 0, epochs: int = 1, *, width: int = 2048, steps: int = 24) -> Any:
    """Three dense layers of 2048 and a head, batches of 256."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(_BATCHES * 256, 784)).astype("float32")
    y = (x @ rng.normal(size=(784, NUM_CLASSES))).argmax(axis=1)
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
    head = keras.layers.Dense(NUM_CLASSES)
    model = keras.Sequential([keras.Input((784,)), *layers, head])
    return _compiled(model), _repeated(x, y, 256, steps), None


def cnn(seed: int = 0, epochs: int = 1, *, size: int = 32, steps: int = 24) -> Any:
    """Convolutions of 64, 128, 256 filters with BatchNormalization, batches of 64."""
    x, y = _images(seed, size, 64)
    images = keras.Input((size, size, 3))
    h = images
    for filters in (64, 128, 256):
        h = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(h)
        h = keras.layers.BatchNormalization()(h)
        h = keras.layers.ReLU()(h)
        h = keras.layers.MaxPooling2D()(h)
    h = keras.layers.GlobalAveragePooling2D()(h)
    model = keras.Model(images, keras.layers.Dense(NUM_CLASSES)(h))
    return _compiled(model), _repeated(x, y, 64, steps), None


def transformer(
    seed: int = 0,
    epochs: int = 1,
    *,
    width: int = 256,
    length: int = 128,
    steps: int = 30,
) -> Any:
    """Three blocks of width 256 over 128 tokens of 1000, batches of 16."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1000, (_BATCHES * 16, length), dtype=np.int32)
    y = x[:, 0] % NUM_CLASSES
    tokens = keras.Input((length,), dtype="int32")
    h = keras.layers.Embedding(1000, width)(tokens)
    for _ in range(3):
        h = block(h, width)
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(h))
    model = keras.Model(tokens, keras.layers.Dense(NUM_CLASSES)(h))
    return _compiled(model), _repeated(x, y, 16, steps), None


def block(h: Any, width: int, dropout: float = 0.0) -> Any:
    """Returns what a block of a transformer with eight heads makes of tokens."""
    normed = keras.layers.LayerNormalization()(h)
    attention = keras.layers.MultiHeadAttention(8, width // 8, dropout=dropout)
    h = h + attention(normed, normed)
    normed = keras.layers.LayerNormalization()(h)
    hidden = keras.layers.Dense(4 * width, activation="gelu")(normed)
    return h + keras.layers.Dense(width)(hidden)


def resnet50(seed: int = 0, epochs: int = 1, *, size: int = 96, steps: int = 8) -> Any:
    """Keras's ResNet50 at 96x96, batches of 16."""
    x, y = _images(seed, size, 16)
    return _compiled(_resnet50(size)), _repeated(x, y, 16, steps), None


def _resnet50(size: int) -> keras.Model:
    own = {"input_shape": (size, size, 3), "classes": NUM_CLASSES}
    return keras.applications.ResNet50(weights=None, classifier_activation=None, **own)


def text(seed: int = 0, epochs: int = 1, *, steps: int = 150) -> Any:
    """recipes/train_text.py, its first steps; it validates on a part of the files."""
    from recipes import train_text

    model, train, validation = train_text.build(seed=seed, epochs=epochs)
    return model, train.take(steps), validation.take(steps // 5)


def tiny(seed: int = 0, epochs: int = 1) -> Any:
    """A small network for a quick look at the benchmark itself."""
    return mlp(seed, epochs, width=8, steps=6)


def family(case: str) -> keras.Model:
    """Returns a model of one family, not compiled; "MLP of 2 blocks" is a small one."""
    layers = keras.layers
    if case.startswith("ResNet50"):
        return _resnet50(96)
    if case.startswith("MLP"):
        x = y = keras.Input((1024,))
        for _ in range(int(case.split()[2]) if " of " in case else 12):
            h = layers.Dense(2048, activation="gelu")(layers.LayerNormalization()(y))
            y = y + layers.Dropout(0.1)(layers.Dense(1024)(h))
    elif case.startswith("CNN"):
        x = y = keras.Input((32, 32, 3))
        for filters in (64, 128, 256):
            for _ in range(2):
                y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(y)
                y = layers.ReLU()(layers.BatchNormalization()(y))
            y = layers.MaxPooling2D()(y)
        y = layers.GlobalAveragePooling2D()(y)
    elif case.startswith("transformer"):
        x = keras.Input((128,), dtype="int32")
        y = layers.Embedding(1000, 256)(x)
        for _ in range(6):
            y = block(y, 256, dropout=0.1)
        y = layers.GlobalAveragePooling1D()(y)
    else:
        x = keras.Input((128,), dtype="int32")
        y = layers.Embedding(1000, 128)(x)
        y = layers.LSTM(256)(layers.LSTM(256, return_sequences=True)(y))
    return keras.Model(x, layers.Dense(10)(y))


def compiled_family(
    case: str, policy: str, optimizer: Any = "adam", jit_compile: Any = False
) -> keras.Model:
    """Returns a model of one family, built under a policy from the same seed."""
    cpus.avoid_broken_amx()
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = family(case)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=jit_compile)
    return model


def random_batch(model: keras.Model, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random batch of inputs and classes for a model of one family."""
    spec = model.inputs[0]
    shape = (size, *spec.shape[1:])
    rng = np.random.default_rng(0)
    if spec.dtype == "int32":
        x = rng.integers(0, 1000, shape, dtype=np.int32)
    else:
        x = rng.normal(size=shape).astype(np.float32)
    return x, rng.integers(0, 10, size)


def _compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def _images(seed: int, size: int, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns noise whose mean color is its class."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, NUM_CLASSES, _BATCHES * batch_size)
    x = rng.normal(size=(len(y), size, size, 3)) + y[:, None, None, None] / 5
    return x.astype("float32"), y


def _repeated(x: np.ndarray, y: np.ndarray, batch_size: int, steps: int) -> Any:
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
    return data.cache().repeat().take(steps).prefetch(2)
