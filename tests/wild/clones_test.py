"""Clones and configurations, made while tfamp is enabled, are what the original is."""

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tests.wild.checking import COPIES, by_file

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


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


def by_stock_file(model, folder):
    model.save(folder / "model.keras")
    return keras.saving.load_model(folder / "model.keras")


WAYS = {
    "clone_model": lambda model, _: keras.models.clone_model(model),
    "config": lambda model, _: type(model).from_config(model.get_config()),
    "json": lambda model, _: keras.models.model_from_json(model.to_json()),
    "stock file": by_stock_file,
    **COPIES,
}


def facts(model):
    return [
        (row.path.split("/")[-1].rstrip("_0123456789"), row.class_name)
        + (row.compute_dtype, row.variable_dtype, row.rule.split("'")[0])
        for row in tfamp.assignment(model)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("make", [functional, sequential])
@pytest.mark.quick("sequential-plain-*", "functional-compiled-clone_model")
def test_a_copy_has_the_dtypes_and_predictions_of_the_original(
    make, is_compiled, way, tmp_path
):
    x = np.random.default_rng(0).normal(size=(4, 6, 8)).astype("float32")
    with tfamp.scope("mixed_float16"):
        model = make()
        if is_compiled:
            model.compile("adam", "binary_crossentropy")
        same = WAYS[way](model, tmp_path)
        same.set_weights(model.get_weights())
    assert facts(same) == facts(model)
    np.testing.assert_array_equal(same(x), model(x))
    assert same(x).dtype == "float32"


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
# Keras refuses to quantize layers that compute in float16.
CHANGED = {"LoRA": (with_lora, "mixed_float16"), "int8": (quantized, "mixed_bfloat16")}


@pytest.mark.filterwarnings(NO_QUANTIZE, NO_STEP)
@pytest.mark.parametrize("way", [*WAYS, "file"])
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@pytest.mark.parametrize("make, policy", CHANGED.values(), ids=CHANGED)
@pytest.mark.quick("int8-plain-*", "LoRA-compiled-clone_model")
def test_a_copy_with_lora_or_int8_is_the_same(make, policy, is_compiled, way, tmp_path):
    tokens = np.arange(12).reshape(2, 6) % 9
    with tfamp.scope(policy):
        model = make()
        if is_compiled:
            model.compile("adam", "mse")
        same = {**WAYS, "file": by_file}[way](model, tmp_path)
        same.set_weights(model.get_weights())
    np.testing.assert_array_equal(same(tokens), model(tokens))
    assert facts(same) == facts(model)
    assert same(tokens).dtype == "float32"


@pytest.mark.filterwarnings(NO_QUANTIZE)
@pytest.mark.parametrize("when", ["before its first use", "compiled"])
def test_a_quantized_head_is_read_as_quantized(when):
    tokens = np.arange(12).reshape(2, 6) % 9
    with tfamp.scope("mixed_bfloat16"):
        model = keras.Sequential([keras.Input((6,)), layers.Embedding(9, 8)])
        model.add(layers.Dense(3))
        if when == "compiled":
            model.compile("sgd", "mse")
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    expected = plain(tokens)
    model.quantize("int8")
    head = model.layers[-1]
    # int8 has 127 steps, and bfloat16 in between rounds to 1 of 256.
    np.testing.assert_allclose(
        model(tokens), expected, atol=0.02 * np.abs(expected).max()
    )
    assert head.quantization_mode == "int8"
    assert head.compute_dtype == "float32"
