"""Operations that half precision spoils, as users write them, against float64."""

import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.math import l2_normalize  # type: ignore[import-untyped]

import tfamp
from tests.styles import Own

layers, ops = keras.layers, keras.ops
# Four roundings of a result; a gradient passes through a few more.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
LARGEST = {"float16": 65504.0, "bfloat16": 3e38}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 1e-38}


def columns(x):
    """Returns the rows as columns, and the segment that each of their entries is in."""
    return tf.transpose(x), np.zeros(x.shape[1], "int32")


def one_column(x):
    return x[0], np.zeros((x.shape[1], 1), "int32")


def newest(name, call):
    """Marks an operation that an older Keras lacks."""
    lacks = not hasattr(ops, name)
    return pytest.param(call, marks=pytest.mark.skipif(lacks, reason="not in Keras"))


SHORT = {  # on 64 numbers of both signs
    **{
        f"ops.{name}": lambda x, name=name: getattr(ops, name)(x, axis=-1)
        for name in ("normalize", "norm", "var", "std", "mean")
    },
    "ops.moments": lambda x: ops.moments(x, axes=[1])[1],
    "ops.average by weights": lambda x: ops.average(x, axis=-1, weights=ops.abs(x)),
    "tf.math.l2_normalize": lambda x: tf.math.l2_normalize(x, -1),
    "tf.linalg.normalize": lambda x: tf.linalg.normalize(x, axis=-1)[0],
    "tf.norm": lambda x: tf.norm(x, axis=-1),
    "tf.reduce_mean": lambda x: tf.reduce_mean(x, -1),
    **{
        f"tf.math.{name}": lambda x, name=name: getattr(tf.math, name)(x, -1)
        for name in ("reduce_variance", "reduce_std", "reduce_euclidean_norm")
    },
    "tf.nn.moments": lambda x: tf.nn.moments(x, [1])[1],
    "an imported l2_normalize": lambda x: l2_normalize(x, -1),
    "tf.clip_by_norm": lambda x: tf.clip_by_norm(x, 1.0, axes=[1]),
    "ops.cdist": newest("cdist", lambda x: ops.cdist(x, 1.5 * x)),
    "ops.psnr": lambda x: ops.psnr(x, 1.25 * x, max_val=1e-3),
    "squareplus": lambda x: ops.squareplus(x),
    "cosine_similarity": lambda x: keras.losses.cosine_similarity(x[:, ::-1], x),
    "ops.nanstd": newest("nanstd", lambda x: ops.nanstd(x, axis=-1)),
    "ops.corrcoef": newest("corrcoef", lambda x: ops.corrcoef(x)),
    "ops.norm of a matrix": lambda x: ops.norm(x, ord="fro", axis=(0, 1)),
}
LONG = {  # on 70,000 positive numbers
    "softmax": lambda x: tf.nn.softmax(x),
    "ops.log_softmax": lambda x: ops.log_softmax(x),
    "ops.logsumexp": lambda x: ops.logsumexp(x, axis=-1),
    "ops.mean": lambda x: ops.mean(x, axis=-1),
    "ops.std": lambda x: ops.std(x, axis=-1),
    "ops.normalize": lambda x: ops.normalize(x),
    "ops.cumsum": lambda x: ops.cumsum(x, axis=-1),
    "ops.segment_sum": lambda x: ops.segment_sum(*columns(x), 1),
    "ops.scatter": lambda x: ops.scatter(*reversed(one_column(x)), (3,)),
    "tf.math.segment_sum": lambda x: tf.math.segment_sum(*columns(x)),
    "unsorted_segment_sum": lambda x: tf.math.unsorted_segment_sum(*columns(x), 1),
    "tf.scatter_nd": lambda x: tf.scatter_nd(*reversed(one_column(x)), (3,)),
    "tf.tensor_scatter_nd_add": lambda x: tf.tensor_scatter_nd_add(
        tf.zeros((3,), x.dtype), *reversed(one_column(x))
    ),
    "cumulative_logsumexp": lambda x: tf.math.cumulative_logsumexp(x, -1),
}
CROSS_ENTROPIES = {
    "binary": lambda p: keras.losses.binary_crossentropy(1 - p, p),
    "focal": lambda p: keras.losses.binary_focal_crossentropy(1 - p, p),
    "ops.binary": lambda p: ops.binary_crossentropy(1 - p, p),
    "categorical": lambda p: keras.losses.categorical_crossentropy(1 - p, p),
    "sparse": lambda p: keras.losses.sparse_categorical_crossentropy(np.arange(4), p),
}


def numbers(scale, dtype, *, long=False):
    """Returns 4 rows of numbers of one size, which the dtype holds exactly."""
    rng = np.random.default_rng(0)
    x = scale * rng.uniform(0.5, 1.5, (4, 70_000 if long else 64))
    if not long:
        x *= rng.choice([-1, 1], x.shape)
    return tf.cast(tf.cast(x, dtype), "float32")


def with_gradient(function, x):
    """Returns a result, and the gradient of a sum with weights that differ."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        weights = np.resize([1.0, 0.5, 0.25], y.shape)
        # In float64, or the sum itself would overflow.
        total = tf.reduce_sum(weights * tf.cast(y, "float64"))
    return y, tape.gradient(total, x)


def check(operation, found, x, dtype):
    """Compares a result and its gradient with those of float64."""
    exact = with_gradient(operation, tf.cast(x, "float64"))
    assert found[0].dtype == dtype
    for what, roundings, y, z in zip(
        ("result", "gradient"), (4, 32), found, exact, strict=True
    ):
        y, z = np.asarray(tf.cast(y, "float64")), np.asarray(z)
        # What the dtype cannot hold is no business of the operation.
        fits = np.abs(z) < 0.9 * LARGEST[dtype]
        limit = roundings * EPSILON[dtype]
        np.testing.assert_allclose(
            y[fits],
            z[fits],
            rtol=limit,
            # A sum of parts that cancel each other is as exact as its parts.
            atol=limit * np.abs(z[fits]).max(initial=0) + 2 * SMALLEST[dtype],
            err_msg=what,
        )


def layer_of(operation, dtype):
    with tfamp.scope(f"mixed_{dtype}", loss_scale=None):
        return Own(operation)


# The range of bfloat16 is that of float32, so that one scale shows it.
SCALES = pytest.mark.parametrize(
    "scale, dtype",
    [(1e-4, "float16"), (300.0, "float16"), (1e4, "float16"), (300.0, "bfloat16")],
)


@pytest.mark.quick("ops.normalize-0.0001-float16", "tf.norm-300.0-float16")
@SCALES
@pytest.mark.parametrize("operation", SHORT.values(), ids=SHORT)
def test_an_operation_in_a_layer(operation, scale, dtype):
    x = numbers(scale, dtype)
    found = with_gradient(layer_of(operation, dtype), x)
    check(operation, found, x, dtype)


@pytest.mark.quick("softmax-0.0001-float16")
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("scale", [1e-4, 1.0])
@pytest.mark.parametrize("operation", LONG.values(), ids=LONG)
def test_an_operation_over_70000_numbers(operation, scale, dtype):
    x = numbers(scale, dtype, long=True)
    found = with_gradient(layer_of(operation, dtype), x)
    check(operation, found, x, dtype)


@pytest.mark.quick("binary-float16")
@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("operation", CROSS_ENTROPIES.values(), ids=CROSS_ENTROPIES)
def test_a_cross_entropy_of_sure_answers(operation, dtype):
    probabilities = tf.constant(np.resize([0, 0.25, 0.5, 0.75, 1], (4, 64)), "float32")
    y, gradient = with_gradient(layer_of(operation, dtype), probabilities)
    exact, _ = with_gradient(operation, probabilities)
    assert y.dtype == dtype
    np.testing.assert_allclose(y, exact, rtol=4 * EPSILON[dtype])
    assert np.isfinite(gradient).all()


class Directions(layers.Layer):
    """Divides its kernel by the norms of the columns."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))

    def call(self, x):
        return ops.matmul(x, self.kernel / ops.norm(self.kernel, axis=0))


@pytest.mark.parametrize("scale", [1e-4, 300.0])
def test_a_norm_of_the_layers_own_weights(scale):
    with tfamp.scope("mixed_float16", loss_scale=None):
        layer = Directions()
    x = np.eye(64, dtype="float32")
    layer(x)
    kernel = np.asarray(numbers(scale, "float16"))[:, :8].repeat(16, 0)
    layer.set_weights([kernel])
    expected = kernel / np.linalg.norm(kernel.astype("float64"), axis=0)
    np.testing.assert_allclose(layer(x), expected, rtol=4 * EPSILON["float16"])


AHEAD = """
import tensorflow as tf
from tensorflow.math import segment_sum, unsorted_segment_sum  # makes another module
import keras, tfamp
tfamp.enable("mixed_bfloat16")
from tensorflow.math import segment_mean

class Sums(keras.layers.Layer):
    def call(self, x):
        ids = tf.zeros(tf.shape(x)[0], "int32")
        return (
            segment_sum(x, ids),
            unsorted_segment_sum(x, ids, 1),
            tf.math.segment_sum(x, ids),
            segment_mean(x, ids),
        )

print([float(y[0, 0]) for y in Sums()(tf.ones((5000, 1)))])
"""


@pytest.mark.slow("it starts processes")
def test_names_may_be_imported_ahead_and_modules_twice():
    command = [sys.executable, "-W", "ignore", "-c", AHEAD]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[4992.0, 4992.0, 4992.0, 1.0]\n", done.stderr
