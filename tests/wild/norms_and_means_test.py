"""Norms, variances and means that a user's own layer asks Keras or TensorFlow for.

In float16 a square overflows from 256 on and is 0 below 2e-4, so a normalized vector
comes out as zeros or infinities. The reference is the same operation in float64.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

ops = keras.ops
# Four roundings of a result; a gradient passes through a few more.
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
OPERATIONS = {
    "ops.normalize": lambda x: ops.normalize(x, axis=-1),
    "ops.normalize of order 1": lambda x: ops.normalize(x, axis=-1, order=1),
    "ops.norm": lambda x: ops.norm(x, axis=-1),
    "ops.linalg.norm": lambda x: ops.linalg.norm(x, axis=-1),
    "ops.var": lambda x: ops.var(x, axis=-1),
    "ops.std": lambda x: ops.std(x, axis=-1),
    "ops.moments": lambda x: ops.moments(x, axes=[1])[1],
    "ops.mean": lambda x: ops.mean(x, axis=-1),
    "ops.average": lambda x: ops.average(x, axis=-1),
    "ops.average by weights": lambda x: ops.average(x, axis=-1, weights=ops.abs(x)),
    "tf.math.l2_normalize": lambda x: tf.math.l2_normalize(x, -1),
    "tf.nn.l2_normalize": lambda x: tf.nn.l2_normalize(x, -1),
    "tf.linalg.l2_normalize": lambda x: tf.linalg.l2_normalize(x, -1),
    "tf.linalg.normalize": lambda x: tf.linalg.normalize(x, axis=-1)[0],
    "tf.norm": lambda x: tf.norm(x, axis=-1),
    "tf.norm by name": lambda x: tf.norm(tensor=x, axis=-1),
    "tf.linalg.norm": lambda x: tf.linalg.norm(x, axis=-1),
    "tf.nn.moments": lambda x: tf.nn.moments(x, [1])[1],
    "tf.reduce_mean": lambda x: tf.reduce_mean(x, -1),
    "tf.math.reduce_mean": lambda x: tf.math.reduce_mean(x, -1),
    "tf.math.reduce_variance": lambda x: tf.math.reduce_variance(x, -1),
    "tf.math.reduce_std": lambda x: tf.math.reduce_std(x, -1),
    "tf.math.reduce_euclidean_norm": lambda x: tf.math.reduce_euclidean_norm(x, -1),
}
SCALES = [1e-4, 300.0, 1e4]


class Calls(keras.layers.Layer):
    """A layer of the user's that calls one operation."""

    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def call(self, x):
        return self.operation(x)


def inputs(scale, dtype):
    """Returns 4 rows of 64 numbers of one size, which the dtype holds exactly."""
    rng = np.random.default_rng(0)
    x = scale * rng.uniform(0.5, 1.5, (4, 64)) * rng.choice([-1, 1], (4, 64))
    return tf.cast(tf.cast(x, dtype), "float32")


def with_gradient(function, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
        # In float64, or the sum itself would overflow.
        total = tf.reduce_sum(tf.cast(y, "float64"))
    return y, tape.gradient(total, x)


@pytest.mark.quick("ops.normalize-float16-eager")
@pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_operation_of_small_and_large_numbers(operation, dtype, is_graph):
    with tfamp.scope(f"mixed_{dtype}", loss_scale=None):
        layer = Calls(operation)
    call = tf.function(layer) if is_graph else layer
    for scale in SCALES:
        x = inputs(scale, dtype)
        exact, exact_gradient = with_gradient(operation, tf.cast(x, "float64"))
        found, gradient = with_gradient(call, x)
        assert found.dtype == dtype
        # What the dtype cannot hold is no business of the operation.
        fits = np.abs(exact) < (65504 if dtype == "float16" else 3e38)
        smallest = 2.0**-24 if dtype == "float16" else 1e-38
        np.testing.assert_allclose(
            np.asarray(found, "float64")[fits],
            np.asarray(exact)[fits],
            rtol=4 * EPSILON[dtype],
            atol=smallest,
            err_msg=f"at {scale}",
        )
        fits = np.abs(exact_gradient) < (60000 if dtype == "float16" else 3e38)
        np.testing.assert_allclose(
            np.asarray(gradient, "float64")[fits],
            np.asarray(exact_gradient)[fits],
            rtol=16 * EPSILON[dtype],
            # A sum of parts that cancel each other is as exact as its parts.
            atol=16 * EPSILON[dtype] * np.abs(exact_gradient).max(),
            err_msg=f"gradient at {scale}",
        )


class Contrastive(keras.Model):
    """Learns that two views of an example belong together, on the unit sphere."""

    def __init__(self):
        super().__init__()
        self.project = keras.layers.Dense(16, use_bias=False)

    def call(self, x):
        return tf.math.l2_normalize(self.project(x), axis=1)

    def train_step(self, data):
        one, other = data
        with tf.GradientTape() as tape:
            a, b = self(one, training=True), self(other, training=True)
            logits = tf.matmul(a, b, transpose_b=True) / 0.1
            labels = tf.range(tf.shape(logits)[0])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"nt_xent": loss}  # Keras replaces a lone "loss"


@pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_contrastive_model_of_small_features_learns_as_in_float32(policy):
    rng = np.random.default_rng(0)
    x = (1e-3 * rng.normal(size=(64, 12))).astype("float32")
    near = x + (3e-4 * rng.normal(size=x.shape)).astype("float32")

    def losses(policy):
        keras.utils.set_random_seed(0)
        with tfamp.scope(policy):
            model = Contrastive()
            model.compile(keras.optimizers.SGD(0.05))
        history = model.fit(x, near, batch_size=32, epochs=5, verbose=0, shuffle=False)
        return history.history["nt_xent"]

    expected = losses("float32")
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses(policy), expected, rtol=0.03)
