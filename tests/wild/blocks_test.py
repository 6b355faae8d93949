"""Blocks without `build` that hold a Sequential, as examples on the web write them."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

VOCABULARY, LENGTH, WIDTH = 50, 12, 16

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


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
        parts = [layers.Dense(32, activation="relu"), layers.Dense(WIDTH)]
        self.ffn = keras.Sequential(parts)
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


def functional(block):
    inputs = keras.Input((LENGTH,))
    x = layers.GlobalAveragePooling1D()(block(Tokens()(inputs)))
    return keras.Model(inputs, layers.Dense(2, activation="softmax")(x))


def sequential(block):
    head = layers.Dense(2, activation="softmax")
    return keras.Sequential([Tokens(), block, layers.GlobalAveragePooling1D(), head])


class Classifier(keras.Model):
    def __init__(self, block):
        super().__init__()
        self.tokens = Tokens()
        self.block = block
        self.pool = layers.GlobalAveragePooling1D()
        self.head = layers.Dense(2, activation="softmax")

    def call(self, x):
        return self.head(self.pool(self.block(self.tokens(x))))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("between", ["nothing", "dropout"])
@pytest.mark.parametrize("style", [functional, sequential, Classifier])
@pytest.mark.quick("functional-nothing-mixed_float16")
def test_the_sequential_inside_stays_in_half_precision(style, between, policy):
    with tfamp.scope(policy):
        block = Encoder(between)
        model = style(block)
        model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).integers(0, VOCABULARY, (32, LENGTH))
    history = model.fit(x, x[:, 0] % 2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    half = policy.removeprefix("mixed_")
    assert {layer.compute_dtype for layer in block.ffn.layers} == {half}
    assert model.predict(x, verbose=0).dtype == "float32"


class BuiltByACall(layers.Layer):
    """Builds what it holds by calling it, as code from before Keras 3 does."""

    def __init__(self):
        super().__init__()
        parts = [layers.Dense(32, activation="relu"), layers.Dense(WIDTH)]
        self.ffn = keras.Sequential(parts)

    def build(self, input_shape):
        self.ffn(keras.ops.zeros((1, *input_shape[1:])))
        self.built = True

    def call(self, x):
        return x + self.ffn(x)


def test_a_sequential_that_build_calls_is_no_model_of_its_own():
    with tfamp.scope("mixed_float16"):
        block = BuiltByACall()
        model = functional(block)
        model.compile("adam", "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).integers(0, VOCABULARY, (32, LENGTH))
    model.fit(x, x[:, 0] % 2, verbose=0)
    assert [layer.compute_dtype for layer in block.ffn.layers] == ["float16"] * 2
