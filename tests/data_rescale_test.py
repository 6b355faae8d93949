"""`Rescale`: every pixel value against float64, files, and Keras's layer beside it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.refusals import refused_arguments
from tfamp.data.layers import Rescale

ml_dtypes = pytest.importorskip("ml_dtypes", reason="comes with TensorFlow")

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
CASES = {
    "to 0..1": (1 / 255, 0.0),
    "to -1..1": (1 / 127.5, -1.0),
    "negative": (-0.0123, 0.777),
    "far offset": (0.01, 1000.0),
    "mean and deviation": (1 / (255 * STD), -MEAN / STD),
    "channels": ([0.1, 0.2, 0.3], [-0.5, 0.1, -2.0]),
}
PIXELS = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
FORMATS = {"mixed_float16": np.float16, "mixed_bfloat16": ml_dtypes.bfloat16}


def units_off(found, scale, offset, dtype):
    """Returns how far values are from the true ones, in units in the last place."""
    true = PIXELS.astype(np.float64) * np.asarray(scale) + np.asarray(offset)
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(true), 1e-300)))
    unit = np.maximum(2.0**exponent * float(info.eps), float(info.smallest_subnormal))
    return np.abs(np.asarray(found).astype(np.float64) - true) / unit


@pytest.mark.quick(
    "graph-mixed_float16-to -1..1",
    "graph-mixed_float16-far offset",
    "xla-mixed_bfloat16-to 0..1",
)
@pytest.mark.parametrize("scale, offset", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_every_pixel_value_is_the_nearest_to_the_true_one(policy, scale, offset, jit):
    layer = Rescale(scale, offset, dtype=policy)
    found = tf.function(layer, jit_compile=jit)(tf.constant(PIXELS))
    assert found.dtype == layer.compute_dtype
    assert units_off(found.numpy(), scale, offset, FORMATS[policy]).max() <= 0.5


@pytest.mark.parametrize(
    "policy, least",
    [("float32", 100), ("mixed_float16", 7), ("mixed_bfloat16", 100)],
    ids=["float32", "float16", "bfloat16"],
)
def test_the_layer_of_keras_still_loses_digits(policy, least):
    scale, offset = CASES["to -1..1"]
    found = keras.layers.Rescaling(scale, offset, dtype=policy)(PIXELS).numpy()
    dtype = FORMATS.get(policy, np.float32)
    assert units_off(found, scale, offset, dtype).max() > least


def test_a_model_keeps_it_through_its_file(tmp_path):
    inputs = keras.Input((3,), dtype="uint8")
    scale, offset = CASES["channels"]
    layer = Rescale(scale, offset, name="first", dtype="mixed_bfloat16")
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("first").get_config() == layer.get_config()
    np.testing.assert_array_equal(loaded(PIXELS).numpy(), model(PIXELS).numpy())


test_wrong_arguments_are_refused = refused_arguments(
    Rescale,
    ("scale", 0.0, "; expected numbers other than 0"),
    ("offset", np.nan, "; expected a finite number, or one for each"),
)
