"""The bundle of a failure: what `NanRecovery` keeps, and that triage takes it."""

import contextlib
import json
import os
import shutil
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


def unbuilt():
    return keras.Sequential(
        [layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(1)]
    )


def small():
    return keras.Sequential([keras.Input((3,)), layers.Dropout(0.5), layers.Dense(1)])


def compiled(make=small, *, on_replicas=False, **settings):
    keras.utils.set_random_seed(1)
    scope = two_replicas().scope() if on_replicas else contextlib.nullcontext()
    with scope:
        model = make()
        model.compile(keras.optimizers.Adam(0.01), "mse", **settings)
    return model


def arrays(bad=BAD_STEP):
    x = np.random.default_rng(0).random((NUM_EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    if bad is not None:
        y[BATCH * (bad - 1) + 1] = np.nan
    return x, y


def keeping(folder, **options):
    """Mends nothing: training ends with the first failure."""
    return NanRecovery(folder, max_recoveries=0, on_exhausted="stop", **options)


def fit(model, *callbacks, data=None, **settings):
    x, y = arrays() if data is None else data
    settings = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | settings
    return model.fit(x, y, callbacks=list(callbacks), **settings)


def record_of(path):
    return json.loads((Path(path) / "bundle.json").read_text())


def batch_of(path):
    """The batch in a bundle, as any program reads it."""
    return next(iter(tf.data.Dataset.load(f"{path}/batch")))


WAYS = {
    "a train_step of its own": (OwnStep, {}),
    "three eager steps": (unbuilt, {"steps_per_execution": 3, "run_eagerly": True}),
    "two replicas": (small, {"on_replicas": True}),
    "XLA": (small, {"jit_compile": True}),
}


@pytest.mark.quick("a train_step of its own", "three eager steps")
@pytest.mark.parametrize("make, settings", WAYS.values(), ids=WAYS)
def test_the_failing_step_is_kept_and_explained(tmp_path, make, settings):
    model, recovery = compiled(make, **settings), keeping(tmp_path)
    fit(model, recovery)
    (path,) = recovery.bundles
    assert os.path.dirname(path) == str(tmp_path)
    assert os.path.basename(path).startswith(f"failure-{BAD_STEP:08d}-")
    assert (record_of(path)["epoch"], record_of(path)["step"]) == (0, BAD_STEP)
    rows = slice(BATCH * (BAD_STEP - 1), BATCH * BAD_STEP)
    for kept, expected in zip(batch_of(path), arrays(), strict=True):
        np.testing.assert_array_equal(kept, expected[rows])
    before = model.get_weights()
    found = tfamp.triage(model, path)
    assert found.cause == "data" and "in 1 of 4" in found.evidence[0]
    for ours, theirs in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Spoils(keras.callbacks.Callback):
    """Breaks the model from outside."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.layers[1].moving_mean.assign(np.full(3, np.nan))


def test_what_no_step_makes_again_is_told(tmp_path):
    recovery = keeping(tmp_path, every_seconds=0)
    model = compiled(unbuilt, run_eagerly=True)
    fit(model, Spoils(), recovery, data=arrays(None))
    record = record_of(recovery.bundles[0])
    assert record["cause"] == "weights" and "moving_mean" in record["message"]
    assert record["notes"][0].startswith("No step since the last good state failed")


class Secret(layers.Layer):
    def get_config(self):
        raise NotImplementedError("not for saving")

    def call(self, x):
        return x


def test_a_model_that_cannot_be_saved_leaves_the_rest(tmp_path):
    layers_of = [keras.Input((3,)), Secret(), layers.Dense(1)]
    recovery, model = keeping(tmp_path), compiled(lambda: keras.Sequential(layers_of))
    fit(model, recovery)
    (path,) = recovery.bundles
    assert "not for saving" in record_of(path)["no_model"]
    assert not (Path(path) / "model.keras").exists()
    assert tfamp.triage(model, path).cause == "data"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle, in whose folder a killed process had left half of another."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / ".writing-123").mkdir()
    recovery = keeping(folder)
    fit(compiled(), recovery)
    assert not list(folder.glob(".writing*"))
    return Path(recovery.bundles[0])


DAMAGES = {
    "no record": ("bundle.json", FileNotFoundError, "Found no bundle in"),
    "no state": ("state.npz", ValueError, "is damaged: Found no file"),
    "a changed batch": ("batch/*/*/*", ValueError, "is damaged"),
}


@pytest.mark.parametrize("name, kind, text", DAMAGES.values(), ids=DAMAGES)
def test_a_bundle_that_is_not_whole_is_refused(bundle, tmp_path, name, kind, text):
    folder = shutil.copytree(bundle, tmp_path / "copy")
    (path,) = folder.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.unlink()
    if "*" in name:
        path.write_bytes(content)
    with pytest.raises(kind, match=text):
        tfamp.triage(compiled(), folder)
