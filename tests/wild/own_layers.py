"""Layers as users write them: some that half precision spoils, some that stand it.

Each is a function of a tensor that becomes the `call` of a layer, with the numbers
that it is given; the README of none of them says a word of precision.
"""

import keras
import numpy as np

from tests.styles import Own

ops = keras.ops


def numbers(scale=1.0, shift=0.0, shape=(16,), count=64):
    """Returns the same inputs each time."""
    draws = np.random.default_rng(0).standard_normal((count, *shape))
    return (draws * scale + shift).astype("float32")


def total(x, power, **kwargs):
    return ops.sum(x**power, axis=-1, keepdims=True, **kwargs)


def rms_norm(x):
    return x * ops.rsqrt(total(x, 2) / x.shape[-1] + 1e-6)


def layer_norm(x):
    x = x - total(x, 1) / x.shape[-1]
    return x / ops.sqrt(total(x, 2) / x.shape[-1] + 1e-5)


def batch_norm(x):
    mean = ops.sum(x, axis=0) / ops.cast(ops.shape(x)[0], x.dtype)
    square = ops.sum(x * x, axis=0) / ops.cast(ops.shape(x)[0], x.dtype)
    return (x - mean) / ops.sqrt(ops.maximum(square - mean * mean, 1e-6))


def softmax(x):
    e = ops.exp(x)
    return e / ops.sum(e, axis=-1, keepdims=True)


def cold_softmax(x):
    e = ops.exp(x / 0.05)
    return e / ops.sum(e, axis=-1, keepdims=True)


def masked_attention(x):
    mask = ops.cast(ops.arange(x.shape[-1]) < 12, x.dtype)
    return ops.softmax(x + (1.0 - mask) * -1e9)


def masked_mean(x):
    mask = ops.cast(x > 0, x.dtype)
    count = ops.sum(mask * 1e-8, -1, keepdims=True)
    return 1e-8 * ops.sum(x * mask, -1, keepdims=True) / (count + 1e-9)


def expanded_distances(x):
    a, b = x[:, :8], x[:, 8:]
    return total(a, 2) + total(b, 2) - 2.0 * ops.sum(a * b, -1, keepdims=True)


def radial_basis(x):
    centers = ops.cast(ops.linspace(299.0, 301.0, 16), x.dtype)
    return ops.exp(-((x - centers) ** 2))


def rotary(x):
    angle = ops.cast(ops.arange(16) * 401, x.dtype) * 0.7
    return x * ops.cos(angle) + ops.roll(x, 1, -1) * ops.sin(angle)


def deviation_pool(x):
    mean = ops.mean(x, axis=-1, keepdims=True)
    square = ops.mean(x * x, axis=-1, keepdims=True)
    return ops.sqrt(ops.maximum(square - mean**2, 0.0) + 1e-3)


def entropy(x):
    p = ops.softmax(x * 20.0)
    return -ops.sum(p * ops.log(p + 1e-10), -1, keepdims=True)


def gaussian_likelihood(x):
    mean, log_variance = x[:, :8], x[:, 8:]
    return ops.tanh(1e-5 * (mean**2 * ops.exp(-log_variance) + log_variance))


def squash(x):
    size = ops.sqrt(total(x, 2))
    return size**2 / (1 + size**2) * x / (size + 1e-9)


def logit(x):
    p = ops.sigmoid(x)
    return ops.log(p / (1.0 - p))


def contrast(x):
    low, high = ops.min(x, -1, keepdims=True), ops.max(x, -1, keepdims=True)
    return (x - low) / (high - low + 1e-8)


def decay(x):
    steps = ops.cast(ops.arange(x.shape[1]), x.dtype)
    return ops.sum(x * 1.01 ** steps[:, None], axis=1) / 1e4


class CallsMap(keras.layers.Layer):
    """Has a subclass say what it does."""

    def call(self, x):
        return self.map(x)


class RunningSquares(keras.layers.Layer):
    """Divides by the root of squares that it follows."""

    def build(self, shape):
        self.squares = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.squares.assign_add((ops.mean(x * x, 0) - self.squares) * 0.1)
        return x / ops.cast(ops.sqrt(self.squares) + 1e-3, x.dtype)


class StepCounter(keras.layers.Layer):
    """Warms up over 4000 steps, counted in a weight."""

    def build(self, shape):
        self.steps = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(3000.0), trainable=False
        )

    def call(self, x, training=False):
        if training:
            self.steps.assign(ops.cast(self.steps, x.dtype) + ops.cast(0.5, x.dtype))
        return x * ops.cast(self.steps / 4000.0, x.dtype)


# Layer -> what it is given.
SPOILT = {
    "rms norm": (rms_norm, numbers(300.0)),
    "rms norm of little": (
        lambda x: x * ops.rsqrt(total(x, 2) / x.shape[-1] + 1e-10),
        numbers(1e-4),
    ),
    "layer norm": (layer_norm, numbers(300.0, 500.0)),
    "unit norm": (lambda x: x / ops.sqrt(total(x, 2) + 1e-12), numbers(1e-4)),
    "batch norm": (batch_norm, numbers(1.0, 300.0)),
    "softmax": (softmax, numbers(6.0)),
    "cold softmax": (cold_softmax, numbers(1.0)),
    "log-sum-exp": (
        lambda x: x - ops.log(ops.sum(ops.exp(x), axis=-1, keepdims=True)),
        numbers(6.0),
    ),
    "softplus": (lambda x: ops.log(1.0 + ops.exp(x)), numbers(6.0)),
    "masked attention": (masked_attention, numbers()),
    "masked mean": (masked_mean, numbers()),
    "squared distances": (
        lambda x: ops.sqrt(ops.sum((x[:, :8] - x[:, 8:]) ** 2, axis=-1, keepdims=True)),
        numbers(200.0),
    ),
    "expanded distances": (expanded_distances, numbers(1.0, 30.0)),
    "radial basis": (radial_basis, numbers(0.3, 300.0)),
    "rotary embedding": (rotary, numbers()),
    "fourier features": (lambda x: ops.sin(6.2832 * 300.0 * x), numbers()),
    "polynomial": (
        lambda x: ops.concatenate([x, x**2, x**4 / 1e6], axis=-1),
        numbers(20.0),
    ),
    "generalized mean": (
        lambda x: (ops.sum(x**3, axis=1) / x.shape[1]) ** (1 / 3),
        np.abs(numbers(50.0, 5.0, (12, 8))),
    ),
    "sum pooling": (
        lambda x: ops.sum(x, axis=1) / 1000.0,
        np.abs(numbers(300.0, 0.0, (512, 4))),
    ),
    "deviation pooling": (deviation_pool, numbers(1.0, 100.0)),
    "gram matrix": (
        lambda x: ops.einsum("bpi,bpj->bij", x, x) / x.shape[1],
        numbers(60.0, 0.0, (64, 6)),
    ),
    "signed root": (
        lambda x: ops.sign(x) * ops.sqrt(ops.abs(x) + 1e-10),
        numbers(1e-9),
    ),
    "entropy": (entropy, numbers(2.0)),
    "log of a chance": (lambda x: ops.log(ops.softmax(x) + 1e-12), numbers(15.0)),
    "gaussian likelihood": (gaussian_likelihood, numbers(8.0)),
    "squash": (squash, numbers(150.0)),
    "scaled features": (lambda x: (x - 100000.0) / 1000.0, numbers(500.0, 100000.0)),
    "seconds of a day": (
        lambda x: ops.sin(x * (6.2832 / 86400.0)),
        numbers(20000.0, 43200.0),
    ),
    "temperature": (lambda x: ops.tanh((x * 1000.0) ** 2 / 1e6), numbers()),
    "long dot product": (
        lambda x: ops.matmul(x * x, ops.ones((x.shape[-1], 1), x.dtype)) / x.shape[-1],
        numbers(8.0, 0.0, (2048,)),
    ),
    "product of chances": (
        lambda x: ops.log(ops.prod(ops.sigmoid(x), axis=-1, keepdims=True) + 1e-30),
        numbers(2.0),
    ),
    "harmonic mean": (
        lambda x: x.shape[-1] / ops.sum(1.0 / (x + 1e-8), -1, keepdims=True),
        np.abs(numbers(1e-8)),
    ),
    "power law": (lambda x: ops.sqrt(ops.sqrt(ops.abs(x) ** 5 + 1e-12)), numbers(20.0)),
    "logit": (logit, np.clip(numbers(6.0), -12.0, 12.0)),
    "contrast": (contrast, numbers(1e-9)),
    "log scale": (lambda x: ops.log(x * 1e4 + 1.0), np.abs(numbers(10.0))),
    "mixture": (
        lambda x: ops.log(ops.sum(ops.exp(-0.5 * x**2), -1, keepdims=True) + 1e-20),
        numbers(1.0, 9.0),
    ),
    "decay": (decay, numbers(1.0, 0.0, (1400, 2))),
    "running squares": (RunningSquares, numbers(1e-4)),
    "step counter": (StepCounter, numbers()),
}
HEALTHY = {
    name: (SPOILT[name][0], numbers())
    for name in (
        *(
            "rms norm",
            "layer norm",
            "unit norm",
            "batch norm",
            "softmax",
            "log-sum-exp",
        ),
        *("softplus", "squared distances", "expanded distances", "polynomial"),
        *("deviation pooling", "gaussian likelihood", "squash", "contrast", "mixture"),
    )
} | {
    name: (function, numbers(*scale))
    for name, function, *scale in (
        ("signed root", SPOILT["signed root"][0], 1.0, 3.0),
        ("gelu by hand", lambda x: 0.5 * x * (1 + ops.tanh(0.8 * (x + 0.04 * x**3)))),
        ("swish", lambda x: x * ops.sigmoid(x)),
        ("residual", lambda x: x + ops.relu(x)),
        ("mean", lambda x: ops.mean(x, axis=-1, keepdims=True)),
        ("gate", lambda x: x[:, :8] * ops.sigmoid(x[:, 8:])),
        ("scaling", lambda x: x * 100.0),
        ("clip", lambda x: ops.clip(x, -1.0, 1.0)),
        ("difference", lambda x: x[:, 1:] - x[:, :-1]),
        ("roll", lambda x: ops.roll(x, 3, axis=-1)),
        ("signs", lambda x: ops.sign(x)),
        ("maximum", lambda x: ops.max(x, axis=-1, keepdims=True)),
        ("outer", lambda x: x[:, :, None] * x[:, None]),
        ("sine", lambda x: ops.sin(3.0 * x)),
        ("exponential", lambda x: ops.exp(-(x**2))),
        ("log of one more", lambda x: ops.log(1.0 + x**2)),
        ("absolute root", lambda x: ops.sqrt(ops.abs(x) + 0.01)),
        ("normal likelihood", lambda x: -0.5 * x**2 - 0.919),
        ("threshold", lambda x: ops.where(x > 0.0, x, 0.1 * x)),
        ("quantile", lambda x: ops.sort(x, axis=-1)),
        ("blend", lambda x: 0.3 * x + 0.7 * ops.mean(x, axis=0, keepdims=True)),
        ("product", lambda x: x[:, :8] * x[:, 8:]),
        ("fourier features", lambda x: ops.concatenate([ops.sin(x), ops.cos(x)], -1)),
        ("distance to one", lambda x: ops.abs(x - 1.0)),
    )
}


def model_of(layer, x, *, before=False):
    """Returns a compiled model with a layer of somebody's own in it, and targets."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(x.shape[1:])
    own = layer(name="own") if isinstance(layer, type) else Own(layer, name="own")
    y = own(inputs)
    y = keras.layers.Flatten()(y)
    y = keras.layers.Dense(8, activation="relu")(y)
    model = keras.Model(inputs, keras.layers.Dense(1)(y))
    model.compile(keras.optimizers.SGD(1e-6), "mse")
    return model, np.random.default_rng(1).standard_normal((len(x), 1)).astype(
        "float32"
    )
