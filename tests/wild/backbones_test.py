"""Looking at a backbone changes nothing in what is built from it afterwards."""

import keras
import numpy as np
from keras import layers

import tfamp


def test_a_backbone_that_was_printed_is_no_model_with_a_head():
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((8,))
        features = layers.Dense(8, name="features")(inputs)
        backbone = keras.Model(inputs, features, name="backbone")
        shown = tfamp.assignment(backbone)
        assert shown["features"].compute_dtype == "float32"  # a head, on its own
        assert backbone.get_layer("features").compute_dtype == "bfloat16"
        x = keras.Input((8,))
        h = layers.Dense(8, name="stem")(x)
        model = keras.Model(x, layers.Dense(1, name="head")(h + backbone(h)))
        model.compile("sgd", "mse")
    dtypes = {row.path: row.compute_dtype for row in tfamp.assignment(model)}
    assert dtypes["backbone/features"] == "bfloat16"
    assert dtypes["head"] == "float32"
    loss = model.fit(np.ones((4, 8)), np.ones((4, 1)), verbose=0).history["loss"]
    assert np.isfinite(loss).all()
