"""`tfamp.export` and `tfamp.load_exported`: the same answers from each runtime."""

import concurrent.futures
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.serving.exports import exporter, writers
from tfamp.serving.exports.int8_layers import layers_kept
from tfamp.serving.runtimes import PACKAGES

L = keras.layers
X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
# Of the outputs' spread: 8 bits are 1/256 of a range of some deviations.
INT8 = 0.3


def mlp():
    return keras.Sequential(
        [
            keras.Input((8,), name="features"),
            L.Dense(64, activation="gelu"),
            L.Dense(64, activation="relu"),
            L.Dense(3, activation="softmax", name="answer"),
        ]
    )


def exported(model, path, format, **options):
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    return tfamp.export(model, path, format=format, **options)


def close(found, wanted, tolerance=1e-5):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("format", PACKAGES)
@pytest.mark.quick("onnx")
def test_float32_answers_as_the_model_does_in_each_thread(format, tmp_path):
    model = mlp()
    found = exported(model, tmp_path / "model", format)
    loaded = tfamp.load_exported(tmp_path / "model", threads=1)
    assert loaded.runtime == format == found.format
    assert loaded.signature.inputs[0].shape[0] is None
    wanted = model(X).numpy()

    def ask(number):
        size = 1 + number % 3  # a batch of another size resizes what is shared
        for _ in range(50):
            answer = loaded.predict(np.repeat(X[number : number + 1], size, axis=0))
            close(answer, np.repeat(wanted[number : number + 1], size, axis=0))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))


LOWER = (
    *("saved_model bfloat16", "litert float16", "onnx float16", "openvino float16"),
    *("litert int8 dynamic", "litert int8 static", "onnx int8 dynamic"),
    *("onnx int8 static", "openvino int8 static"),
)


@pytest.mark.parametrize("what", LOWER)
@pytest.mark.quick("onnx int8 dynamic")
def test_lower_dtypes_are_smaller_and_nearly_the_same(what, tmp_path):
    format, dtype, scheme = (*what.split(), None)[:3]
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(512, activation="relu"), L.Dense(256), L.Dense(3)]
    )
    # So many that those it is tried on, which gave no range, lie in that of the others.
    many = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    found = exported(
        model, tmp_path / "m", format, dtype=dtype, scheme=scheme, calibration=many
    )
    assert found.dtype == dtype
    part = 0.4 if dtype == "int8" else 0.7
    assert found.size_bytes < part * found.float32_bytes
    assert 0 < found.difference < INT8
    if dtype == "int8":
        assert list(found.kept) == [model.layers[-1].name]
    # ONNX Runtime takes one range for the activations of a batch: a neighbor counts.
    depends = (format, scheme) == ("onnx", "dynamic")
    assert found.load().is_by_example != depends


def dense_net():
    layers = [L.Dense(32, activation="relu", name=f"d{i}") for i in range(4)]
    return keras.Sequential([keras.Input((16,)), *layers, L.Dense(10, name="head")])


def plant(model):
    """Has one channel from d1 to d2 be larger, the function unchanged."""
    (kernel, bias), (taker, other) = (model.layers[i].get_weights() for i in (1, 2))
    factor = np.where(np.arange(32) == 3, 1000.0, 1.0)
    model.layers[1].set_weights([kernel * factor, bias * factor])
    model.layers[2].set_weights([taker / factor[:, np.newaxis], other])


SPOILT = {
    "onnx static": {"d1", "d2"},
    "litert dynamic": {"d2"},
    "openvino static": {"d1", "d2"},
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.quick("onnx static", "litert dynamic")
def test_layers_that_int8_spoils_are_found_and_stay_in_float32(how, tmp_path):
    format, scheme = how.split()
    keras.utils.set_random_seed(1)
    model = dense_net()
    plant(model)
    x = np.random.default_rng(0).normal(size=(700, 16)).astype("float32")
    y = model.predict(x, verbose=0).argmax(axis=1)
    found = exported(
        *(model, tmp_path / "model", format),
        dtype="int8",
        scheme=scheme,
        calibration=x[:64],
        validation=(x, y),
        tolerance=0.05,
        budget_seconds=0.001,
    )
    assert found.verdict.startswith("as good")
    assert {*found.kept} == {*SPOILT[how], "head"}
    assert "largest channel" in found.kept["d2"]
    answers = np.asarray(found.load().predict(x)).argmax(axis=1)
    assert np.mean(answers == y) > 0.95


def test_heads_stay_in_float32_unless_they_are_much_of_the_model():
    assert list(layers_kept(dense_net(), [])) == ["head"]
    alone = keras.Sequential([keras.Input((8,)), L.Dense(3)])
    assert layers_kept(alone, []) == {}


@pytest.mark.parametrize("is_frozen", [False, True], ids=["managed", "frozen"])
@pytest.mark.quick("managed")
def test_models_in_half_precision_leave_in_float32_and_stay_as_they_are(
    is_frozen, tmp_path
):
    model = mlp()
    tfamp.apply(model, "mixed_bfloat16")
    if is_frozen:
        model = tfamp.freeze(model, "bfloat16")
        loaded = tfamp.load_exported(model)
        assert loaded.runtime == "keras"
        close(loaded.predict(X), model(X).numpy(), 2e-2)
    model.compile("sgd", "mse")
    optimizer = model.optimizer
    before = [np.array(weight.value) for weight in model.weights]
    dtypes = [(layer.compute_dtype, layer.variable_dtype) for layer in model.layers]
    exported(model, tmp_path / "m", "saved_model")
    close(tfamp.load_exported(tmp_path / "m").predict(X), model(X).numpy(), 2e-2)
    assert model.optimizer is optimizer and model.compiled
    after = [(layer.compute_dtype, layer.variable_dtype) for layer in model.layers]
    assert after == dtypes
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(np.array(weight.value), value)


@pytest.mark.parametrize("format", PACKAGES)
@pytest.mark.quick("openvino")
def test_statistics_and_preprocessing_layers_come_along(format, tmp_path):
    random = np.random.default_rng(0)
    columns = {
        "pay": random.lognormal(size=200),
        "age": random.normal(40, 9, 200),
        "height": random.normal(5e4, 1, 200),  # its mean is no number of float32
    }
    columns = {name: value.astype(np.float32) for name, value in columns.items()}
    x = {name: value[:6, np.newaxis].copy() for name, value in columns.items()}
    x["pay"][2], x["age"][0] = np.nan, 1e6  # missing, and far beyond the clip
    statistics = tfamp.data.fit_statistics(columns)
    inputs = {name: keras.Input((1,), name=name) for name in columns}
    y = statistics.as_layer()(inputs)
    normalized = L.Normalization()
    normalized.adapt(random.normal(3.0, 2.0, (50, 3)))
    y = L.Concatenate()([normalized(y), L.Rescaling(0.5, -1.0)(y)])
    # A tensor that is held as it is, and too large to be written into the graph.
    y = L.Dense(512)(y) + keras.ops.arange(512, dtype="float32")
    model = keras.Model(inputs, L.Dense(3)(y))
    wanted = model.predict(x, verbose=0)
    assert np.isfinite(wanted).all()
    loaded = exported(model, tmp_path / "m", format).load()
    assert {spec.name for spec in loaded.signature.inputs} == columns.keys()
    np.testing.assert_allclose(loaded.predict(x), wanted, rtol=1e-4, atol=1e-3)


WRONG = {
    "format": ({"format": "onxx"}, "Did you mean 'onnx'?"),
    "dtype": ({"dtype": "flaot16"}, "Did you mean 'float16'?"),
    "no bfloat16": ({"format": "onnx", "dtype": "bfloat16"}, "['saved_model']"),
    "nan": (
        {"format": "onnx", "calibration": np.full((2, 8), np.nan, np.float32)},
        "16 numbers that are not finite in 'features'",
    ),
    "shape": (
        {"format": "onnx", "calibration": X[:, :4]},
        "of shape (32, 4); expected (None, 8)",
    ),
    "nowhere": ({"keep_float32": ["nowhere"]}, "`keep_float32` names 'nowhere'"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_exported_is_told_before_anything_is_written(
    options, text, tmp_path
):
    with pytest.raises(ValueError, match=re.escape(text)):
        tfamp.export(mlp(), tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_runtime_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tf2onnx", None)
    with pytest.raises(ImportError, match=r"pip install 'tfamp\[onnx\]'"):
        tfamp.export(mlp(), tmp_path / "m", format="onnx")
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_the_fastest_of_what_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("tf2onnx")
    monkeypatch.setattr(
        writers, "missing", lambda format: () if format == "onnx" else ("nothing",)
    )
    monkeypatch.setattr(exporter, "_MOST_SECONDS", 1.0)  # of timing
    model, passes = mlp(), []
    answers = model.predict(X, verbose=0).argmax(axis=1)

    def once():
        passes.append("read")
        yield X, answers

    spec = tf.TensorSpec((None, 8)), tf.TensorSpec((None,), "int64")
    found = tfamp.export(
        *(model, tmp_path / "m"),
        dtype="auto",
        calibration=X,
        validation=tf.data.Dataset.from_generator(once, output_signature=spec),
        tolerance=0.5,
    )
    assert len(passes) == 2  # for shapes, and for all candidates together
    outcomes = {each.name: each.outcome for each in found.tried}
    assert outcomes["litert float32"] == "left out"
    timed = {each.name: each.seconds for each in found.tried if each.seconds}
    (chosen,) = (name for name, outcome in outcomes.items() if outcome == "chosen")
    assert len(timed) == 3 and timed[chosen] < 1.1 * min(timed.values())
    (left,) = {each.reason for each in found.tried if "litert float32" == each.name}
    assert left == "nothing is not installed, `pip install 'tfamp[litert]'`"
    against = {each.against for each in found.parity.speedups}
    other = set() if found.dtype == "float32" else {"best float32 (onnx)"}
    assert against == {"SavedModel"} | other
    assert {each.batch_size for each in found.latency} == {1, 32}
    assert all(name in str(found) for name in against)
