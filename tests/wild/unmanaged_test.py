"""What is Keras's own or a user's own stays so, also beside a managed model."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfamp
from tests.styles import Own
from tests.wild.checking import by_file

STOCK = keras.optimizers.LossScaleOptimizer


def dense():
    return keras.Sequential([keras.Input((2,)), layers.Dense(1)])


def test_a_file_saved_without_tfamp_keeps_its_stock_optimizer(tmp_path):
    model = dense()
    model.compile(STOCK(keras.optimizers.SGD()), "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    assert type(by_file(model, tmp_path).optimizer) is STOCK


class Counting(STOCK):
    num_scaled = 0

    def scale_loss(self, loss):
        type(self).num_scaled += 1
        return super().scale_loss(loss)


def test_an_own_subclass_is_not_replaced():
    with tfamp.scope("mixed_float16"):
        model = dense()
        optimizer = Counting(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=True)
    assert model.optimizer is optimizer
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert Counting.num_scaled == 1


class Seen(layers.Layer):
    def call(self, x):
        self.attributes = vars(x)
        return x


def test_inputs_of_stock_mixed_layers_bear_nothing_of_tfamp():
    stock = Seen(dtype="mixed_bfloat16")
    with tfamp.scope("mixed_bfloat16"):
        managed = keras.Sequential([Seen(), layers.Dense(1)])
        managed(np.ones((1, 2), "float32"))
    for x in (np.ones((1, 2), "float32"), tf.ones((1, 2))):
        stock(x)
        managed(x)
        assert not [name for name in stock.attributes if "tfamp" in name]
        stock(x)
        assert not [name for name in stock.attributes if "tfamp" in name]


def test_outside_of_managed_layers_operations_are_tensorflows_own():
    numbers = np.linspace(-4.0, 4.0, 2000).astype("float16")[None]
    long = tf.ones((1, 70_000), "float16")
    before = tf.cumsum(long, -1)[0, -1]
    assert before != 70_000
    with tfamp.scope("mixed_float16"):
        Own(tf.nn.softmax)(numbers)
        assert Own(lambda x: tf.cumsum(x, -1))(long[:, :9])[0, -1] == 9
        assert tf.cumsum(long, -1)[0, -1] == before
        explicit = Own(lambda x: tf.cumsum(x, -1), dtype="float16")
        assert explicit(long)[0, -1] == before
    x = tf.constant(numbers)
    assert tf.nn.softmax(x).dtype == "float16"
    np.testing.assert_array_equal(tf.nn.softmax(x), tf.raw_ops.Softmax(logits=x))
