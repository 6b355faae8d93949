"""Blocks without `build` that hold a Sequential, as examples on the web write them."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tests.styles import assembled

VOCABULARY, LENGTH, WIDTH = 50, 12, 16


class Tokens(layers.Layer):
    def __init__(self):
        super().__init__()
        self.words = layers.Embedding(VOCABULARY, WIDTH)
        self.places = layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.words(x) + self.places(keras.ops.arange(keras.ops.shape(x)[-1]))


class Encoder(layers.Layer):
    def __init__(self, between):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, WIDTH)
        self.ffn = feed_forward()
        self.between = between
        self.norm1 = layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout = layers.Dropout(0.1)

    def call(self, x, training=False):
        x = self.norm1(x + self.attention(x, x))
        y = self.ffn(x)
        if self.between == "dropout":
            y = self.dropout(y, training=training)
        return self.norm2(x + y)


class BuiltByACall(layers.Layer):
    """Builds what it holds by calling it, as code from before Keras 3 does."""

    def __init__(self):
        super().__init__()
        self.ffn = feed_forward()

    def build(self, input_shape):
        self.ffn(keras.ops.zeros((1, *input_shape[1:])))
        self.built = True

    def call(self, x):
        return x + self.ffn(x)


def feed_forward():
    return keras.Sequential([layers.Dense(32, activation="relu"), layers.Dense(WIDTH)])


CASES = [
    (style, between, policy)
    for style in ("functional", "sequential", "subclassed")
    for between in ("nothing", "dropout")
    for policy in ("mixed_float16", "mixed_bfloat16")
]


@pytest.mark.parametrize(
    ("style", "between", "policy"),
    [*CASES, ("functional", "a call in build", "mixed_float16")],
)
@pytest.mark.quick("functional-a call in build-*")
def test_the_sequential_inside_stays_in_half_precision(style, between, policy):
    with tfamp.scope(policy):
        is_built = between == "a call in build"
        block = BuiltByACall() if is_built else Encoder(between)
        head = layers.Dense(2, activation="softmax")
        parts = [Tokens(), block, layers.GlobalAveragePooling1D(), head]
        model = assembled(parts, style, (LENGTH,))
        model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).integers(0, VOCABULARY, (32, LENGTH))
    history = model.fit(x, x[:, 0] % 2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    half = policy.removeprefix("mixed_")
    assert {layer.compute_dtype for layer in block.ffn.layers} == {half}
    assert model.predict(x, verbose=0).dtype == "float32"
