"""Replicas draw random numbers of their own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas

layers = keras.layers
SIZE = 4096
# Of 4096 bits that agree by chance; a standard deviation is 1 / 128.
AGREEMENT = pytest.approx(0.5, abs=0.05)

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*' will be slow")


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


class Noise(layers.Layer):
    """A user's layer with a seed generator of its own."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, x, training=False):
        return keras.random.uniform(keras.ops.shape(x), seed=self.seeds) < 0.5


def dropout():
    return layers.Dropout(0.5, seed=1)


def flip():
    return layers.RandomFlip("horizontal", seed=1)


ONES = tf.ones((1, SIZE))
IMAGES = tf.tile(tf.reshape([0.0, 1.0], (1, 1, 2, 1)), (SIZE, 1, 1, 1))
DRAWING = [(dropout, ONES), (Noise, ONES), (flip, IMAGES)]
IDS = ["dropout", "own", "flip"]


def drawn(strategy, make, x, wrap=lambda call: call):
    """Returns the bits that each replica draws, and the layer."""
    with strategy.scope():
        layer = make()
        layer(x[:1])
    call = wrap(lambda: layer(x, training=True))
    parts = strategy.experimental_local_results(strategy.run(lambda: call()))
    bits = [np.asarray(part).reshape(SIZE, -1)[:, 0] != 0 for part in parts]
    return bits, layer


@pytest.mark.parametrize(("make", "x"), DRAWING, ids=IDS)
def test_replicas_draw_numbers_of_their_own(strategy, make, x):
    with tfamp.scope("float32"):
        (first, second), layer = drawn(strategy, make, x)
        (alone,), _ = drawn(tf.distribute.get_strategy(), make, x)
    assert np.mean(first == second) == AGREEMENT
    assert [np.mean(first), np.mean(second)] == [AGREEMENT, AGREEMENT]
    np.testing.assert_array_equal(first, alone)


def test_under_xla(strategy):
    with tfamp.scope("float32"):
        compiled = tf.function(jit_compile=True)
        (first, second), _ = drawn(strategy, dropout, ONES, compiled)
    assert np.mean(first == second) == AGREEMENT
