"""Layers that half precision spoils, each the way users write them.

Each function makes the layers anew; what they get is of size one, and so is what they
give, give or take a factor that a normalising layer takes out.
"""

import math
from typing import Any

import keras
from keras import layers, ops

from benchmarks.faults.building import Branch, Node, Raw, named

# Overflow


def widen_shrink() -> list[Any]:
    """Activations near 1e5 between two layers: both need float32."""
    kernel = keras.initializers.RandomNormal(stddev=3e4, seed=1)
    return [
        layers.Dense(16, kernel_initializer=kernel, name="widen"),
        layers.Rescaling(1e-5, name="shrink"),
    ]


def own_norm() -> list[Any]:
    """A norm whose squares pass 65504 inside the layer."""

    def normalize(x: Any) -> Any:
        h = x * 300.0
        return h / ops.sqrt(ops.sum(ops.square(h), axis=-1, keepdims=True))

    return [Raw(normalize, name="length")]


def own_softplus() -> list[Any]:
    """The logarithm of 1 + exp(x), which overflows before the logarithm."""
    return [Raw(lambda x: ops.log(1.0 + ops.exp(15.0 * x)) / 15.0, name="soft")]


def square_root_nodes() -> list[Any]:
    """Squares beyond 65504 and what takes them, as operations."""
    return [
        Node("stretch", lambda x: ops.multiply(x, 400.0)),
        Node("squares", ops.square),
        Node("raised", lambda x: ops.add(x, 1e5)),
        Node("root", ops.rsqrt),
        Node("back", lambda x: ops.multiply(x, 1000.0)),
    ]


def cubic() -> list[Any]:
    """A cube of values near 50."""
    return [Raw(lambda x: (x * 50.0) ** 3 / 1e4, name="cube")]


def unit_normalization() -> list[Any]:
    """Keras's UnitNormalization of values near 1500."""
    return [
        layers.Rescaling(1500.0, name="raise"),
        layers.UnitNormalization(name="unit"),
    ]


def unscaled_attention(factor: float = 80.0) -> list[Any]:
    """Scores of queries and keys near 40 that nobody divided."""

    def attend(x: Any) -> Any:
        q = x * factor
        scores = ops.matmul(q, ops.swapaxes(q, 1, 2))
        return ops.matmul(ops.softmax(scores), x)

    return [Raw(attend, name="attend")]


def dot_normalize() -> list[Any]:
    """Dot(normalize=True) of two branches of large values, as in FACTS."""

    def branches(x: Any) -> Any:
        a = layers.Dense(16, name="left")(x)
        b = layers.Dense(16, name="right")(x)
        a = layers.Rescaling(1000.0, name="left_large")(a)
        b = layers.Rescaling(1000.0, name="right_large")(b)
        cosine = layers.Dot(axes=-1, normalize=True, name="cosine")([a, b])
        cosine = layers.Rescaling(3.0, name="enlarge")(cosine)
        return layers.Activation("tanh", name="bent")(
            layers.Add(name="join")([x, cosine])
        )

    return [Branch(branches)]


def power_sum_nodes() -> list[Any]:
    """A sum of squares over 65504 in a graph of operations, and its root."""

    def branches(x: Any) -> Any:
        large = named(ops.multiply(x, 200.0), "large")
        energy = named(ops.square(large), "energy")
        total = named(ops.sum(energy, axis=-1, keepdims=True), "total")
        root = named(ops.sqrt(total), "root")
        return named(ops.divide(large, root), "quotient")

    return [Branch(branches)]


# Underflow


def small_products() -> list[Any]:
    """A chain of factors whose middle lies near 1e-9."""
    return [
        layers.Rescaling(1e-4, name="small"),
        layers.Rescaling(1e-5, name="smaller"),
        layers.Rescaling(3e4, name="back"),
        layers.Rescaling(3e4, name="again"),
    ]


def tiny_square() -> list[Any]:
    """The square of values near 1e-5."""
    return [Raw(lambda x: ops.square(x * 1e-5) * 1e5 * 1e5, name="power")]


def gaussian_log() -> list[Any]:
    """The logarithm of a Gaussian kernel, 0 in float16 far from the centre."""
    return [
        Raw(lambda x: -ops.log(ops.exp(-30.0 * ops.square(ops.tanh(x)))), name="kernel")
    ]


def shifted_logsumexp() -> list[Any]:
    """A logarithm of a mean of exponentials near e-20."""

    def pool(x: Any) -> Any:
        mean = ops.mean(ops.exp(x - 20.0), axis=-1, keepdims=True)
        return x - 2.0 * (ops.log(mean) + 20.0)

    return [Raw(pool, name="likelihood")]


def tiny_unit_normalization() -> list[Any]:
    """Keras's UnitNormalization of values near 1e-4."""
    return [
        layers.Rescaling(1e-4, name="lower"),
        layers.UnitNormalization(name="unit"),
    ]


def product_of_probabilities() -> list[Any]:
    """The logarithm of the product of 16 probabilities near 0.1."""

    def product(x: Any) -> Any:
        p = 0.2 * ops.sigmoid(x)
        total = p[..., 0:1]
        for i in range(1, 16):
            total = total * p[..., i : i + 1]
        return x + ops.log(total) / 10.0

    return [Raw(product, name="joint")]


# Cancellation


def moments() -> list[Any]:
    """The variance as mean of squares less square of the mean."""

    def scale(x: Any) -> Any:
        # Of every second channel: of all, a normalised row has the same variance.
        h = 100.0 + 3.0 * x[..., ::2]
        mean = ops.mean(h, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(h), axis=-1, keepdims=True) - ops.square(mean)
        return ops.tanh(x + 18.0 / (9.0 + ops.maximum(variance, 0.0)) - 1.0)

    return [Raw(scale, name="moments")]


def centre() -> list[Any]:
    """Values around 1000 less their mean: what gives them is guilty too."""
    return [
        layers.Rescaling(1.0, offset=3000.0, name="offset"),
        Raw(lambda x: x - ops.mean(x, axis=-1, keepdims=True), name="centre"),
    ]


def centre_nodes() -> list[Any]:
    """The same in operations of a graph."""
    return [
        Node("offset", lambda x: ops.add(x, 3000.0)),
        Node("centre", lambda x: ops.subtract(x, 3000.0)),
    ]


def hyperbola() -> list[Any]:
    """A root of 1 + x, less 1, for small x."""
    return [
        Raw(lambda x: (ops.sqrt(1.0 + 1e-4 * ops.square(x)) - 1.0) * 2e4, name="bend")
    ]


def versine() -> list[Any]:
    """One less the cosine of small angles."""
    return [Raw(lambda x: (1.0 - ops.cos(0.02 * x)) * 5e3, name="angle")]


# Resolution


def steps_of_position(stride: float = 97.0) -> list[Any]:
    """Sines of positions of some thousand."""

    def add(x: Any) -> Any:
        position = ops.cast(ops.arange(x.shape[1]), x.dtype) * stride
        pace = 1.0 - ops.cast(ops.arange(x.shape[2]), x.dtype) * 0.1
        return x + 2.0 * ops.sin(position[:, None] * pace)

    return [Raw(add, name="positions")]


def shifted_normalization() -> list[Any]:
    """BatchNormalization of values around 3000, which it gets rounded."""
    return [
        layers.Rescaling(1.0, offset=3000.0, name="offset"),
        layers.BatchNormalization(name="batch_norm"),
    ]


def stale_average() -> list[Any]:
    """A moving average whose steps are below the spacing of its value."""

    def average(x: Any) -> Any:
        mean = ops.ones_like(x)
        for _ in range(64):
            mean = mean + 2e-4 * (x - mean)
        return (mean - 1.0) * 80.0

    return [Raw(average, name="average")]


# Constants


def empty_rows() -> list[Any]:
    """A quotient with 1e-8 against rows of zeros."""

    def shares(x: Any) -> Any:
        above = ops.relu(x - 1.5)
        return x + 3.0 * above / (ops.sum(above, axis=-1, keepdims=True) + 1e-8)

    return [Raw(shares, name="shares")]


def log_of_zero() -> list[Any]:
    """A logarithm with 1e-10 against channels of zeros."""

    def levels(x: Any) -> Any:
        used = ops.cast(ops.arange(x.shape[-1]) % 2, x.dtype)
        return x + 0.1 * ops.log(used * (1.5 + ops.tanh(x)) + 1e-10)

    return [Raw(levels, name="levels")]


def smooth_absolute() -> list[Any]:
    """A root with 1e-10 whose gradient at zero is 0 / 0 without it."""
    return [Raw(lambda x: ops.sqrt(ops.square(ops.relu(x)) + 1e-10), name="smooth")]


def mask_constant() -> list[Any]:
    """A mask times -1e9, which is 0 times infinity in float16."""

    def attend(x: Any) -> Any:
        length = x.shape[1]
        seen = ops.cast(ops.tri(length, length), x.dtype)
        scores = ops.matmul(x, ops.swapaxes(x, 1, 2)) / math.sqrt(x.shape[-1])
        # By way of float32, so that NumPy does not warn of what is meant.
        far = ops.cast(ops.convert_to_tensor(-1e9, "float32"), x.dtype)
        return x + ops.matmul(ops.softmax(scores + (1.0 - seen) * far), x)

    return [Raw(attend, name="masked")]


def mask_constant_nodes() -> list[Any]:
    """The same in operations of a graph: the mask is of what is below -1."""

    def branches(x: Any) -> Any:
        hidden = Raw(lambda v: ops.cast(v < -1.0, v.dtype), name="hidden")(x)
        far = named(ops.multiply(hidden, -1e9), "far")
        scores = named(ops.add(x, far), "scores")
        share = layers.Softmax(name="share")(scores)
        enlarged = layers.Rescaling(8.0, name="enlarge")(share)
        return layers.Add(name="join")([x, enlarged])

    return [Branch(branches)]


# Backward only


def reciprocal() -> list[Any]:
    """1 / x for x near 1e-3: the derivative is 1e6."""
    return [Raw(lambda x: 1.0 / (1e-3 * (1.5 + ops.tanh(x))), name="inverse")]


def small_logarithm() -> list[Any]:
    """The logarithm of values near 1e-5: the derivative is 1e5."""
    return [Raw(lambda x: ops.log(1e-5 * (1.2 + ops.tanh(x))), name="decibel")]


def negative_power() -> list[Any]:
    """A power of -1.2 of values near 1e-3: the derivative is 1e7 of what it gives."""
    return [
        Raw(lambda x: (4e-4 * (1.5 + ops.tanh(x))) ** -1.2 * 1e-3, name="inverse_power")
    ]


def chain_of(*parts: list[Any]) -> list[Any]:
    """Returns the elements of several parts, a normalising layer between them."""
    found: list[Any] = []
    for i, part in enumerate(parts):
        if i:
            found.append(layers.LayerNormalization(name=f"between_{i}"))
        found += part
    return found
