"""Clones, configurations, files and pickles of models are what the original is."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from tests.wild.checking import COPIES, by_file, facts

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")
TOKENS = np.arange(12).reshape(2, 6) % 9


def functional():
    inputs = keras.Input((6, 8))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(inputs)
    x = layers.TimeDistributed(layers.Dense(8, activation="softmax"))(x)
    x = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.Dense(8, dtype="float32", name="own")(x)
    x = layers.Softmax()(layers.LayerNormalization()(x))
    x = layers.Dense(1)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, layers.Activation("sigmoid")(x))


def sequential():
    parts = [layers.Dense(8, activation="softmax"), layers.UnitNormalization()]
    inner = keras.Sequential([keras.Input((6, 8)), *parts])
    head = layers.Dense(1, activation="sigmoid")
    return keras.Sequential([keras.Input((6, 8)), inner, layers.Flatten(), head])


def token_model():
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Dense(8)(layers.Embedding(9, 8)(tokens))
    x = layers.LayerNormalization()(layers.Softmax()(x))
    return keras.Model(tokens, layers.Dense(3, activation="softmax")(x))


def with_lora():
    model = token_model()
    for layer in (model.layers[1], model.layers[2]):
        layer.enable_lora(2)
        layer.set_weights([np.ones_like(w) * 0.3 for w in layer.get_weights()])
    return model


def quantized():
    model = token_model()
    model.quantize("int8")
    return model


# Keras says so of each layer without a kernel, and of optimizers ahead of a step.
NO_STEP = "ignore:Skipping variable loading for optimizer:UserWarning"
NO_QUANTIZE = "ignore:Layer .* does not have a `quantize` method:UserWarning"
MODELS = {
    "functional": (functional, "mixed_float16", X),
    "sequential": (sequential, "mixed_float16", X),
    "LoRA": (with_lora, "mixed_float16", TOKENS),
    # Keras refuses to quantize layers that compute in float16.
    "int8": (quantized, "mixed_bfloat16", TOKENS),
}


@pytest.mark.filterwarnings(NO_QUANTIZE, NO_STEP)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize(("make", "policy", "x"), MODELS.values(), ids=MODELS)
@pytest.mark.quick(
    *("sequential-plain-*", "functional-compiled-clone_model"),
    *("int8-plain-*", "LoRA-compiled-clone_model"),
)
def test_a_copy_has_the_dtypes_and_predictions_of_the_original(
    make, policy, x, is_compiled, way, tmp_path
):
    with tfamp.scope(policy):
        model = make()
        if is_compiled:
            model.compile("adam", "mse")
        same = COPIES[way](model, tmp_path)
        same.set_weights(model.get_weights())
    assert facts(same) == facts(model)
    modes = [getattr(layer, "quantization_mode", None) for layer in model.layers]
    found = [getattr(layer, "quantization_mode", None) for layer in same.layers]
    assert found == modes
    np.testing.assert_array_equal(same(x), model(x))
    assert same(x).dtype == "float32"


@pytest.mark.filterwarnings(NO_QUANTIZE)
@pytest.mark.parametrize("when", ["before its first use", "compiled"])
def test_a_quantized_head_is_read_as_quantized(when):
    with tfamp.scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((6,)), layers.Embedding(9, 8)])
        model.add(layers.Dense(3))
        if when == "compiled":
            model.compile("sgd", "mse")
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    expected = plain(TOKENS)
    model.quantize("int8")
    head = model.layers[-1]
    # int8 has 127 steps, and bfloat16 in between rounds to 1 of 256.
    limit = 0.02 * np.abs(expected).max()
    np.testing.assert_allclose(model(TOKENS), expected, atol=limit)
    assert (head.quantization_mode, head.compute_dtype) == ("int8", "float32")


def is_third(layer):
    return layer.name == "third"


@pytest.mark.quick("deepcopy")
@pytest.mark.parametrize("way", ["file", "deepcopy"])
def test_layers_stay_in_float32_under_a_new_head(way, tmp_path):
    keep = ["default", "second", is_third]
    with tfamp.scope("mixed_float16", keep_float32=keep):
        names = ("first", "second", "third")
        parts = [layers.Dense(8, name=name) for name in names]
        parts.insert(1, layers.UnitNormalization())
        head = layers.Dense(1, activation="sigmoid", name="head")
        model = keras.Sequential([keras.Input((8,)), *parts, head])
        model.compile("adam", "binary_crossentropy")
    tuned = COPIES[way](model, tmp_path)
    tuned.pop()
    tuned.add(layers.Dense(3, activation="softmax", name="new_head"))
    tuned.compile("adam", "sparse_categorical_crossentropy")
    x, y = np.ones((4, 8), "float32"), np.zeros(4, "int32")
    assert np.isfinite(tuned.fit(x, y, verbose=0).history["loss"]).all()
    dtypes = [row.compute_dtype for row in tfamp.assignment(tuned)]
    assert dtypes == ["float16", "float16", *["float32"] * 4]


@keras.saving.register_keras_serializable("clones")
class Block(layers.Layer):
    """A feed-forward block around a Sequential, which may be an output of a model."""

    def __init__(self, **options):
        super().__init__(**options)
        self.norm = layers.LayerNormalization()
        self.inner = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])

    def call(self, x):
        hidden = self.norm(x)
        return hidden + self.inner(hidden)


@pytest.mark.quick("mixed_float16")
@pytest.mark.filterwarnings("ignore:`build[(][)]` was called on layer")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_sequential_in_a_block_that_is_an_output_takes_inputs_unrounded(
    policy, tmp_path
):
    with tfamp.scope(policy):
        inputs = keras.Input((4,))
        hidden = Block()(layers.Dense(4)(inputs))
        model = keras.Model(inputs, [layers.Dense(3)(hidden), hidden])
    model.compile("sgd", ["mse", None])
    again = by_file(model, tmp_path)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    outputs = model.predict(x, verbose=0), again.predict(x, verbose=0)
    for ours, loaded in zip(*outputs, strict=True):
        np.testing.assert_array_equal(ours, loaded)
    assert model.layers[2].inner.inputs[0].dtype == "float32"


@pytest.mark.parametrize("way", ["apply", "keep"])
def test_a_block_that_becomes_float32_after_it_was_built_rounds_nothing(way):
    x = np.linspace(-1.0, 1.0, 16, dtype="float32").reshape(4, 4)
    keras.utils.set_random_seed(0)
    exact = Block(name="block")
    exact(x)
    keras.utils.set_random_seed(0)
    with tfamp.scope("mixed_bfloat16"):
        inputs = keras.Input((4,))
        model = keras.Model(inputs, Block(name="block")(inputs))
    if way == "apply":
        tfamp.apply(model, "mixed_bfloat16", keep_float32=[Block])
    model.compile("sgd", "mse")  # the block is the head
    np.testing.assert_allclose(model.predict(x, verbose=0), exact(x), rtol=1e-6)


@keras.saving.register_keras_serializable("clones")
class Scaled(keras.Model):
    """Multiplies by a float32 tensor, between sublayers without weights as yet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table, self.last = layers.Embedding(20, 8), layers.Dense(2)

    def call(self, ids):
        return self.last(self.table(ids) * tf.math.sqrt(8.0))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_model_first_called_eagerly_is_loaded_with_its_weights(policy, tmp_path):
    with tfamp.scope(policy):
        model = Scaled()
    expected = model(TOKENS)
    np.testing.assert_array_equal(by_file(model, tmp_path)(TOKENS), expected)


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
    texts = tf.constant([["a"], ["cat"]])
    np.testing.assert_array_equal(by_file(model, tmp_path)(texts), model(texts))
