"""Exports as people make them: odd models, odd labels, and no word home."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfamp
from tfamp.serving.runtimes import PACKAGES

ROOT = str(Path(__file__).parents[2])
# Of outputs around 1: sums of some dozens of products in another order.
CLOSE = 1e-5


def case(format, *values):
    """Parameters that need a format, which is the last of them."""
    is_there = all(map(importlib.util.find_spec, PACKAGES[format]))
    skip = pytest.mark.skipif(not is_there, reason=f"{format} is not installed")
    return pytest.param(*values, format, marks=skip)


FORMATS = list(map(case, PACKAGES))


def reviews(number=6, length=9):
    """Ids of words, with 0 behind the end of each text."""
    random = np.random.default_rng(1)
    x = random.integers(1, 40, (number, length)).astype("int32")
    for row, end in zip(x, random.integers(2, length, number), strict=True):
        row[end:] = 0
    return x


def sentiment(recurrent, length=9):
    """Whether a review is kind, as tutorials write it."""
    words = keras.Input((length,), dtype="int32", name="words")
    x = layers.Embedding(40, 8, mask_zero=True)(words)
    return keras.Model(words, layers.Dense(1)(recurrent(x)))


def tagger():
    """A tag for each word, from both sides."""
    words = keras.Input((9,), dtype="int32", name="words")
    x = layers.Embedding(40, 8, mask_zero=True)(words)
    x = layers.Bidirectional(layers.LSTM(5, return_sequences=True))(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    return keras.Model(words, layers.Dense(3)(x))


def leaves_and_answers_alike(model, x, folder, format, **options):
    wanted = model.predict(x, verbose=0)
    options["budget_seconds"] = 0.1  # of timing there is a part
    loaded = tfamp.export(model, folder / "model", format=format, **options).load()
    found = loaded.predict(x)
    if not isinstance(wanted, dict):
        found, wanted = {"": found}, {"": wanted}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=CLOSE, rtol=0)
    return loaded


@pytest.mark.parametrize(
    ("make", "format"),
    [
        case("onnx", lambda: sentiment(layers.LSTM(6))),
        case("onnx", tagger),
        case("saved_model", tagger),
    ],
    ids=["lstm-onnx", "tags-onnx", "tags-saved_model"],
)
@pytest.mark.quick("lstm-onnx")
def test_masked_steps_are_left_out(make, format, tmp_path):
    keras.utils.set_random_seed(0)
    leaves_and_answers_alike(make(), reviews(), tmp_path, format)


@pytest.mark.parametrize("format", [case("litert"), case("openvino")])
@pytest.mark.quick("litert")
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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.quick("onnx")
def test_columns_keep_the_names_that_keras_has_for_them(format, tmp_path):
    keras.utils.set_random_seed(0)
    model, random = house_prices(), np.random.default_rng(3)
    size = random.uniform(0, 2, (40, 2)).astype("float32")
    x = {"1. size": size, "Street no.": random.integers(0, 50, (40, 1))}
    y = {"price (EUR)": np.ones((40, 1)), "is sold?": np.tile([[0], [1]], (20, 1))}
    model.compile("adam", {"price (EUR)": "mse", "is sold?": "binary_crossentropy"})
    loaded = leaves_and_answers_alike(
        model, x, tmp_path, format, calibration=x, validation=(x, y)
    )
    assert {spec.name for spec in loaded.signature.inputs} == {*x}
    assert {spec.name for spec in loaded.signature.outputs} == {*y}


@pytest.mark.slow
def test_what_no_server_could_answer_is_refused_with_the_way_out(tmp_path):
    x = keras.Input(batch_shape=(4, 6, 3))
    stateful = layers.LSTM(5, stateful=True)(x)
    reshaped = keras.ops.reshape(x, (4, 3, 6))
    for made, text in ((stateful, "stateful=False"), (reshaped, "batch of 1\\b")):
        model = keras.Model(x, layers.Dense(1)(made))
        with pytest.raises(ValueError, match=text):
            tfamp.export(model, tmp_path / "m", format="saved_model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", FORMATS[1:])
@pytest.mark.quick("onnx")
def test_texts_are_refused_with_a_format_that_has_them(format, tmp_path):
    text = keras.Input((1,), dtype="string", name="mail")
    words = layers.StringLookup(vocabulary=["win"], output_mode="multi_hot")(text)
    model = keras.Model(text, layers.Dense(1)(words))
    with pytest.raises(ValueError, match="Export to 'saved_model'") as caught:
        tfamp.export(model, tmp_path / "m", format=format)
    others = re.search("'(onnx|litert|openvino)'", str(caught.value))
    assert others is None  # which could not take them either


def run(code, *arguments, **environ):
    """Runs a program in a process of its own, which has to end well."""
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    # Neither as a test nor in continuous integration would NNCF send anything.
    automatic = ("CI", "TF_BUILD", "JENKINS_URL", "NNCF_CI", "NNCF_DEV")
    env = {k: v for k, v in os.environ.items() if k not in automatic}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**env, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", **environ},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# A process of its own: what went wrong here ended the whole of Python.
TEXTS = """
import sys
import keras, numpy as np, tensorflow as tf, tfamp
from keras import layers

mails = np.array(["win money now", "meeting at noon", "money money", "see you"], object)
for seed in (1, 2):  # the model, and the one trained anew, to one path
    keras.utils.set_random_seed(seed)
    text = keras.Input((), dtype="string", name="mail")
    words = layers.TextVectorization(output_mode="multi_hot")
    words.adapt(mails)
    model = keras.Model(text, layers.Dense(1, activation="sigmoid")(words(text)))
    model.compile("adam", "binary_crossentropy")
    data = tf.data.Dataset.from_tensor_slices((mails, [1, 0, 1, 0])).batch(2)
    given = {"validation": data, "budget_seconds": 0.1}
    found = tfamp.export(model, sys.argv[1], format="saved_model", **given)
    assert found.parity is not None
    wanted = np.asarray(model(tf.constant(mails)))
    np.testing.assert_allclose(found.load().predict(mails), wanted, atol=1e-6)
    other = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    other.compile("sgd", "mse", jit_compile=True)
    other.fit(np.ones((8, 3)), np.ones((8, 1)), epochs=2, verbose=0)
"""


@pytest.mark.slow("a process for exports of two models")
def test_a_second_model_of_texts_and_xla_after_it_work(tmp_path):
    run(TEXTS, tmp_path / "spam")


# Written by an audit hook, which a process cannot take off again and its forks inherit.
HOOKED = """
import os, sys
log = open(sys.argv[1], "a", buffering=1)
WATCHED = ("os.fork", "socket.connect", "socket.getaddrinfo", "urllib.Request")
def hook(event, args):
    if event in WATCHED:
        log.write(f"{event} {args!r}"[:300] + chr(10))
        raise PermissionError("nothing leaves a test")
sys.addaudithook(hook)
import keras, numpy as np, tfamp
folder = sys.argv[2]
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype(int)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2, "softmax")])
for format in ("openvino", "onnx"):  # timed beside the others, it loads all of them
    found = tfamp.export(model, f"{folder}/{format}", format=format,
                         validation=(x, y), budget_seconds=0.2, write_failed=True)
    found.load().predict(x)
"""


@pytest.mark.slow("it starts processes")
def test_runtimes_open_no_connection_fork_nothing_and_write_nothing_at_home(tmp_path):
    pytest.importorskip("openvino_telemetry")
    pytest.importorskip("onnxruntime")
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    run(HOOKED, log, tmp_path, HOME=str(home))
    assert log.read_text() == ""
    left = [str(file.relative_to(home)) for file in home.rglob("*")]
    # Identifiers and statistics of the runtimes; Keras and Matplotlib keep settings.
    assert [name for name in left if "intel" in name or "Microsoft" in name] == []


TELLS_NOTHING = "tell nothing"
# Ten figures of each customer, and which of three plans they take by these.
CUSTOMERS = np.random.default_rng(0).normal(size=(1200, 10)).astype("float32")
PLANS = CUSTOMERS[:, :3].argmax(axis=1)


def linear(kernel, activation, loss):
    """Returns a model that has been told what it would learn."""
    dense = layers.Dense(10), layers.Dense(kernel.shape[1], activation=activation)
    model = keras.Sequential([keras.Input((10,)), *dense])
    model.set_weights([np.eye(10), np.zeros(10), kernel, np.zeros(kernel.shape[1])])
    model.compile("sgd", loss)
    return model


@pytest.fixture
def plans():
    return linear(4 * np.eye(10)[:, :3], "softmax", "sparse_categorical_crossentropy")


def gated(model, validation, folder, **options):
    # No other runtime is to be timed beside it, which is what the budget is for.
    options = {"format": "saved_model", "budget_seconds": 0.01, **options}
    return tfamp.export(model, folder / "m", validation=validation, **options)


def test_nothing_is_as_good_by_labels_in_another_order(plans, tmp_path):
    found = gated(plans, (CUSTOMERS, (PLANS + 1) % 3), tmp_path)
    assert found.verdict == "undecided"
    assert TELLS_NOTHING in found.parity.reason
    assert found.parity.metrics[0].name == "agreement with float32"


def test_losses_are_compared_where_targets_are_the_models_own(tmp_path):
    x = CUSTOMERS
    y = x[:, :3] @ np.float32([[3], [1], [0.1]])
    model = linear(np.eye(10)[:, :1] * 3 + np.eye(10)[:, 1:2], None, "mae")
    found = gated(model, (x, y), tmp_path)
    assert found.verdict.startswith("as good")
    (metric,) = found.parity.metrics
    assert metric.name == "loss"
    wanted = model.evaluate(x, y, verbose=0)
    assert metric.reference == pytest.approx(wanted, rel=1e-4)
    # Targets of other examples.
    found = gated(model, (x, np.roll(y, 7, axis=0)), tmp_path)
    assert found.verdict == "undecided"
    assert TELLS_NOTHING in found.parity.reason


def test_calibration_without_spread_is_warned_of(plans, tmp_path):
    pytest.importorskip("tf2onnx")
    given = {"format": "onnx", "dtype": "int8", "scheme": "static"}
    given["calibration"] = np.zeros((32, 10), "float32")
    with pytest.warns(UserWarning, match="1 different example among 32") as warned:
        found = gated(plans, None, tmp_path, **given)
    assert found.verdict == "undecided"
    assert any("tens of different training examples" in str(w.message) for w in warned)
    assert any(w.filename == __file__ for w in warned)
