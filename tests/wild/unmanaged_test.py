"""What is Keras's own or a user's own stays so, also beside a managed model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def test_a_file_saved_without_tfamp_keeps_its_stock_optimizer(tmp_path):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.LossScaleOptimizer


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


class Counting(keras.optimizers.LossScaleOptimizer):
    num_scaled = 0

    def scale_loss(self, loss):
        type(self).num_scaled += 1
        return super().scale_loss(loss)


def test_an_own_subclass_is_not_replaced():
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = Counting(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=True)
    assert model.optimizer is optimizer
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert Counting.num_scaled == 1


class Penalized(layers.Layer):
    """Weighs its activity by the factor that its regularizer was given."""

    def call(self, x):
        factor = self.activity_regularizer.l2
        assert self.activity_regularizer.get_config() == {"l2": 0.5}
        self.add_loss(factor * tf.reduce_sum(x * x))
        return x


def test_a_regularizer_has_its_attributes_inside_a_call():
    with tfamp.scope("mixed_bfloat16"):
        layer = Penalized(activity_regularizer=keras.regularizers.L2(0.5))
    layer(np.full((1, 2), 2.0, "float32"))
    # Half of the two squares of 2, by the layer and by its regularizer.
    assert [float(loss) for loss in layer.losses] == [4.0, 4.0]


def vectorization():
    layer = layers.TextVectorization(output_mode="multi_hot")
    layer.adapt(["a cat", "a dog"])
    return layer


LOOKUPS = {
    "TextVectorization": vectorization,
    "StringLookup": lambda: layers.StringLookup(
        vocabulary=["a", "cat"], output_mode="multi_hot"
    ),
}


@pytest.mark.parametrize("make", LOOKUPS.values(), ids=LOOKUPS)
def test_a_model_over_texts_is_loaded(make, tmp_path):
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((1,), dtype="string")
        model = keras.Model(inputs, layers.Dense(1)(make()(inputs)))
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    texts = tf.constant([["a"], ["cat"]])
    np.testing.assert_array_equal(loaded(texts), model(texts))
