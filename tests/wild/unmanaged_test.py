"""What tfamp does not manage stays as Keras makes it, also beside a managed model."""

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
