"""`tfamp.export` and `tfamp.load_exported`: the same answers from each runtime."""

import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.int8_test import dense_net, inputs_of, plant
from tfamp.serving.exports import exporter, writers
from tfamp.serving.runtimes import PACKAGES
from tfamp.serving.runtimes.signature import TensorSpec

L = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(40, 8)).astype(np.float32)
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


def lstm():
    return keras.Sequential([keras.Input((4, 2)), L.LSTM(8), L.Dense(3)])


def exported(model, path, format, **options):
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    return tfamp.export(model, path, format=format, **options)


def close(found, wanted, tolerance=1e-5):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("build", "format"),
    [*((mlp, each) for each in PACKAGES), (lstm, "onnx")],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.quick("mlp-onnx")
def test_float32_answers_as_the_model_does_in_each_thread(build, format, tmp_path):
    model = build()
    found = exported(model, tmp_path / "model", format)
    x = X if build is mlp else X.reshape(40, 4, 2)
    loaded = tfamp.load_exported(tmp_path / "model", threads=1)
    assert loaded.runtime == format == found.format
    assert loaded.signature.inputs[0].shape[0] is None
    wanted, wrong = model(x).numpy(), []
    close(loaded.predict(x), wanted)

    def ask(number):
        size = 1 + number % 3  # a batch of another size resizes what is shared
        for _ in range(50):
            answer = loaded.predict(np.repeat(x[number : number + 1], size, axis=0))
            if (
                answer.shape != (size, 3)
                or np.abs(answer - wanted[number]).max() > 1e-4
            ):
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


@pytest.mark.parametrize(
    ("format", "dtype", "scheme"),
    [
        ("saved_model", "bfloat16", None),
        ("saved_model", "float16", None),
        ("litert", "float16", None),
        ("litert", "int8", "dynamic"),
        ("litert", "int8", "static"),
        ("onnx", "float16", None),
        ("onnx", "int8", "dynamic"),
        ("onnx", "int8", "static"),
        ("openvino", "float16", None),
        ("openvino", "int8", "static"),
    ],
)
@pytest.mark.quick("onnx-int8-dynamic")
def test_lower_dtypes_are_smaller_and_nearly_the_same(format, dtype, scheme, tmp_path):
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


SPOILT = {
    "onnx dynamic": {"d2"},
    "onnx static": {"d1", "d2"},
    "litert dynamic": {"d2"},
    "litert static": {"d1", "d2"},
    "openvino static": {"d1", "d2"},
}


@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.quick("litert dynamic")
def test_layers_that_int8_spoils_are_found_and_stay_in_float32(how, tmp_path):
    format, scheme = how.split()
    keras.utils.set_random_seed(1)
    model = dense_net()
    plant(model, "d1", "d2")
    x = inputs_of(model, 700)
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
    assert {*found.kept} == {*SPOILT[how], "head"} and "largest channel" in found.kept[
        "d2"
    ]
    assert found.kept["head"].startswith("a head")
    record = json.loads((tmp_path / "model" / "export.json").read_text())
    assert record["kept"] == found.kept
    answers = np.asarray(found.load().predict(x)).argmax(axis=1)
    assert np.mean(answers == y) > 0.95


@pytest.mark.parametrize("how", ["managed", "frozen", "stock"])
@pytest.mark.quick("managed")
def test_models_in_half_precision_leave_in_float32_and_stay_as_they_are(how, tmp_path):
    if how == "stock":
        keras.config.set_dtype_policy("mixed_float16")
    try:
        model = mlp()
    finally:
        keras.config.set_dtype_policy("float32")
    if how == "managed":
        tfamp.apply(model, "mixed_bfloat16")
    elif how == "frozen":
        model = tfamp.freeze(model, "bfloat16")
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
@pytest.mark.quick("onnx")
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
    parts = [normalized(y), L.Rescaling(0.5, -1.0)(y)]
    if format != "onnx":  # it has no operation for that, and says so
        parts.append(L.Rescaling(1.0)(L.Discretization([-1.0, 0.0])(y[:, :1])))
    y = L.Concatenate()(parts)
    # A tensor that is held as it is, and too large to be written into the graph.
    y = L.Dense(512)(y) + keras.ops.arange(512, dtype="float32")
    model = keras.Model(inputs, L.Dense(3)(y))
    # Keras 3.10's `Discretization` answers otherwise eagerly than in a graph.
    wanted = model.predict(x, verbose=0)
    assert np.isfinite(wanted).all()
    loaded = exported(model, tmp_path / "m", format).load()
    assert {spec.name for spec in loaded.signature.inputs} == columns.keys()
    np.testing.assert_allclose(loaded.predict(x), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("format", ["onnx", "litert"])
@pytest.mark.quick("litert")
def test_exports_run_without_tensorflow(format, tmp_path):
    exported(mlp(), tmp_path / "m", format)
    code = (
        "import sys, numpy, tfamp; "
        f"tfamp.load_exported({str(tmp_path / 'm')!r})"
        ".predict(numpy.zeros((2, 8), 'float32')); "
        "print([n for n in ('tensorflow', 'keras') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip().endswith("[]"), done.stderr


def test_a_saved_model_stores_each_weight_once(tmp_path):
    model = keras.Sequential([keras.Input((500,)), L.Dense(1000)])
    found = exported(model, tmp_path / "m", "saved_model")
    assert found.size_bytes < 1.05 * 4 * 501_000


def test_keras_models_frozen_ones_and_files_are_loaded_as_exports_are(tmp_path):
    keras.utils.set_random_seed(0)
    model = mlp()
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((40, 3)), verbose=0)  # now a dict has layers as keys
    close(tfamp.load_exported(model)(X), model.predict(X, verbose=0), 1e-6)
    frozen = tfamp.freeze(model)
    wanted = frozen.predict(X, verbose=0)
    frozen.save(tmp_path / "frozen.keras")
    for source in (frozen, tmp_path / "frozen.keras"):
        loaded = tfamp.load_exported(source)
        assert loaded.runtime == "keras"
        assert loaded.signature.inputs == (
            TensorSpec("features", (None, 8), "float32"),
        )
        for size in (1, 6):
            # Another graph may round sums of bfloat16 in another order.
            close(loaded.predict(X[:size]), wanted[:size], 2**-7)
    with pytest.raises(TypeError, match="expected a `keras.Model`"):
        tfamp.load_exported(3)


WRONG = {
    "format": ({"format": "onxx"}, ValueError, "Did you mean 'onnx'?"),
    "dtype": ({"dtype": "flaot16"}, ValueError, "Did you mean 'float16'?"),
    "no bfloat16": (
        {"format": "onnx", "dtype": "bfloat16"},
        *(ValueError, "['saved_model']"),
    ),
    "scheme": (
        {"format": "openvino", "dtype": "int8", "scheme": "dynamic"},
        *(ValueError, "Format 'openvino' has no int8 dynamic, or no runtime"),
    ),
    "uncalibrated": (
        {"format": "onnx", "dtype": "int8", "scheme": "static"},
        *(ValueError, "there is no `calibration`"),
    ),
    "nan": (
        {"format": "onnx", "calibration": np.full((2, 8), np.nan, np.float32)},
        *(ValueError, "16 numbers that are not finite in 'features'"),
    ),
    "shape": (
        {"format": "onnx", "calibration": X[:, :4]},
        *(ValueError, "of shape (32, 4); expected (None, 8)"),
    ),
    "keep": ({"keep_float32": "dense"}, TypeError, "Pass `['dense']`"),
    "nowhere": (
        {"keep_float32": ["nowhere"]},
        *(ValueError, "`keep_float32` names 'nowhere'"),
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_exported_is_told_before_anything_is_written(
    options, error, text, tmp_path
):
    with pytest.raises(error, match=re.escape(text)):
        tfamp.export(mlp(), tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["tf2onnx", "onnxruntime"])
def test_a_missing_runtime_names_the_extra(package, tmp_path, monkeypatch):
    for name in ("onnx", "tf2onnx", "onnxruntime"):
        if name != package:
            pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'tfamp\[onnx\]'"):
        tfamp.export(mlp(), tmp_path / "m", format="onnx")
    assert list(tmp_path.iterdir()) == []


CHANGED = {
    "of format version 99": lambda record, path: record.update(format_version=99),
    "is damaged": lambda record, path: record.pop("files"),
    "lies outside of": lambda record, path: record["files"].update({"../other": "0"}),
    "is not named by export.json": lambda record, path: (
        path / "variables" / "more"
    ).write_text(""),
    "is missing": lambda record, path: (path / "saved_model.pb").unlink(),
    "is changed: its SHA-256 is": lambda record, path: (
        path / "saved_model.pb"
    ).write_text("other"),
    "": lambda record, path: record.update(execution={}),  # of an earlier version
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "m"
    tfamp.export(mlp(), path, format="saved_model")
    return path


@pytest.mark.parametrize("text", CHANGED)
def test_folders_that_are_not_as_written_are_refused(text, plain, tmp_path):
    path = tmp_path / "m"
    shutil.copytree(plain, path)
    record = json.loads((path / "export.json").read_text())
    CHANGED[text](record, path)
    (path / "export.json").write_text(json.dumps(record))
    if not text:
        assert tfamp.load_exported(path).predict(X).shape == (40, 3)
        return
    with pytest.raises(ValueError, match=re.escape(text)):
        tfamp.load_exported(path)


def test_a_file_that_answers_otherwise_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(exporter, "_MAX_FLOAT32_DIFFERENCE", -1.0)
    with pytest.raises(ValueError, match="answers otherwise than the model"):
        tfamp.export(mlp(), tmp_path / "m", format="saved_model")
    assert not (tmp_path / "m").exists()


def test_auto_takes_the_fastest_of_what_is_installed(tmp_path, monkeypatch):
    pytest.importorskip("tf2onnx")
    monkeypatch.setattr(
        writers, "missing", lambda format: () if format == "onnx" else ("nothing",)
    )
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
        budget_seconds=20,
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
