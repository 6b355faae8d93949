"""Layers whose own operations TensorFlow traces in half precision, and cannot run."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype("float32")


class Whitening(layers.Layer):
    def build(self, shape):
        width = shape[-1]
        self.kernel = self.add_weight(shape=(width, width), initializer="orthogonal")

    def call(self, x):
        gram = tf.matmul(self.kernel, self.kernel, transpose_b=True)
        return x @ tf.linalg.cholesky(gram + tf.eye(x.shape[-1], dtype=gram.dtype))


class AlexBlock(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = layers.Conv2D(4, 3, activation="relu")

    def call(self, x):
        return tf.nn.local_response_normalization(self.conv(x))


def whitened():
    parts = [layers.Flatten(), layers.Dense(6), Whitening(), layers.Dense(1)]
    return keras.Sequential([keras.Input(IMAGES.shape[1:]), *parts])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block, self.flatten = AlexBlock(), layers.Flatten()
        self.head = layers.Dense(1)

    def call(self, x):
        return self.head(self.flatten(self.block(x)))


CASES = {
    "cholesky": (whitened, "mixed_float16", "Whitening", "Cholesky"),
    "subclassed": (Subclassed, "mixed_bfloat16", "AlexBlock", "LRN"),
}


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_such_a_layer_computes_in_float32_and_says_so(case, run_eagerly, caplog):
    build, policy, name, operation = case
    with tfamp.scope(policy):
        model = build()
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        history = model.fit(IMAGES, np.ones((8, 1)), verbose=0).history
    assert np.isfinite(history["loss"]).all()
    rows = {row.class_name: row for row in tfamp.assignment(model)}
    assert rows[name].compute_dtype == "float32"
    half = policy.removeprefix("mixed_")
    told = f"TensorFlow has no kernel that computes {operation} in {half}"
    if not run_eagerly:
        assert told in caplog.text
    if name == "AlexBlock":  # what it holds goes on in half precision
        assert rows["Conv2D"].compute_dtype == half
    assert caplog.text.count("computes in float32") == 1
