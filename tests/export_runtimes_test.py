"""What each runtime does with a file: layers that prepare inputs, threads at once."""

import importlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.serving.exports.candidates import Source
from tfamp.serving.exports.request import Request

L = keras.layers
RANDOM = np.random.default_rng(0)
NEEDS = {
    "saved_model": (),
    "litert": ("ai_edge_litert",),
    "onnx": ("tf2onnx", "onnxruntime"),
    "openvino": ("openvino",),
}
FORMATS = pytest.mark.parametrize("format", NEEDS)


def written(model, format, folder, dtype="float32", scheme=""):
    """Writes a format and loads it, in this process."""
    for package in NEEDS[format]:
        pytest.importorskip(package)
    request = Request(format, dtype, scheme)
    traced = Source(model, None).trace_for(request)
    writer = importlib.import_module(f"tfamp.serving.exports.{format}_files")
    writer.write(traced, folder, request)
    runtime = importlib.import_module(f"tfamp.serving.runtimes.{format}")
    return runtime.load(folder, traced_manifest(traced), 2)


def traced_manifest(traced):
    from tfamp.serving.runtimes.manifest import Manifest

    return Manifest("", "float32", "", traced.signature, {}, {}, {})


@pytest.mark.whole("a conversion each; the anchor is one of them")
@FORMATS
@pytest.mark.anchors("onnx")
def test_statistics_and_preprocessing_layers_come_along(format, tmp_path):
    columns = {"pay": RANDOM.lognormal(size=200), "age": RANDOM.normal(40, 9, 200)}
    columns = {name: value.astype(np.float32) for name, value in columns.items()}
    x = {name: value[:6, np.newaxis].copy() for name, value in columns.items()}
    x["pay"][2], x["age"][0] = np.nan, 1e6  # missing, and far beyond the clip
    statistics = tfamp.data.fit_statistics(columns)
    inputs = {name: keras.Input((1,), name=name) for name in ("pay", "age")}
    y = statistics.as_layer()(inputs)
    normalized = L.Normalization()
    normalized.adapt(RANDOM.normal(3.0, 2.0, (50, 2)))
    parts = [normalized(y), L.Rescaling(0.5, -1.0)(y)]
    if format != "onnx":  # it has no operation for that, and says so
        parts.append(L.Discretization([-1.0, 0.0], output_mode="one_hot")(y[:, :1]))
    y = L.Concatenate()(parts)
    # A tensor that is held as it is, and too large to be written into the graph.
    y = L.Dense(512)(y) + keras.ops.arange(512, dtype="float32")
    model = keras.Model(inputs, L.Dense(3)(y))
    wanted = model(x).numpy()
    assert np.isfinite(wanted).all()
    found = written(model, format, tmp_path)
    assert {spec.name for spec in found.signature.inputs} == {"pay", "age"}
    np.testing.assert_allclose(found.predict(x), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.whole("a conversion each; the anchor is one of them")
@FORMATS
@pytest.mark.anchors("litert")
def test_threads_at_once_get_their_own_answers(format, tmp_path):
    model = keras.Sequential([keras.Input((4,)), L.Dense(64), L.Dense(4)])
    loaded = written(model, format, tmp_path)
    x = RANDOM.normal(size=(8, 4)).astype(np.float32)
    wanted = model(x).numpy()
    mixed_up = []

    def ask(number):
        size = 1 + number % 3  # a batch of another size resizes what is shared
        for _ in range(50):
            found = loaded.predict(np.repeat(x[number : number + 1], size, axis=0))
            off = np.abs(found - wanted[number]).max()
            if found.shape != (size, 4) or off > 1e-4:
                mixed_up.append(number)

    threads = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and mixed_up == []


@pytest.mark.whole("quantises by blocks, which takes seconds to import")
def test_four_bits_in_onnx(tmp_path):
    pytest.importorskip("onnx_ir")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), L.Dense(256), L.Dense(64)])
    whole = sum(np.asarray(w).nbytes for w in model.weights)
    loaded = written(model, "onnx", tmp_path, "int4", "weights")
    assert (tmp_path / "model.onnx").stat().st_size < 0.2 * whole
    x = RANDOM.normal(size=(32, 64)).astype(np.float32)
    wanted = model(x).numpy()
    # Blocks of 32 weights take 15 steps: a weight is off by at most a 14th of the
    # largest of its block, by a normal distribution by some 6 % of its size.
    error = np.std(loaded.predict(x) - wanted) / np.std(wanted)
    assert 0.01 < error < 0.2


@pytest.mark.parametrize("format", ["saved_model", "onnx"])
@pytest.mark.whole("a conversion each; an ONNX without an operation is told above")
def test_words_stay_with_tensorflow(format, tmp_path):
    lookup = L.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")
    words = keras.Input((1,), dtype="string")
    model = keras.Model(words, L.Dense(2)(lookup(words)))
    if format == "onnx":
        with pytest.raises(ValueError, match="ONNX has no operation for"):
            written(model, format, tmp_path)
        return
    loaded = written(model, format, tmp_path)
    found = loaded.predict(np.array([["b"], ["?"]], object))
    wanted = model(tf.constant([["b"], ["?"]])).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
