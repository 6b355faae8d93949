"""The order in which `fit` brings arrays: another one in each epoch, run and seed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp


class Order(keras.Model):
    """Writes down the examples of each step as it trains on them."""

    def __init__(self, num_steps, batch_size):
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.seen = tf.Variable(tf.zeros((num_steps, batch_size)))
        self.step = tf.Variable(0)

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        x, _ = data
        self.seen[self.step].assign(x[:, 0])
        self.step.assign_add(1)
        return super().train_step(data)


def orders(epochs, *, seed=None, policy="float32", shuffle=True):
    """Returns the order of 64 examples in each epoch of a `fit`."""
    if seed is None:
        tf.random.set_seed(None)  # a seed of an earlier test would decide the order
    else:
        keras.utils.set_random_seed(seed)
    x = np.arange(64, dtype="float32")[:, None]
    with tfamp.scope(policy):
        model = Order(8 * epochs, 8)
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(x, x, batch_size=8, epochs=epochs, verbose=0, shuffle=shuffle)
    return model.seen.numpy().reshape(epochs, 64).tolist()


def test_each_epoch_has_an_order_of_its_own():
    first, second, third = orders(3)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(64))
    assert first != second and second != third and first != third


def test_each_run_has_an_order_of_its_own():
    assert orders(1) != orders(1)


@pytest.mark.filterwarnings("ignore:'mixed_bfloat16' will be slow")
@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_seed_decides_the_order(policy):
    assert orders(1, seed=1, policy=policy) == orders(1, seed=1, policy=policy)
    assert orders(1, seed=1, policy=policy) != orders(1, seed=2, policy=policy)


def test_examples_stay_in_their_order_where_nobody_shuffles():
    assert orders(2, shuffle=False) == [list(range(64))] * 2


def test_a_shuffle_within_batches_leaves_each_its_examples():
    first, second = orders(2, shuffle="batch")
    for order in (first, second):
        batches = [sorted(order[i : i + 8]) for i in range(0, 64, 8)]
        assert batches == [list(range(i, i + 8)) for i in range(0, 64, 8)]
    assert first != second
