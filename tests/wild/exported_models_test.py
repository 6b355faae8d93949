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


def readings():
    """Sensors whose missing rows are all 0."""
    x = np.random.default_rng(2).normal(size=(5, 7, 3)).astype("float32")
    x[:2, 4:] = 0
    return x


def sensors():
    return keras.Sequential(
        [
            keras.Input((7, 3)),
            layers.Masking(),
            layers.GRU(6, return_sequences=True),
            layers.LSTM(4, go_backwards=True),
            layers.Dense(2),
        ]
    )


MASKED = {
    "lstm": lambda: (sentiment(layers.LSTM(6)), reviews()),
    "gru": lambda: (sentiment(layers.GRU(6)), reviews()),
    "old gru": lambda: (sentiment(layers.GRU(6, reset_after=False)), reviews()),
    "simple": lambda: (sentiment(layers.SimpleRNN(6)), reviews()),
    "both ways": lambda: (sentiment(layers.Bidirectional(layers.LSTM(6))), reviews()),
    "cells": lambda: (
        sentiment(layers.RNN([layers.LSTMCell(5), layers.GRUCell(4)])),
        reviews(),
    ),
    "int64": lambda: (
        sentiment(layers.LSTM(6), dtype="int64"),
        reviews(dtype="int64"),
    ),
    "tags": lambda: (tagger(), reviews()),
    "masking layer": lambda: (sensors(), readings()),
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


# LiteRT and OpenVINO get layers that are unrolled, ONNX the loop.
UNROLLED = ("old gru", "tags", "masking layer")


@pytest.mark.parametrize(
    ("name", "format"),
    [
        *(case("onnx", name) for name in MASKED),
        *(case(format, name) for name in UNROLLED for format in ("litert", "openvino")),
        case("saved_model", "tags"),
    ],
)
@pytest.mark.quick("lstm-onnx", "tags-litert")
def test_masked_steps_are_left_out_by_every_runtime(name, format, tmp_path):
    keras.utils.set_random_seed(0)
    model, x = MASKED[name]()
    leaves_and_answers_alike(model, x, tmp_path, format)


@pytest.mark.slow
def test_masked_texts_of_any_length_leave_as_onnx(tmp_path):
    pytest.importorskip("tf2onnx")
    keras.utils.set_random_seed(0)
    model = sentiment(layers.LSTM(6), length=None)
    loaded = leaves_and_answers_alike(model, reviews(), tmp_path, "onnx")
    longer = reviews(3, 17)
    wanted = model.predict(longer, verbose=0)
    np.testing.assert_allclose(loaded.predict(longer), wanted, atol=CLOSE)


def house_prices(*, as_dict):
    """Inputs and outputs that are named as columns of a table are."""
    size = keras.Input((2,), name="1. size")
    street = keras.Input((1,), dtype="int64", name="Street no.")
    where = layers.Flatten()(layers.Embedding(50, 3)(street))
    x = layers.Dense(8, activation="relu")(layers.Concatenate()([size, where]))
    price = layers.Dense(1, activation="softplus", name="price-eur")(x)
    sold = layers.Dense(1, activation="sigmoid", name="is-sold")(x)
    if as_dict:
        inputs = {"1. size": size, "Street no.": street}
        return keras.Model(inputs, {"price (EUR)": price, "is sold?": sold})
    return keras.Model([size, street], [price, sold])


def houses():
    random = np.random.default_rng(3)
    size = random.uniform(0, 2, (40, 2)).astype("float32")
    return size, random.integers(0, 50, (40, 1))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.quick("onnx", "openvino")
def test_columns_keep_the_names_that_keras_has_for_them(format, tmp_path):
    keras.utils.set_random_seed(0)
    model = house_prices(as_dict=True)
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
def test_labels_under_keras_names_are_the_ones_that_the_gate_compares(tmp_path):
    pytest.importorskip("tf2onnx")
    keras.utils.set_random_seed(0)
    model = house_prices(as_dict=False)
    size, street = houses()
    x = {"1. size": size, "Street no.": street}  # as `fit` takes a model of a list
    # A model that knows no more than the mean is compared with float32 alone.
    sold = (size[:, :1] > np.median(size[:, :1])).astype("int64")
    y = {"price-eur": 2 * size[:, :1], "is-sold": sold}
    losses = {"price-eur": "mse", "is-sold": "binary_crossentropy"}
    model.compile(keras.optimizers.Adam(0.05), losses)
    model.fit(x, y, epochs=60, verbose=0)
    found = tfamp.export(
        model, tmp_path / "m", format="onnx", calibration=x, validation=(x, y)
    )
    compared = {change.output: change.name for change in found.parity.metrics}
    assert compared == {"price-eur": "loss", "is-sold": "accuracy"}
    wanted = model.predict(x, verbose=0)
    for given in (x, [size, street]):
        answers = found.load().predict(given)
        for name, value in zip(y, wanted, strict=True):
            np.testing.assert_allclose(answers[name], value, atol=CLOSE)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.quick("openvino")
def test_an_input_may_be_handed_through_beside_the_answer(format, tmp_path):
    keras.utils.set_random_seed(0)
    x, key = keras.Input((4,), name="x"), keras.Input((1,), dtype="int32", name="key")
    score = layers.Dense(1)(x)
    model = keras.Model(
        {"x": x, "key": key}, {"score": score, "of": layers.Identity()(key)}
    )
    given = {
        "x": np.random.default_rng(0).normal(size=(3, 4)).astype("float32"),
        "key": np.array([[16777217], [2], [3]], "int32"),
    }
    loaded = leaves_and_answers_alike(model, given, tmp_path, format)
    np.testing.assert_array_equal(loaded.predict(given)["of"], given["key"])


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU])
def test_state_from_call_to_call_is_refused_with_advice_that_works(
    kind, format, tmp_path
):
    keras.utils.set_random_seed(0)

    def build(is_stateful):
        x = keras.Input(batch_shape=(4, 6, 3))
        recurrent = layers.Bidirectional(kind(5, stateful=is_stateful))
        return keras.Model(x, layers.Dense(1)(recurrent(x)))

    model = build(True)
    with pytest.raises(ValueError, match="stateful=False") as caught:
        tfamp.export(model, tmp_path / "m", format=format)
    assert "set_weights(model.get_weights())" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if (kind, format) == (layers.LSTM, "saved_model"):
        advised = build(False)
        advised.set_weights(model.get_weights())
        x = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
        loaded = leaves_and_answers_alike(advised, x, tmp_path, format)
        np.testing.assert_allclose(
            loaded.predict(x), model.predict(x, batch_size=4, verbose=0), atol=CLOSE
        )


def anchored(batch):
    """Adds something that knows how many examples there are."""
    x = keras.Input(batch_shape=(batch, 4))
    there = keras.ops.convert_to_tensor(np.ones((batch, 4), "float32"))
    return keras.Model(x, layers.Dense(2)(x + there))


def reshaped(batch):
    x = keras.Input(batch_shape=(batch, 4))
    return keras.Model(x, layers.Dense(2)(keras.ops.reshape(x, (batch, 2, 2))))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("build", [anchored, reshaped])
def test_a_model_for_one_batch_size_is_refused_and_told_why(build, format, tmp_path):
    text = r"made for batches of 8\b.*`shape=` in place of `batch_shape=`"
    with pytest.raises(ValueError, match=text):
        tfamp.export(build(8), tmp_path / "m", format=format)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_fixed_batch_that_no_layer_needs_is_given_up(tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input(batch_shape=(8, 4, 3))
    model = keras.Model(x, layers.Dense(2)(layers.LSTM(3)(x)))
    given = np.random.default_rng(0).normal(size=(8, 4, 3)).astype("float32")
    loaded = leaves_and_answers_alike(model, given, tmp_path, "saved_model")
    assert loaded.predict(given[:3]).shape == (3, 2)


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
