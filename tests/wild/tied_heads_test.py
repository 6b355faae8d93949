"""A layer that makes a model's output and is used inside another layer as well."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp


class Residual(layers.Layer):
    def __init__(self, dense):
        super().__init__()
        self.dense = dense

    def call(self, x):
        return x + self.dense(x)


def model_of(dense):
    inputs = keras.Input((8,))
    hidden = Residual(dense)(layers.Dense(8)(inputs))
    return keras.Model(inputs, dense(hidden))


@pytest.mark.parametrize("way", ["enable", "apply"])
def test_a_tied_head_trains_and_its_output_is_float32(way):
    if way == "enable":
        with tfamp.scope("mixed_bfloat16"):
            model = model_of(layers.Dense(8))
    else:
        model = model_of(layers.Dense(8))
        tfamp.apply(model, "mixed_bfloat16")
    model.compile("sgd", "mse")
    x = np.ones((4, 8), "float32")
    assert np.isfinite(model.fit(x, x, verbose=0).history["loss"]).all()
    assert model.predict(x, verbose=0).dtype == "float32"
    rows = tfamp.assignment(model)
    assert "cast" in rows.layers[0].rule or "cast" in rows.layers[0].reason
