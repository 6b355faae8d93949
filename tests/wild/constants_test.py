"""Numbers in a layer's own code that half precision makes 0, 1 or infinity of."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.wild.own_layers import Own

ops = keras.ops
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
# The second half of the rows is empty, as of padding.
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
X[4:] = 0.0
IS_REAL = tf.constant([[1.0] * 6] * 4 + [[0.0] * 6] * 4)


def masked_mean(x):
    mask = tf.cast(IS_REAL, x.dtype)
    return tf.reduce_sum(x * mask, 1) / (tf.reduce_sum(mask, 1) + 1e-9)


def additive_mask(x):
    return tf.nn.softmax(x + (1.0 - tf.cast(IS_REAL, x.dtype)) * -1e9)


LOST = {
    "a small number that is added": masked_mean,
    "one that Keras adds": lambda x: x / ops.add(ops.abs(x), 1e-9),
    "a lower bound": lambda x: x / ops.maximum(ops.abs(x), 1e-12),
    "one that is cast": lambda x: x / (abs(x) + tf.cast(1e-9, x.dtype)),
    "one of the dtype": lambda x: x / (abs(x) + tf.constant(1e-9, x.dtype)),
    "a large number as a mask": additive_mask,
    "an integer as a mask": lambda x: tf.nn.softmax(
        tf.where(IS_REAL > 0, x, tf.ones_like(x) * (1 - 2**32))
    ),
    "a number next to 1": lambda x: tf.math.log(1.0 - tf.sigmoid(x) * 0.99999),
}
HELD = {
    "a number that float16 has": lambda x: x / (tf.abs(x) + 1e-6),
    "infinity itself": lambda x: tf.nn.softmax(tf.where(x > 0.0, x, -np.inf)),
    "activations of Keras": lambda x: ops.gelu(x) + ops.elu(x) + ops.relu6(x),
    "what is drawn": lambda x: x + keras.random.normal((8, 6), dtype=x.dtype),
    "0 and 1": lambda x: 1.0 - x * 0.0,
    "a factor, whose loss shows itself": lambda x: x * 1e6 / 1e6,
}


@pytest.mark.parametrize("name", LOST)
def test_a_layer_that_writes_such_a_number_gives_what_it_gives_in_float32(name):
    with tfamp.scope("mixed_float16"):
        layer = Own(LOST[name])
        found = keras.ops.convert_to_numpy(layer(X))
        row = tfamp.assignment(layer).layers[0]
    assert (row.rule, row.compute_dtype) == ("default: constants", "float32")
    exact = Own(LOST[name])(X).numpy()
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("name", HELD)
def test_a_layer_with_numbers_that_half_precision_has_stays_in_it(name):
    with tfamp.scope("mixed_float16"):
        layer = Own(HELD[name])
        layer(X)
    assert layer.compute_dtype == "float16"


def test_a_share_that_bfloat16_rounds_to_one_is_kept():
    with tfamp.scope("mixed_bfloat16"):
        layer = Own(lambda x: (1.0 - x * 0.999) * 1000.0)
        found = layer(np.ones((1, 1), "float32"))
    assert float(found[0, 0]) == pytest.approx(1.0, rel=0.01)


class Attention(keras.layers.Layer):
    """Attends by hand, with an additive mask."""

    def __init__(self):
        super().__init__()
        self.of = [keras.layers.Dense(8) for _ in range(3)]

    def call(self, x, mask):
        q, k, v = (part(x) for part in self.of)
        scores = tf.matmul(q, k, transpose_b=True) / np.sqrt(8)
        scores += (1.0 - tf.cast(mask, scores.dtype)[:, None]) * -1e9
        return tf.matmul(tf.nn.softmax(scores), v)


class Net(keras.Model):
    """Attends, and takes the mean."""

    def __init__(self):
        super().__init__()
        self.attention, self.head = Attention(), keras.layers.Dense(2)

    def call(self, x, mask):
        return self.head(tf.reduce_mean(self.attention(x, mask), 1))


def test_a_masked_attention_by_hand_learns_in_a_loop_as_in_float32():
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 6, 4)).astype("float32")
    mask = (np.arange(6) < random.integers(2, 7, (32, 1))).astype("float32")
    y = random.integers(0, 2, 32)

    def losses(policy):
        keras.utils.set_random_seed(0)
        with tfamp.scope(policy):
            net, optimizer = Net(), keras.optimizers.Adam(0.01)
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = keras.losses.SparseCategoricalCrossentropy(True)(
                        y, net(x, mask)
                    )
                weights = net.trainable_variables
                gradients = tape.gradient(loss, weights)
                optimizer.apply_gradients(zip(gradients, weights, strict=True))
                yield float(loss)
        if policy != "float32":
            assert net.attention.of[0].compute_dtype == "float16"

    np.testing.assert_allclose(
        list(losses("mixed_float16")), list(losses("float32")), rtol=2e-3
    )
