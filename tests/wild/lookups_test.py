"""Layers that read texts go through a file that tfamp wrote."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp


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
