"""Exported and Keras models run by one call for all, on one thread if faster."""

import json
import threading

import keras
import numpy as np
import pytest

import tfamp
from tfamp.serving import runtimes
from tfamp.serving.exports import candidates
from tfamp.serving.parity.timings import Pace
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


THREADS = {
    "one is faster": ({"one": 1.0, "all": 1.6}, 1),
    "alike": ({"one": 1.0, "all": 1.04}, None),
    "all are faster": ({"one": 1.6, "all": 1.0}, None),
}


@pytest.mark.parametrize("slowdowns, expected", THREADS.values(), ids=THREADS)
def test_one_thread_is_taken_where_it_was_faster(
    slowdowns, expected, tmp_path, monkeypatch
):
    pytest.importorskip("onnxruntime", reason="needs tfamp[onnx]")
    monkeypatch.setattr(candidates, "num_usable_cpus", lambda: 3)
    monkeypatch.setattr(runtimes, "_threads", lambda threads: threads or 3)
    raced_threads = {}

    def raced(models, inputs, sizes, *, seconds):
        raced_threads.update({name: used(each) for name, each in models.items()})
        return {name: Pace(1e-3, slowdown) for name, slowdown in slowdowns.items()}

    monkeypatch.setattr(candidates, "raced", raced)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    export = tfamp.export(model, tmp_path / "model", format="onnx")
    assert raced_threads == {"one": 1, "all": 3}
    assert (export.threads, used(export.load())) == (expected, expected or 3)
    assert used(tfamp.load_exported(export.path, threads=2)) == 2
    assert ("takes one thread" in str(export)) == (expected == 1)


def used(loaded):
    return loaded._session.get_session_options().intra_op_num_threads
