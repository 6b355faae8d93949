"""What each runtime does with a file: layers that prepare inputs, threads at once."""

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


@pytest.mark.slow("a conversion each; the anchor is one of them")
@FORMATS
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
    found = written(model, format, tmp_path)
    assert {spec.name for spec in found.signature.inputs} == columns.keys()
    np.testing.assert_allclose(found.predict(x), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.slow("a conversion; other operations that LiteRT lacks are like it")
def test_litert_says_that_float64_is_what_it_lacks(tmp_path):
    pytest.importorskip("ai_edge_litert")
    times = 1.7e9 + RANDOM.uniform(0, 3600, 100)
    layer = tfamp.data.fit_statistics(times).as_layer()
    inputs = keras.Input((1,), dtype="int64")
    model = keras.Model(inputs, L.Dense(2)(layer(inputs)))
    with pytest.raises(ValueError, match=r"LiteRT has no operation for .* in float64,"):
        written(model, "litert", tmp_path)


@pytest.mark.slow("a conversion each; the anchor is one of them")
@FORMATS
@pytest.mark.quick("litert")
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


@pytest.mark.parametrize("format", ["saved_model", "onnx"])
@pytest.mark.slow("a conversion each; an ONNX without an operation is told above")
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
