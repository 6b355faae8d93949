"""The bundle of a failure: what `NanRecovery` keeps, and that triage takes it."""

import contextlib
import json
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import OwnStep
from tests.replicas import two_replicas
from tfamp.callbacks import NanRecovery

# 13 batches of 4 and one of 2; the 13th has a NaN.
NUM_EXAMPLES, BATCH, BAD_STEP = 54, 4, 13
layers = keras.layers


@keras.saving.register_keras_serializable("failure_bundles_test")
class Own(OwnStep):
    """A subclassed model with a train step of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden, self.head = layers.Dense(2), layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))


def unbuilt():
    return keras.Sequential(
        [layers.Dropout(0.5), layers.BatchNormalization(), layers.Dense(1)]
    )


def small(*more):
    parts = [layers.Dropout(0.5), *more, layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), *parts])


def arrays(bad=BAD_STEP):
    x = np.random.default_rng(0).random((NUM_EXAMPLES, 3), "float32")
    y = x[:, :1].copy()
    if bad is not None:
        y[BATCH * (bad - 1) + 1] = np.nan
    return x, y


def failed(folder, make=small, *callbacks, on_replicas=False, bad=BAD_STEP, **settings):
    """Returns a model whose training ended with its first failure, and the bundle."""
    keras.utils.set_random_seed(1)
    with two_replicas().scope() if on_replicas else contextlib.nullcontext():
        model = make()
        model.compile(keras.optimizers.Adam(0.01), "mse", **settings)
    recovery = NanRecovery(
        folder, max_recoveries=0, on_exhausted="stop", every_seconds=0
    )
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(*arrays(bad), callbacks=[*callbacks, recovery], **how)
    (path,) = recovery.bundles
    return model, Path(path)


def record_of(path):
    return json.loads((path / "bundle.json").read_text())


WAYS = {
    "a train_step of its own": (Own, {}),
    "three eager steps": (unbuilt, {"steps_per_execution": 3, "run_eagerly": True}),
    "two replicas": (small, {"on_replicas": True}),
    "XLA": (small, {"jit_compile": True}),
}


@pytest.mark.quick("a train_step of its own", "three eager steps")
@pytest.mark.parametrize("make, settings", WAYS.values(), ids=WAYS)
def test_the_failing_step_is_kept_and_explained(tmp_path, make, settings):
    (tmp_path / ".writing-123").mkdir()  # half of another, of a killed process
    model, path = failed(tmp_path, make, **settings)
    assert [path] == list(tmp_path.glob("failure-*"))
    assert not list(tmp_path.glob(".writing*"))
    assert path.name.startswith(f"failure-{BAD_STEP:08d}-")
    assert (record_of(path)["epoch"], record_of(path)["step"]) == (0, BAD_STEP)
    rows = slice(BATCH * (BAD_STEP - 1), BATCH * BAD_STEP)
    batch = next(iter(tf.data.Dataset.load(f"{path}/batch")))
    for kept, expected in zip(batch, arrays(), strict=True):
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
    _, path = failed(tmp_path, unbuilt, Spoils(), bad=None, run_eagerly=True)
    record = record_of(path)
    assert record["cause"] == "weights" and "moving_mean" in record["message"]
    assert record["notes"][0].startswith("No step since the last good state failed")


class Secret(layers.Layer):
    def get_config(self):
        raise NotImplementedError("not for saving")

    def call(self, x):
        return x


def test_a_model_that_cannot_be_saved_leaves_the_rest(tmp_path):
    model, path = failed(tmp_path, lambda: small(Secret()))
    assert "not for saving" in record_of(path)["no_model"]
    assert not (path / "model.keras").exists()
    assert tfamp.triage(model, path).cause == "data"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return failed(tmp_path_factory.mktemp("kept"))


DAMAGES = {
    "no record": ("bundle.json", FileNotFoundError, "Found no bundle in"),
    "no state": ("state.npz", ValueError, "is damaged: Found no file"),
    "a changed batch": ("batch/*/*/*", ValueError, "is damaged"),
}


@pytest.mark.parametrize("name, kind, text", DAMAGES.values(), ids=DAMAGES)
def test_a_bundle_that_is_not_whole_is_refused(bundle, tmp_path, name, kind, text):
    model, whole = bundle
    folder = shutil.copytree(whole, tmp_path / "copy")
    (path,) = folder.glob(name)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.unlink()
    if "*" in name:
        path.write_bytes(content)
    with pytest.raises(kind, match=text):
        tfamp.triage(model, folder)
