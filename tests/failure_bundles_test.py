"""The bundle of a failure: what `NanRecovery` keeps, and that triage takes it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.replicas import two_replicas
from tfamp.callbacks import NanRecovery

# 13 batches of 4 and one of 2; the 13th has a NaN.
NUM_EXAMPLES, BATCH, BAD_STEP = 54, 4, 13
layers = keras.layers


@keras.saving.register_keras_serializable("failure_bundles_test")
class OwnStep(keras.Model):
    """A subclassed model with a train step of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.head = layers.Dense(2), layers.Dense(1)
        self.drop = layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.head(self.drop(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def sequential():
    return keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(4, activation="tanh"),
            layers.Dropout(0.5),
            layers.BatchNormalization(),
            layers.Dense(1),
        ]
    )


def functional():
    inputs = keras.Input((3,))
    outputs = layers.Dense(1)(layers.GaussianNoise(0.1)(inputs) + inputs)
    return keras.Model(inputs, outputs)


def unbuilt():
    return keras.Sequential([layers.Dropout(0.5), layers.Dense(1)])


def small():
    return keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(1)])


def compiled(make=small, *, on_replicas=False, **settings):
    keras.utils.set_random_seed(1)
    scope = contextlib.nullcontext()
    if on_replicas:
        scope = two_replicas().scope()
    with scope:
        model = make()
        optimizer = settings.pop("optimizer", None) or keras.optimizers.Adam(0.01)
        model.compile(optimizer, "mse", **settings)
    return model


def arrays(bad=BAD_STEP):
    x = np.random.default_rng(0).random((NUM_EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    if bad is not None:
        y[BATCH * (bad - 1) + 1] = np.nan
    return x, y


def keeping(folder, **options):
    """Mends nothing: training ends with the first failure."""
    return NanRecovery(
        folder, **{"max_recoveries": 0, "on_exhausted": "stop"} | options
    )


def fit(model, recovery, *, data=None, **settings):
    x, y = arrays() if data is None else data
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, callbacks=[recovery], **settings)


def batch_of(path):
    """The batch in a bundle, as any program reads it."""
    return next(iter(tf.data.Dataset.load(f"{path}/batch")))


WAYS = {
    "Sequential": (sequential, {"metrics": ["mae"]}),
    "Functional": (functional, {}),
    "a train_step of its own": (OwnStep, {}),
    "not built before": (unbuilt, {}),
    "eager": (sequential, {"run_eagerly": True}),
    "three steps a call": (sequential, {"steps_per_execution": 3}),
    "three eager steps": (unbuilt, {"steps_per_execution": 3, "run_eagerly": True}),
    "two replicas": (sequential, {"on_replicas": True}),
    "XLA": (sequential, {"jit_compile": True}),
}


@pytest.mark.parametrize("make, settings", WAYS.values(), ids=WAYS)
def test_the_failing_step_is_kept_and_explained(tmp_path, make, settings):
    model, recovery = compiled(make, **settings), keeping(tmp_path)
    fit(model, recovery)
    (path,) = recovery.bundles
    assert os.path.dirname(path) == str(tmp_path)
    assert os.path.basename(path).startswith(f"failure-{BAD_STEP:08d}-")
    record = json.loads((Path(path) / "bundle.json").read_text())
    assert (record["epoch"], record["step"]) == (0, BAD_STEP)
    rows = slice(BATCH * (BAD_STEP - 1), BATCH * BAD_STEP)
    for kept, expected in zip(batch_of(path), arrays(), strict=True):
        np.testing.assert_array_equal(kept, expected[rows])
    if "on_replicas" in settings:
        assert record["notes"] == [
            "It was found on one device, with the batch of all replicas."
        ]
    before = model.get_weights()
    found = tfamp.triage(model, path)
    assert found.cause == "data" and "in 1 of 4" in found.evidence[0]
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def texts():
    words = np.array([str(i % 7) for i in range(NUM_EXAMPLES)])[:, None]
    inputs = keras.Input((1,), dtype="string")
    ids = layers.StringLookup(vocabulary=list("0123456"))(inputs)
    hidden = layers.Flatten()(layers.Embedding(8, 2)(ids))
    return keras.Model(inputs, layers.Dense(1)(hidden)), words


def two_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    outputs = layers.Dense(1)(layers.Add()([a, b]))
    return keras.Model({"a": a, "b": b}, outputs), {"a": arrays()[0], "b": arrays()[0]}


@pytest.mark.parametrize("build", [texts, two_inputs], ids=["strings", "a dict"])
def test_batches_of_every_kind_are_explained(tmp_path, build):
    model, x = build()
    model = compiled(lambda: model)
    recovery = keeping(tmp_path)
    dataset = tf.data.Dataset.from_tensor_slices((x, arrays()[1])).batch(BATCH)
    model.fit(dataset, verbose=0, callbacks=[recovery])
    assert tfamp.triage(model, recovery.bundles[0]).cause == "data"


class Ragged(keras.Model):
    """Trains on rows of any length, and on sparse targets."""

    def __init__(self):
        super().__init__()
        self.weight = self.add_weight(shape=(), initializer="ones")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(tf.reduce_sum(x, 1) * self.weight)
            loss = total - tf.cast(tf.sparse.reduce_sum(y), tf.float32)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def test_ragged_and_sparse_batches_are_kept(tmp_path):
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [], [np.nan]])
    targets = tf.sparse.from_dense([[0, 1], [2, 0], [0, 0], [3, 4]])
    dataset = tf.data.Dataset.from_tensor_slices((rows, targets)).batch(2)
    recovery = keeping(tmp_path)
    model = compiled(Ragged)
    model.built = True
    model.fit(dataset, verbose=0, callbacks=[recovery])
    x, y = batch_of(recovery.bundles[0])
    np.testing.assert_equal(x.to_list(), [[], [np.nan]])
    assert tf.sparse.to_dense(y).numpy().tolist() == [[0, 0], [3, 4]]


class Spoils(keras.callbacks.Callback):
    """Breaks the model from outside."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.layers[2].moving_mean.assign(np.full(4, np.nan))


def test_what_no_step_makes_again_is_told(tmp_path):
    recovery = keeping(tmp_path, every_seconds=0)
    model = compiled(sequential)
    x, y = arrays(None)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[Spoils(), recovery])
    record = json.loads((Path(recovery.bundles[0]) / "bundle.json").read_text())
    assert record["cause"] == "weights" and "moving_mean" in record["message"]
    assert record["notes"][0].startswith("No step since the last good state failed")


def test_an_interrupt_and_a_good_run_leave_none(tmp_path):
    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyboardInterrupt

    recovery = keeping(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        compiled().fit(
            *arrays(None), verbose=0, callbacks=[recovery, Raises()], batch_size=BATCH
        )
    fit(compiled(), recovery, data=arrays(None))
    assert recovery.bundles == () and not list(tmp_path.glob("failure-*"))


def test_a_full_disk_costs_no_training(tmp_path, monkeypatch, caplog):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    recovery = NanRecovery(tmp_path)
    run = fit(compiled(), recovery, epochs=2)
    assert len(run.history["loss"]) == 2 and len(run.recoveries) == 2
    assert recovery.bundles == () and not list(tmp_path.glob("failure-*"))
    assert "No bundle of the failure could be written" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.slow
def test_the_model_in_a_bundle_is_as_good_in_another_process(tmp_path):
    recovery = keeping(tmp_path)
    fit(compiled(), recovery)
    (path,) = recovery.bundles
    line = (
        "import sys, tfamp; path = sys.argv[1]; "
        "model = tfamp.load_model(f'{path}/model.keras'); "
        "print('CAUSE', tfamp.triage(model, path).cause)"
    )
    command = [sys.executable, "-c", line, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "CAUSE data" in done.stdout, done.stderr[-2000:]


def test_a_model_that_cannot_be_saved_leaves_the_rest(tmp_path):
    class Secret(layers.Layer):
        def get_config(self):
            raise NotImplementedError("not for saving")

        def call(self, x):
            return x

    def make():
        return keras.Sequential([keras.Input((3,)), Secret(), layers.Dense(1)])

    recovery, model = keeping(tmp_path), compiled(make)
    fit(model, recovery)
    (path,) = recovery.bundles
    record = json.loads((Path(path) / "bundle.json").read_text())
    assert "not for saving" in record["no_model"]
    assert not (Path(path) / "model.keras").exists()
    assert tfamp.triage(model, path).cause == "data"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    recovery = keeping(tmp_path_factory.mktemp("kept"))
    fit(compiled(), recovery)
    return Path(recovery.bundles[0])


def without(name):
    return lambda folder: (
        shutil.rmtree(folder / name, ignore_errors=True)
        or ((folder / name).unlink(missing_ok=True))
    )


def bent(name):
    def bend(folder):
        (path,) = folder.glob(name)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x40
        path.write_bytes(content)

    return bend


DAMAGES = {
    "no record": (without("bundle.json"), FileNotFoundError, "Found no bundle in"),
    "no state": (without("state.npz"), ValueError, "is damaged: Found no file"),
    "no batch": (without("batch"), ValueError, "is damaged"),
    "a changed state": (bent("state.npz"), ValueError, "is damaged"),
    "a changed batch": (bent("batch/*/*/*"), ValueError, "is damaged"),
}


@pytest.mark.parametrize("damage, kind, text", DAMAGES.values(), ids=DAMAGES)
def test_a_bundle_that_is_not_whole_is_refused(bundle, tmp_path, damage, kind, text):
    folder = shutil.copytree(bundle, tmp_path / "copy")
    damage(folder)
    with pytest.raises(kind, match=text):
        tfamp.triage(compiled(), folder)


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".writing-123-7-loss").mkdir()
    fit(compiled(), keeping(tmp_path), data=arrays(None))
    assert not list(tmp_path.glob(".writing*"))


def test_the_triage_of_a_bundle_names_the_examples(tmp_path):
    model, recovery = compiled(), keeping(tmp_path)
    fit(model, recovery)
    found = tfamp.triage(model, recovery.bundles[0])
    assert found.cause == "data" and "in 1 of 4" in found.evidence[0]
