"""A user's own kind of Keras's loss-scale optimizer is left to do what it does."""

import keras
import numpy as np
import pytest

import tfamp


class Counting(keras.optimizers.LossScaleOptimizer):
    num_scaled = 0

    def scale_loss(self, loss):
        type(self).num_scaled += 1
        return super().scale_loss(loss)


@pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
def test_an_own_subclass_is_not_replaced():
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = Counting(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=True)
    assert model.optimizer is optimizer
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    assert Counting.num_scaled == 1
