"""Exported and Keras models run by one call for all."""

import json
import threading

import keras
import numpy as np
import pytest

import tfamp
from tfamp.serving.runtimes.signature import Signature, TensorSpec
from tfamp.serving.runtimes.tensorflow_models import TensorFlowModel

L = keras.layers
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def signature(*shape):
    spec = TensorSpec("x", (None, *shape), "float32")
    return Signature((spec,), (spec._replace(name="y"),))


def twice(x):
    return {"y": 2.0 * x}


def test_frozen_models_and_files_are_loaded_as_exported_ones_are(tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), name="features")
    outputs = L.Dense(3, name="answer")(L.Dense(8, activation="relu")(inputs))
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    model.fit(X, np.zeros((6, 3)), verbose=0)  # now a dict has layers as keys
    np.testing.assert_allclose(
        tfamp.load_exported(model)(X), model.predict(X, verbose=0), atol=1e-6
    )
    frozen = tfamp.freeze(model)
    wanted = frozen.predict(X, verbose=0)
    frozen.save(tmp_path / "frozen.keras")
    for source in (frozen, tmp_path / "frozen.keras"):
        loaded = tfamp.load_exported(source)
        assert loaded.runtime == "keras"
        assert loaded.signature.inputs == (
            TensorSpec("features", (None, 4), "float32"),
        )
        for size in (1, 6):
            # Another graph may round sums of bfloat16 in another order.
            np.testing.assert_allclose(
                loaded.predict(X[:size]), wanted[:size], atol=2**-7
            )
    with pytest.raises(TypeError, match="expected a `keras.Model`"):
        tfamp.load_exported(3)


def test_an_export_of_earlier_versions_is_loaded(tmp_path):
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    tfamp.export(model, tmp_path / "m", format="saved_model")
    file = tmp_path / "m" / "export.json"
    record = json.loads(file.read_text())
    record["execution"] = {"1": {"chosen": "XLA", "speedup": 3.0}}
    file.write_text(json.dumps(record))
    loaded = tfamp.load_exported(tmp_path / "m")
    np.testing.assert_allclose(loaded(X[:2]), model(X[:2]), atol=1e-6)


def test_threads_share_a_model():
    model = TensorFlowModel(None, signature(4), twice)
    wrong = []

    def ask(number):
        x = np.full((1, 4), number, np.float32)
        wrong.extend(1 for _ in range(20) if (model(x) != 2 * number).any())

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong and not any(thread.is_alive() for thread in threads)
