"""Data that layers of Keras prepare, outside of a model, are those of float32.

Stock Keras rounds them: labels and boxes too, and computes places of pixels in half.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]
RNG = np.random.default_rng(0)
IMAGES = np.round(RNG.uniform(0, 255, (2, 20, 20, 3))).astype("float32")
LABELED = {"images": IMAGES, "labels": np.float32([[0, 2049], [65_537, 1]])}
COUNTS = np.int64([[1, 2, 2], [3, 0, 3]])


def augmented():
    scale, flip = layers.Rescaling(1 / 255), layers.RandomFlip(seed=1)
    return keras.Sequential([scale, flip, layers.RandomRotation(0.2, seed=2)])


def sparse_words():
    return layers.TextVectorization(
        output_mode="tf_idf", vocabulary=["a", "b"], idf_weights=[0.3, 1.7]
    )


PREPARED = {
    "MixUp": (lambda: layers.MixUp(seed=1), LABELED),
    "CutMix": (lambda: layers.CutMix(seed=1), LABELED),
    "RandomShear": (lambda: layers.RandomShear(0.2, seed=1), LABELED),
    "RandomPerspective": (lambda: layers.RandomPerspective(seed=1), IMAGES),
    "Sequential": (augmented, IMAGES),
    "Pipeline": (lambda: layers.Pipeline([layers.Rescaling(1 / 255)]), IMAGES),
    "Rescaling": (lambda: layers.Rescaling(1 / 255), IMAGES),
    "Normalization": (lambda: layers.Normalization(mean=127.0, variance=99.0), IMAGES),
    "STFTSpectrogram": (
        lambda: layers.STFTSpectrogram(frame_length=8, fft_length=8),
        IMAGES[:, :, 0, :1],
    ),
    "CategoryEncoding": (
        lambda: layers.CategoryEncoding(4, output_mode="count"),
        np.repeat(COUNTS, 99, axis=1),
    ),
    "TextVectorization": (sparse_words, np.array(["a b a", "b " * 300])),
}


def prepared(make, data, way):
    if way == "eager":
        return make()(keras.tree.map_structure(tf.constant, data))
    return next(iter(tf.data.Dataset.from_tensors(data).map(make())))


@pytest.mark.parametrize("way", ["map", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", PREPARED)
def test_it_is_what_float32_prepares(name, policy, way):
    make, data = PREPARED[name]
    expected = prepared(make, data, way)
    with tfamp.scope(policy):
        found = prepared(make, data, way)
    flat = keras.tree.flatten(found), keras.tree.flatten(expected)
    for ours, stock in zip(*flat, strict=True):
        assert ours.dtype == stock.dtype
        np.testing.assert_array_equal(ours, stock)


def test_in_a_model_they_give_what_the_layers_around_compute_in():
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((20, 20, 3))
        flipped = layers.RandomFlip(name="flip")(inputs)
        scaled = layers.Rescaling(1 / 255, name="scale")(flipped)
        model = keras.Model(inputs, layers.Conv2D(2, 3)(scaled))
    assert (flipped.dtype, scaled.dtype) == ("bfloat16", "bfloat16")
    rows = tfamp.assignment(model)
    assert rows["flip"].rule == "default: preprocessing"
    assert rows["flip"].compute_dtype == "float32"
    assert rows["scale"].compute_dtype == "bfloat16"


def test_so_do_those_of_kerashub():
    hub = pytest.importorskip("keras_hub")
    options = {"image_size": (16, 16), "scale": 1 / 255}
    expected = hub.layers.ImageConverter(**options)(IMAGES)
    with tfamp.scope("mixed_bfloat16"):
        np.testing.assert_array_equal(
            hub.layers.ImageConverter(**options)(IMAGES), expected
        )
