"""`tfamp.export` and `tfamp.load_exported`: the same answers from each runtime."""

import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import tfamp
from tfamp.serving.exports.candidates import MAX_FLOAT32_DIFFERENCE, WRITERS
from tfamp.serving.exports.int8_layers import layers_kept
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import float32_copy, unroll
from tfamp.serving.exports.tracing import trace

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


def two_ways():
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    hidden = L.Dense(4)(L.Add()([a, b]))
    return keras.Model({"b": b, "a": a}, {"u": L.Dense(2)(hidden), "v": hidden})


class Subclassed(keras.Model):
    """Takes a dict, and was called."""

    def __init__(self):
        super().__init__()
        self.first, self.second = L.Dense(4), L.Dense(2)

    def call(self, inputs):
        return self.second(self.first(inputs["p"]) + inputs["q"])


def exported(model, path, format, **options):
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    return tfamp.export(model, path, format=format, **options)


def close(found, wanted, tolerance=1e-5):
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=tolerance, rtol=0)


@pytest.mark.slow(why="processes; the anchor is one format")
@pytest.mark.parametrize("format", PACKAGES)
@pytest.mark.parametrize("build", [mlp, lstm], ids=["mlp", "lstm"])
@pytest.mark.quick("mlp-onnx")
def test_float32_answers_as_the_model_does(build, format, tmp_path):
    model = build()
    found = exported(model, tmp_path / "model", format)
    x = X if build is mlp else X.reshape(40, 4, 2)
    loaded = tfamp.load_exported(tmp_path / "model", threads=1)
    assert loaded.runtime == format == found.format
    assert loaded.signature.inputs[0].shape[0] is None
    for size in (1, 40):
        close(loaded.predict(x[:size]), model(x[:size]).numpy())


@pytest.mark.slow(why="each runtime's quantiser; the anchor is one of them")
@pytest.mark.parametrize(
    ("format", "dtype", "scheme"),
    [
        ("saved_model", "bfloat16", None),
        ("saved_model", "float16", None),
        ("litert", "float16", None),
        ("litert", "int8", "dynamic"),
        ("litert", "int8", "static"),
        ("litert", "int8", "weights"),
        ("onnx", "float16", None),
        ("onnx", "int8", "dynamic"),
        ("onnx", "int8", "static"),
        ("openvino", "float16", None),
        ("openvino", "int8", "weights"),
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
    if dtype.startswith("int"):
        assert list(found.kept) == [model.layers[-1].name]


@pytest.mark.slow(why="processes")
def test_dicts_outputs_and_subclassed_models_come_along(tmp_path):
    model, sub = two_ways(), Subclassed()
    x = {"a": X[:, :4], "b": X[:, 4:]}
    exported(model, tmp_path / "two", "onnx")
    found = tfamp.load_exported(tmp_path / "two").predict(x)
    assert list(found) == ["u", "v"]
    for name, wanted in model(x).items():
        close(found[name], wanted.numpy())
    inputs = {"p": X[:, :3], "q": X[:, 4:]}
    wanted = sub(inputs).numpy()
    exported(sub, tmp_path / "sub", "onnx")
    close(tfamp.load_exported(tmp_path / "sub").predict(inputs), wanted)


@pytest.mark.slow(why="processes")
@pytest.mark.parametrize("how", ["managed", "frozen", "stock"])
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
    exported(model, tmp_path / "m", "onnx")
    close(tfamp.load_exported(tmp_path / "m").predict(X), model(X).numpy(), 2e-2)
    assert model.optimizer is optimizer and model.compiled
    after = [(layer.compute_dtype, layer.variable_dtype) for layer in model.layers]
    assert after == dtypes
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(np.array(weight.value), value)


@pytest.mark.parametrize("format", ["onnx", "litert"])
@pytest.mark.slow(why="processes")
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
    request = Request("saved_model", "float32")
    WRITERS["saved_model"](trace(float32_copy(model)), tmp_path, request)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*"))
    assert size < 1.05 * 4 * 501_000


def test_unrolled_layers_answer_the_same():
    model = lstm()
    copy = float32_copy(model)
    assert unroll(copy) == ()
    x = X.reshape(40, 4, 2)
    close(copy(x).numpy(), model(x).numpy(), 1e-6)
    free = keras.Sequential([keras.Input((None, 2)), L.LSTM(4, name="words")])
    assert unroll(free) == ("words",)


def test_operations_are_named_after_their_layers():
    block = keras.Sequential([keras.Input((8,)), L.Dense(4, name="inner")], name="b")
    model = keras.Sequential([keras.Input((8,)), block, L.Dense(2, name="outer")])
    traced = trace(model)
    products = [o for o in traced.function.graph.get_operations() if o.type == "MatMul"]
    assert [traced.path_of(o.name) for o in products] == ["b/inner", "outer"]
    assert traced.path_of("StatefulPartitionedCall/b/inner/x/MatMul") == "b/inner"
    assert traced.path_of("elsewhere/MatMul") is None


def test_heads_stay_in_float32_unless_they_are_much_of_the_model():
    model = mlp()
    assert list(layers_kept(model, [])) == ["answer"]
    alone = keras.Sequential([keras.Input((8,)), L.Dense(3)])
    assert layers_kept(alone, []) == {}
    with pytest.raises(ValueError, match=re.escape("`keep_float32` names 'nowhere'")):
        layers_kept(model, ["nowhere"])


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"format": "onxx"}, ValueError, "Did you mean 'onnx'?"),
        ({"dtype": "flaot16"}, ValueError, "Did you mean 'float16'?"),
        ({"format": "onnx", "dtype": "bfloat16"}, ValueError, "['saved_model']"),
        (
            {"format": "openvino", "dtype": "int8", "scheme": "dynamic"},
            ValueError,
            "`scheme` is 'dynamic', and 'openvino' has int8 as ('weights', 'static')",
        ),
        (
            {"format": "onnx", "dtype": "int8", "scheme": "static"},
            ValueError,
            "there is no `calibration`",
        ),
        (
            {"format": "onnx", "calibration": np.full((2, 8), np.nan, np.float32)},
            ValueError,
            "16 numbers that are not finite in 'features'",
        ),
        (
            {"format": "onnx", "calibration": X[:, :4]},
            ValueError,
            "of shape (32, 4); expected (None, 8)",
        ),
        ({"keep_float32": "dense"}, TypeError, "Pass `['dense']`"),
    ],
    ids=["format", "dtype", "bf16", "scheme", "uncalibrated", "nan", "shape", "keep"],
)
def test_what_cannot_be_exported_is_told_before_anything_is_written(
    options, error, text, tmp_path
):
    with pytest.raises(error, match=re.escape(text)):
        tfamp.export(mlp(), tmp_path / "m", **options)
    assert list(tmp_path.iterdir()) == []


def test_models_without_weights_and_taken_paths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no weights yet"):
        tfamp.export(keras.Sequential([L.Dense(2)]), tmp_path / "m")
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError, match="something else is than an export"):
        tfamp.export(mlp(), tmp_path)
    with pytest.raises(FileNotFoundError, match="mkdir -p"):
        tfamp.export(mlp(), tmp_path / "no" / "m")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("package", ["tf2onnx", "onnxruntime"])
def test_a_missing_runtime_names_the_extra(package, tmp_path, monkeypatch):
    for name in ("onnx", "tf2onnx", "onnxruntime"):
        if name != package:
            pytest.importorskip(name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'tfamp\[onnx\]'"):
        tfamp.export(mlp(), tmp_path / "m", format="onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["damaged", "later", "digest", "extra", "outside"])
def test_folders_that_are_not_as_written_are_refused(text, tmp_path):
    from tfamp.serving.runtimes.manifest import digests

    (tmp_path / "model.onnx").write_bytes(b"model")
    (tmp_path / "variables").mkdir()
    record = {
        "format_version": 1,
        "runtime": "saved_model",
        "dtype": "float32",
        "scheme": "",
        "signature": {"inputs": [], "outputs": []},
        "files": digests(tmp_path),
        "versions": {},
        "processor": {},
    }
    expected = {
        "damaged": "is damaged",
        "later": "is of format version 99; expected at most 1",
        "digest": "is changed: its SHA-256 is",
        "extra": "is not named by export.json",
        "outside": "lies outside of",
    }
    if text == "later":
        record["format_version"] = 99
    elif text == "damaged":
        del record["files"]
    elif text == "digest":
        (tmp_path / "model.onnx").write_bytes(b"Model")
    elif text == "extra":
        (tmp_path / "variables" / "more").write_text("")
    else:
        record["files"]["../other"] = "0"
    (tmp_path / "export.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=re.escape(expected[text])):
        tfamp.load_exported(tmp_path)


@pytest.mark.slow(why="processes")
def test_a_worse_export_is_not_written(tmp_path, monkeypatch):
    from tfamp.serving.exports import candidates

    pytest.importorskip("tf2onnx")
    path = tmp_path / "m"
    monkeypatch.setattr(candidates, "MAX_FLOAT32_DIFFERENCE", -1.0)
    assert MAX_FLOAT32_DIFFERENCE > 0
    with pytest.raises(ValueError, match="answers otherwise than the model"):
        tfamp.export(mlp(), path, format="onnx")
    assert not path.exists()


@pytest.mark.slow(why="processes")
def test_the_command_writes_a_saved_model_for_a_runtime(tmp_path, capsys):
    from tfamp.cli.main import main

    pytest.importorskip("tf2onnx")
    model = mlp()
    model.save(tmp_path / "m.keras")
    argv = ["export", str(tmp_path / "m.keras"), "--format=onnx", "--dtype=int8"]
    report = tmp_path / "found.json"
    assert main([*argv, "--keep-float32=nowhere", f"--json={report}"]) == 1
    assert "`keep_float32` names 'nowhere'" in capsys.readouterr().err
    assert main([*argv, f"--json={report}"]) == 0
    found = json.loads(report.read_text())
    assert (found["format"], found["scheme"]) == ("onnx", "dynamic")
    assert tfamp.load_exported(tmp_path / "m").predict(X).shape == (40, 3)
    assert main(["export", str(tmp_path / "m.keras"), "--format=onxx"]) == 2


@pytest.mark.slow(why="processes")
def test_auto_takes_the_fastest_of_what_is_installed(tmp_path, monkeypatch):
    from tfamp.serving.exports import exporter

    pytest.importorskip("tf2onnx")
    monkeypatch.setattr(
        exporter, "missing", lambda format: () if format == "onnx" else ("nothing",)
    )
    model = mlp()
    answers = model.predict(X, verbose=0).argmax(axis=1)
    found = tfamp.export(
        *(model, tmp_path / "m"),
        dtype="auto",
        calibration=X,
        validation=(X, answers),
        tolerance=0.5,
        budget_seconds=20,
    )
    outcomes = {each.name: each.outcome for each in found.tried}
    assert outcomes["litert float32"] == "left out"
    timed = {each.name: each.seconds for each in found.tried if each.seconds}
    chosen = [name for name, outcome in outcomes.items() if outcome == "chosen"]
    assert len(timed) == 3 and timed[chosen[0]] < 1.1 * min(timed.values())
    assert "pip install 'tfamp[litert]'" in str(found)
    against = {each.against for each in found.parity.speedups}
    other = set() if found.dtype == "float32" else {"best float32 (onnx)"}
    assert against == {"SavedModel"} | other
    assert all(name in found.parity.reason for name in against)
