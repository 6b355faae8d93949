"""TensorFlow models run plain or under XLA, as measured, in one call for all."""

import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.serving import runtimes
from tfamp.serving.exports import candidates
from tfamp.serving.parity.timings import Pace
from tfamp.serving.runtimes import tensorflow_models
from tfamp.serving.runtimes.manifest import execution_text
from tfamp.serving.runtimes.signature import Signature, TensorSpec
from tfamp.serving.runtimes.tensorflow_models import TensorFlowModel

L = keras.layers
X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


def signature(*shape):
    spec = TensorSpec("x", (None, *shape), "float32")
    return Signature((spec,), (spec._replace(name="y"),))


def twice(x):
    return {"y": 2.0 * x}


def fake_race(seconds):
    """A race in which each side takes the seconds of its name."""

    def race(racers, **options):
        for racer in racers:
            racer.logs.update({n: np.log(seconds[racer.name]) for n in range(4)})

    return race


@pytest.mark.parametrize(
    ("plain", "xla", "chosen"), [(2.0, 1.0, "XLA"), (1.0, 2.0, "plain")]
)
def test_what_is_shown_faster_runs_a_batch_size(plain, xla, chosen, monkeypatch):
    monkeypatch.setattr(
        tensorflow_models, "race", fake_race({"plain": plain, "XLA": xla})
    )
    model = TensorFlowModel(None, signature(4), twice)
    found = model.choose({"x": X}, (1,))
    assert found == {"1": {"chosen": chosen, "speedup": plain / xla}}
    called = []
    original = model.compiled
    monkeypatch.setattr(
        model, "compiled", lambda t: called.append(len(t[0])) or original(t)
    )
    for size in (1, 3):
        np.testing.assert_array_equal(model.predict(X[:size]), 2 * X[:size])
    # Other sizes are not compiled: each would take seconds.
    assert called == ([1] if chosen == "XLA" else [])


def test_what_xla_cannot_compile_or_only_for_one_length_runs_plain():
    def texts(x):
        return {"y": tf.strings.length(tf.strings.as_string(x))}

    found = TensorFlowModel(None, signature(4), texts).choose({"x": X}, (1,))["1"]
    assert found["chosen"] == "plain" and found["why"].startswith("not under XLA")
    free = TensorFlowModel(None, signature(None), twice).choose({"x": X}, (1,))
    (told,) = execution_text(free)
    assert told.endswith(
        "as they are: XLA would compile each length of the inputs anew."
    )


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
        assert loaded.execution["1"]["chosen"] in ("plain", "XLA")
        for size in (1, 6):
            # XLA rounds sums of bfloat16 in another order.
            np.testing.assert_allclose(
                loaded.predict(X[:size]), wanted[:size], atol=2**-7
            )
    with pytest.raises(TypeError, match="expected a `keras.Model`"):
        tfamp.load_exported(3)


def test_a_saved_model_says_what_it_runs_by(tmp_path, monkeypatch):
    from tfamp.serving.exports import candidates
    from tfamp.serving.runtimes import fresh_process

    def answers(folder, inputs):
        outputs = candidates.open_model(folder, manifests[-1]).run(inputs)
        return fresh_process.Answered(outputs, 0.1, 1)

    manifests = []
    original = candidates.Manifest.write
    monkeypatch.setattr(
        candidates.Manifest,
        "write",
        lambda self, folder: manifests.append(self) or original(self, folder),
    )
    monkeypatch.setattr(fresh_process, "ask", answers)
    monkeypatch.setattr(tensorflow_models, "race", fake_race({"plain": 3, "XLA": 1}))
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    path = tmp_path / "m"
    found = tfamp.export(model, path, format="saved_model", batch_size=2)
    written = json.loads((path / "export.json").read_text())["execution"]
    assert (
        written
        == found.execution
        == {size: {"chosen": "XLA", "speedup": 3.0} for size in ("1", "2")}
    )
    assert "runs batches of 2 under XLA" in str(found)
    loaded = tfamp.load_exported(path)
    assert loaded._compiled == {1: None, 2: None}
    np.testing.assert_allclose(loaded(X[:2]), model(X[:2]), atol=1e-6)
    assert loaded._compiled[2] is not None


def test_threads_share_a_model_and_its_compiling():
    model = TensorFlowModel(None, signature(4), twice, compiled_sizes=(1,))
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
