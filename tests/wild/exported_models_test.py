"""Recurrent layers, masks, several inputs and odd names: what leaves answers alike."""

import importlib.util
import re

import keras
import numpy as np
import pytest
from keras import layers

import tfamp

PACKAGES = {
    "saved_model": (),
    "litert": ("ai_edge_litert", "ai_edge_quantizer"),
    "onnx": ("onnx", "tf2onnx", "onnxruntime"),
    "openvino": ("openvino", "nncf"),
}


def case(format, *values):
    """Parameters that need a format, which is the last of them."""
    is_there = all(map(importlib.util.find_spec, PACKAGES[format]))
    skip = pytest.mark.skipif(not is_there, reason=f"{format} is not installed")
    return pytest.param(*values, format, marks=skip)


FORMATS = list(map(case, PACKAGES))
# Of outputs around 1: sums of some dozens of products in another order.
CLOSE = 1e-5


def reviews(number=6, length=9, dtype="int32"):
    """Ids of words, with 0 behind the end of each text."""
    random = np.random.default_rng(1)
    x = random.integers(1, 40, (number, length)).astype(dtype)
    for row, end in zip(x, random.integers(2, length, number), strict=True):
        row[end:] = 0
    return x


def sentiment(recurrent, *, dtype="int32", length=9):
    """Whether a review is kind, as tutorials write it."""
    words = keras.Input((length,), dtype=dtype, name="words")
    x = layers.Embedding(40, 8, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(1)(recurrent(x)))


def tagger():
    """A tag for each word, from both sides."""
    words = keras.Input((9,), dtype="int32", name="words")
    x = layers.Embedding(40, 8, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return keras.Model(words, layers.Dense(3)(x))


MASKED = {
    "lstm": lambda: (sentiment(layers.LSTM(6)), reviews()),
    "tags": lambda: (tagger(), reviews()),
}


def answers_of(model, x):
    found = model.predict(x, verbose=0)
    return found if isinstance(found, dict) else {"": found}


def leaves_and_answers_alike(model, x, folder, format, **options):
    wanted = answers_of(model, x)
    loaded = tfamp.export(model, folder / "model", format=format, **options).load()
    found = loaded.predict(x)
    found = found if isinstance(found, dict) else {"": found}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=CLOSE, rtol=0)
    return loaded


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(case("onnx", name) for name in MASKED),
        case("saved_model", "tags"),
    ],
)
@pytest.mark.quick("lstm-onnx")
def test_masked_steps_are_left_out(name, format, tmp_path):
    keras.utils.set_random_seed(0)
    model, x = MASKED[name]()
    leaves_and_answers_alike(model, x, tmp_path, format)


@pytest.mark.parametrize("format", [case("litert"), case("openvino")])
def test_loops_are_written_out_for_runtimes_without_them(format, tmp_path):
    model = sentiment(layers.LSTM(6))
    leaves_and_answers_alike(model, reviews(), tmp_path, format)
    assert not model.layers[-2].unroll
    with pytest.raises(ValueError, match="'lstm.*unknown number of steps.*'onnx'"):
        open_ended = sentiment(layers.LSTM(6), length=None)
        tfamp.export(open_ended, tmp_path / "m", format=format)
    # Keras's own steps behind a mask, backwards, are wrong where they are written out.
    with pytest.raises(ValueError, match="answers otherwise than the model"):
        tfamp.export(tagger(), tmp_path / "m", format=format)


def house_prices():
    """Inputs and outputs that are named as columns of a table are."""
    size = keras.Input((2,), name="1. size")
    street = keras.Input((1,), dtype="int64", name="Street no.")
    where = layers.Flatten()(layers.Embedding(50, 3)(street))
    x = layers.Dense(8, activation="relu")(layers.Concatenate()([size, where]))
    price = layers.Dense(1, activation="softplus", name="price-eur")(x)
    sold = layers.Dense(1, activation="sigmoid", name="is-sold")(x)
    inputs = {"1. size": size, "Street no.": street}
    return keras.Model(inputs, {"price (EUR)": price, "is sold?": sold})


def houses():
    random = np.random.default_rng(3)
    size = random.uniform(0, 2, (40, 2)).astype("float32")
    return size, random.integers(0, 50, (40, 1))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.quick("onnx", "openvino")
def test_columns_keep_the_names_that_keras_has_for_them(format, tmp_path):
    keras.utils.set_random_seed(0)
    model = house_prices()
    size, street = houses()
    x = {"1. size": size, "Street no.": street}
    y = {"price (EUR)": np.ones((40, 1)), "is sold?": np.tile([[0], [1]], (20, 1))}
    model.compile("adam", {"price (EUR)": "mse", "is sold?": "binary_crossentropy"})
    loaded = leaves_and_answers_alike(
        model, x, tmp_path, format, calibration=x, validation=(x, y)
    )
    assert {spec.name for spec in loaded.signature.inputs} == {*x}
    assert {spec.name for spec in loaded.signature.outputs} == {*y}


@pytest.mark.slow
def test_state_from_call_to_call_is_refused_with_advice_that_works(tmp_path):
    keras.utils.set_random_seed(0)

    def build(is_stateful):
        x = keras.Input(batch_shape=(4, 6, 3))
        recurrent = layers.Bidirectional(layers.LSTM(5, stateful=is_stateful))
        return keras.Model(x, layers.Dense(1)(recurrent(x)))

    model = build(True)
    with pytest.raises(ValueError, match="stateful=False") as caught:
        tfamp.export(model, tmp_path / "m", format="saved_model")
    assert "set_weights(model.get_weights())" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    advised = build(False)
    advised.set_weights(model.get_weights())
    x = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
    leaves_and_answers_alike(advised, x, tmp_path, "saved_model")


def reshaped(batch):
    x = keras.Input(batch_shape=(batch, 4))
    return keras.Model(x, layers.Dense(2)(keras.ops.reshape(x, (batch, 2, 2))))


@pytest.mark.slow
def test_a_model_for_one_batch_size_is_refused_and_told_why(tmp_path):
    text = r"does not answer a batch of 1\b.*`shape=` in place of `batch_shape=`"
    with pytest.raises(ValueError, match=text):
        tfamp.export(reshaped(8), tmp_path / "m", format="saved_model")
    assert list(tmp_path.iterdir()) == []


def mails(layer):
    text = keras.Input((1,), dtype="string", name="mail")
    return keras.Model(text, layers.Dense(1)(layer(text)))


WORDS = {
    "vectorized": lambda: layers.TextVectorization(
        vocabulary=["win", "noon"], output_mode="multi_hot"
    ),
    "looked up": lambda: layers.StringLookup(
        vocabulary=["win", "noon"], output_mode="multi_hot"
    ),
    "hashed": lambda: layers.Hashing(num_bins=8, output_mode="multi_hot"),
}


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.parametrize("layer", WORDS.values(), ids=WORDS)
@pytest.mark.quick("vectorized-onnx", "looked up-litert")
def test_texts_are_refused_with_a_format_that_has_them(layer, format, tmp_path):
    with pytest.raises(ValueError, match="Export to 'saved_model'") as caught:
        tfamp.export(mails(layer()), tmp_path / "m", format=format)
    others = re.search("'(onnx|litert|openvino)'", str(caught.value))
    assert others is None  # which could not take them either
