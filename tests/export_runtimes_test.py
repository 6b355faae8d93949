"""What each runtime does with a file: layers that prepare inputs, threads at once."""

import importlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.serving.exports.candidates import WRITERS
from tfamp.serving.exports.request import PACKAGES, Request
from tfamp.serving.exports.source import Source
from tfamp.serving.runtimes import open_model
from tfamp.serving.runtimes.manifest import Manifest

L = keras.layers
RANDOM = np.random.default_rng(0)
UNFIT = {"recurrent": L.LSTM(16), "convolution": L.Conv1D(16, 3)}
FORMATS = pytest.mark.parametrize("format", PACKAGES)


def written(model, format, folder, dtype="float32", scheme="", **options):
    """Writes a format and loads it, in this process."""
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    request = Request(format, dtype, scheme, **options)
    traced = Source(model, None).trace_for(request)
    WRITERS[format](traced, folder, request)
    manifest = Manifest(format, dtype, scheme, traced.signature, {}, {}, {})
    return open_model(folder, manifest, 2)


@pytest.mark.whole("a conversion each; the anchor is one of them")
@FORMATS
@pytest.mark.anchors("onnx")
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
    found = written(model, format, tmp_path)
    assert {spec.name for spec in found.signature.inputs} == columns.keys()
    np.testing.assert_allclose(found.predict(x), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.whole("a conversion; other operations that LiteRT lacks are like it")
def test_litert_says_that_float64_is_what_it_lacks(tmp_path):
    pytest.importorskip("ai_edge_litert")
    times = 1.7e9 + RANDOM.uniform(0, 3600, 100)
    layer = tfamp.data.fit_statistics(times).as_layer()
    inputs = keras.Input((1,), dtype="int64")
    model = keras.Model(inputs, L.Dense(2)(layer(inputs)))
    with pytest.raises(ValueError, match=r"LiteRT has no operation for .* in float64,"):
        written(model, "litert", tmp_path)


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


@pytest.mark.whole("a conversion; 4 bits of others are tested beside it")
def test_four_bits_in_openvino_whatever_the_sizes_of_layers(tmp_path):
    keras.utils.set_random_seed(0)
    # 50 numbers are no whole groups of 32, nor of 8.
    layers = [L.Dense(256), L.Dense(50), L.Dense(256)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    loaded = written(model, "openvino", tmp_path, "int4", "weights")
    found = constants(tmp_path / "model.xml")
    assert found == {(256, 2, 32): "i4", (50, 8, 32): "i4", (256, 50): "u8"}
    x = RANDOM.normal(size=(32, 64)).astype(np.float32)
    wanted = model(x).numpy()
    assert 0.01 < np.std(loaded.predict(x) - wanted) / np.std(wanted) < 0.3


def constants(file):
    """Returns dtype by shape of the weights of integers in a file of OpenVINO."""
    operations = importlib.import_module("openvino").Core().read_model(file)
    held = [
        each.output(0)
        for each in operations.get_ordered_ops()
        if each.get_type_name() == "Constant"
    ]
    dtypes = {tuple(x.shape): x.get_element_type().get_type_name() for x in held}
    names = ("i4", "u4", "i8", "u8")
    return {
        shape: name
        for shape, name in dtypes.items()
        if len(shape) > 1 and shape[-1] > 1 and name in names
    }


@pytest.mark.parametrize("layer", UNFIT.values(), ids=UNFIT)
def test_four_bits_in_onnx_are_for_products_of_matrices(layer, tmp_path):
    pytest.importorskip("onnx_ir")
    model = keras.Sequential([keras.Input((8, 4)), layer])
    text = "onnx int4 weights quantises nothing of this model: 4 bits are for products"
    with pytest.raises(ValueError, match=text):
        written(model, "onnx", tmp_path, "int4", "weights")


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
