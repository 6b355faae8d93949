"""`NanRecovery`: a failing fit goes back to its last good state, and on from there.

It keeps the failing step as a bundle, which triage takes.
"""

import contextlib
import json
import os
import re
import shutil
import types
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.loops import OwnStep
from tests.refusals import refused_arguments
from tests.replicas import two_replicas
from tests.styles import Subclassed
from tfamp.callbacks import NanRecovery, Recovery, RecoveryError, nan_recovery
from tfamp.stepping import snapshot_files

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
STEPS, BATCH, EPOCHS = 8, 4, 4
RANDOM = np.random.default_rng(0)
# Of each epoch other noise, so that quality has a floor.
X = RANDOM.normal(size=(EPOCHS * STEPS * BATCH, 3)).astype("float32")
TRUE = np.array([[1.0], [-2.0], [0.5]], np.float32)
Y = X @ TRUE + RANDOM.normal(size=(len(X), 1)).astype("float32")
CLEAN_X = RANDOM.normal(size=(400, 3)).astype("float32")
CLEAN_Y = CLEAN_X @ TRUE + RANDOM.normal(size=(400, 1)).astype("float32")


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Waits for no disk."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture
def judged(monkeypatch):
    """Has the triage give one verdict; notes what it is asked."""

    def judge(cause, **verdict):
        asked = []
        told = {"layer": None, "layers": (), "remedy": "", "rate_factor": None}

        def triage(model, batch):
            asked.append(([v.numpy() for v in model.variables], batch))
            facts = {"cause": cause, "loss_scale": None, **told, **verdict}
            return types.SimpleNamespace(**facts)

        monkeypatch.setattr(nan_recovery, "triage", triage)
        return asked

    return judge


def data(*bad, value=np.nan):
    """Batches of all epochs in a row; those at the steps `bad` hold `value`."""
    x = X.copy()
    for step in bad:
        x[step * BATCH] = value
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH)


def linear(optimizer=None, kind=keras.Sequential, hidden=None, **options):
    keras.utils.set_random_seed(7)
    layers = [hidden or keras.layers.Dense(4), keras.layers.Dense(1)]
    if kind is keras.Sequential:
        model = keras.Sequential([keras.Input((3,)), *layers])
    else:
        model = kind(layers)
    optimizer = keras.optimizers.SGD(0.02) if optimizer is None else optimizer
    model.compile(optimizer, "mse", **{"run_eagerly": True, **options})
    return model


def fit(model, batches, recovery, *others, **options):
    settings = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0, **options}
    return model.fit(batches, callbacks=[*others, recovery], **settings)


def often(folder, **options):
    """Takes a snapshot at every step."""
    return NanRecovery(folder, **{"every_seconds": 0, **options})


def recoveries(folder, *bad, model=None, value=np.nan, epochs=1, **options):
    """What is done in `epochs` with bad batches."""
    recovery = often(folder, **options)
    fit(model or linear(), data(*bad, value=value), recovery, epochs=epochs)
    return recovery.recoveries


class Own(Subclassed):
    """Makes its weights late, and has a step and logs of its own."""

    # Not inherited: Keras changes the bases of what is made of inputs and outputs.
    scaled = OwnStep.scaled

    def train_step(self, batch):
        return {"loss": OwnStep.train_step(self, batch)["own_loss"]}


WAYS = {
    "eager": {},
    "jit": dict(run_eagerly=False, jit_compile=True),
    "several steps a call": dict(run_eagerly=False, steps_per_execution=2),
    "own train_step in a graph": dict(kind=Own, run_eagerly=False),
}


@pytest.mark.quick("own train_step in a graph")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_bad_batch_in_epoch_2_is_dropped_and_quality_is_kept(way, tmp_path):
    model, recovery, plain = linear(**way), often(tmp_path), linear()
    run = fit(model, data(STEPS + 3), recovery)
    assert run.history["recoveries"] == [0, 1, 1, 1]
    assert np.all(np.isfinite(run.history["loss"]))
    found = [(each.epoch, each.cause, each.remedy) for each in recovery.recoveries]
    assert found == [(1, "data", "drop batch")]  # by tfamp's own triage
    assert run.recoveries == recovery.recoveries
    lines = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    assert [Recovery.from_dict(json.loads(x)) for x in lines] == [*run.recoveries]
    plain.fit(data(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0)
    ours, theirs = (m.evaluate(CLEAN_X, CLEAN_Y, verbose=0) for m in (model, plain))
    assert ours == pytest.approx(theirs, rel=0.01)


def test_the_model_goes_back_bit_by_bit_and_on_with_the_next_batch(tmp_path):
    model = linear(keras.optimizers.Adam(0.05))
    run = fit(model, data(5), often(tmp_path), epochs=1)
    # Snapshots follow each step; that of step 5 was never proven.
    assert run.recoveries[0].restored_step == 4
    twin = linear(keras.optimizers.Adam(0.05))
    for i in (0, 1, 2, 3, 6, 7):
        twin.train_on_batch(X[i * 4 : i * 4 + 4], Y[i * 4 : i * 4 + 4])
    for mine, other in zip(model.variables, twin.variables, strict=True):
        assert mine.numpy().tobytes() == other.numpy().tobytes()


def test_the_second_of_two_rests_and_says_so(tmp_path):
    first, second = often(tmp_path / "a"), often(tmp_path / "b")
    fit(linear(), data(5), first, second, epochs=1)
    assert sorted(len(x.recoveries) for x in (first, second)) == [0, 1]
    assert [*first.notes, *second.notes] == [
        "A second NanRecovery in the same `fit` does nothing: use one."
    ]


def test_an_epoch_without_a_finite_step_does_not_read_zero(tmp_path):
    run = fit(linear(), data(1), often(tmp_path), steps_per_epoch=1, epochs=3)
    assert run.history["loss"][1] == run.history["loss"][0] > 0


class Seen(keras.callbacks.Callback):
    """Notes what another callback sees."""

    def __init__(self):
        super().__init__()
        self.losses, self.weights = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.on_epoch_end(0)

    def on_epoch_end(self, epoch, logs=None):
        finite = [np.all(np.isfinite(v.numpy())) for v in self.model.variables]
        self.weights.append(all(finite))


@pytest.mark.quick("first")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_no_other_callback_sees_or_stops_for_the_failure(is_first, tmp_path):
    model, seen, recovery = linear(), Seen(), often(tmp_path)
    others = [seen, keras.callbacks.TerminateOnNaN()]
    callbacks = [recovery, *others] if is_first else [*others, recovery]
    run = fit(model, data(STEPS + 3), callbacks.pop(), *callbacks)
    assert len(run.history["loss"]) == EPOCHS
    assert np.all(np.isfinite(seen.losses)) and len(seen.losses) == EPOCHS * STEPS
    assert all(seen.weights)


class Hidden(keras.layers.Layer):
    """Turns NaN into 0, as a fused ReLU does on a CPU, so that the loss is finite."""

    def call(self, x):
        return tf.where(tf.math.is_nan(x), tf.zeros_like(x), x)


# Keras says so at the end of any data of unknown length.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.quick("unknown")
@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown"])
def test_weights_are_judged_before_the_epoch_ends_where_the_loss_is_finite(
    is_known, tmp_path
):
    """The moving statistics get NaN while the loss stays finite."""
    keras.utils.set_random_seed(7)
    inputs, options = keras.Input((3,)), {"center": False, "scale": False}
    statistics = keras.layers.BatchNormalization(name="statistics", **options)
    outputs = keras.layers.Dense(1)(Hidden()(inputs))
    model = keras.Model(inputs, outputs + 0 * Hidden()(statistics(inputs)))
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    batches, seen = data(STEPS - 3).take(STEPS), Seen()
    if not is_known:
        batches = batches.filter(lambda x, y: True)
    recovery = NanRecovery(tmp_path, every_seconds=1e6)
    fit(model, batches, recovery, seen, steps_per_epoch=None, epochs=1)
    path = statistics.moving_mean.path
    signs = [each.sign for each in recovery.recoveries]
    assert signs == [f"{path} holds values that are not finite"]
    assert seen.weights[-1]


RATES = {
    "a number": (0.5, ["0.5 -> 0.25", "0.25 -> 0.125"]),
    "a schedule": (
        keras.optimizers.schedules.ExponentialDecay(0.5, 10, 1.0),
        ["schedule x 0.5"] * 2,
    ),
}


@pytest.mark.parametrize("rate, expected", RATES.values(), ids=RATES)
def test_a_cut_lasts_when_a_snapshot_from_before_it_comes_back(
    rate, expected, tmp_path, judged
):
    judged("optimizer")
    model = linear(keras.optimizers.SGD(rate))
    # Never a snapshot but the first, so each recovery goes back behind the cut before.
    found = recoveries(tmp_path, 2, 4, every_seconds=1e6, model=model)
    assert [each.detail for each in found] == expected
    assert float(model.optimizer.learning_rate) == 0.125


class Root(keras.layers.Layer):
    """Finite forward at 0, where its gradient is 0 times infinity."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=(), initializer="ones")

    def call(self, x):
        return x + tf.sqrt(self.factor * x**2)


def guard(**options):
    settings = {"initial_scale": 1.0, "dynamic": False, "max_consecutive_skips": 2}
    return tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), **{**settings, **options}
    )


@pytest.mark.quick("graph")
@pytest.mark.parametrize("way", [{"run_eagerly": False}, WAYS["jit"]], ids=["graph", 1])
def test_the_error_of_a_stalled_loss_scale_ends_no_training(way, tmp_path, judged):
    judged("none")
    model, recovery = linear(guard(), hidden=Root(), **way), often(tmp_path)
    run = fit(model, data(12, 13, value=0.0), recovery)
    assert [each.remedy for each in run.recoveries] == ["drop batch"]
    assert run.recoveries[0].sign.startswith("Skipped 2 updates in a row")
    assert len(run.history["loss"]) == EPOCHS


@pytest.mark.parametrize("steps", [1, 4], ids=["a step a call", "several"])
def test_the_triage_is_asked_with_good_weights_and_the_failing_batch(
    steps, tmp_path, judged
):
    asked = judged("data")
    recoveries(tmp_path, 3, model=linear(run_eagerly=False, steps_per_execution=steps))
    ((weights, (x, y)),) = asked
    assert all(np.all(np.isfinite(weight)) for weight in weights)
    rows = slice(3 * BATCH, 4 * BATCH)
    assert np.isnan(x[0]).all() and np.array_equal(x[1:], X[rows][1:])
    assert np.array_equal(y, Y[rows])


def test_after_the_last_recovery_an_error_tells_what_was_tried(tmp_path, judged):
    judged("none")
    model, recovery = linear(), often(tmp_path, max_recoveries=2)
    with pytest.raises(RecoveryError) as caught:
        fit(model, data(*range(2, EPOCHS * STEPS)), recovery)
    text = str(caught.value)
    assert text.startswith(
        "Training was stopped at epoch 1, step 5: loss is nan, and `max_recoveries` 2 "
        "are used up; expected a remedy to help. The model is as it was at step 1, its "
        "last good snapshot."
    )
    lines = text.splitlines()[1:]
    assert [line.split(". Back")[0] for line in lines] == [
        f"Recovery {i} at epoch 1, step {i + 2}: loss is nan (cause: none)"
        for i in (1, 2, 3)
    ]
    assert "remedy: drop batch" in lines[0] and "remedy: stop" in lines[2]
    assert caught.value.recoveries == recovery.recoveries
    assert all(np.all(np.isfinite(v.numpy())) for v in model.variables)


@pytest.mark.slow("failure_to_recovery_test.py has one, too")
def test_a_fault_of_the_model_stops_at_once_with_its_advice(tmp_path, judged):
    judged("model", layer="root", remedy="Add an epsilon under the root.")
    recovery = often(tmp_path)
    with pytest.raises(RecoveryError, match="no remedy is left") as caught:
        fit(linear(), data(3), recovery)
    assert "Add an epsilon under the root." in str(caught.value)
    assert len(recovery.recoveries) == 1


def test_several_workers_are_refused_with_what_works_there(tmp_path, monkeypatch):
    workers = tf.distribute.MultiWorkerMirroredStrategy
    spread = property(lambda self: workers.__new__(workers))
    monkeypatch.setattr(keras.Model, "distribute_strategy", spread)
    recovery = NanRecovery(tmp_path)
    recovery.set_model(keras.Sequential())
    message = "`tfamp.LossScaleOptimizer(optimizer)`, which skips a bad step on all."
    with pytest.raises(ValueError, match=re.escape(message)):
        recovery.on_train_begin()


def test_training_that_begins_with_bad_weights_is_refused(tmp_path):
    model = linear()
    model.layers[0].bias.assign([1, np.nan, np.inf, 1])
    with pytest.raises(ValueError, match="begins with 2 numbers .* good checkpoint"):
        fit(model, data(), often(tmp_path))


def test_a_loss_that_runs_away_proves_nothing_until_it_stays(tmp_path, judged):
    """From step 8 on the loss is 400 times what it was."""
    judged("data")
    x = np.ones((24 * BATCH, 3), np.float32)
    y = np.where(np.arange(len(x)) < 8 * BATCH, 1.0, 20.0)[:, None].astype("float32")
    x[20 * BATCH] = np.nan
    model = linear(keras.optimizers.SGD(0.0))
    model.layers[1].kernel.assign(np.zeros((4, 1)))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    run = fit(model, batches, often(tmp_path), epochs=1, steps_per_epoch=24)
    assert [each.restored_step for each in run.recoveries] == [7]


test_arguments_are_checked = refused_arguments(
    lambda **given: NanRecovery(**{"directory": "x", **given}),
    ("every_seconds", -1.0, ";"),
    ("max_recoveries", -1, ";"),
    ("directory", None, ", of type", TypeError),
)


BAD_STEP = 13


def unbuilt(layers):
    more = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]
    return keras.Sequential([*more, *layers])


def failed(folder, *others, bad=(BAD_STEP - 1,), on_replicas=False, **options):
    """Returns a model whose training ended with its first failure, and the bundle."""
    with two_replicas().scope() if on_replicas else contextlib.nullcontext():
        model = linear(keras.optimizers.Adam(0.01), **options)
    recovery = often(folder, max_recoveries=0, on_exhausted="stop")
    fit(model, data(*bad), recovery, *others, steps_per_epoch=None, epochs=1)
    (path,) = recovery.bundles
    return model, Path(path)


def record_of(path):
    return json.loads((path / "bundle.json").read_text())


KEPT = {
    "a train_step of its own": WAYS["own train_step in a graph"],
    "three eager steps": dict(kind=unbuilt, steps_per_execution=3),
    "two replicas": dict(on_replicas=True, run_eagerly=False),
    "XLA": WAYS["jit"],
}


@pytest.mark.quick("a train_step of its own", "three eager steps")
@pytest.mark.parametrize("settings", KEPT.values(), ids=KEPT)
def test_the_failing_step_is_kept_and_explained(tmp_path, settings):
    (tmp_path / ".writing-123").mkdir()  # half of another, of a killed process
    model, path = failed(tmp_path, **settings)
    assert [path] == list(tmp_path.glob("failure-*"))
    assert not list(tmp_path.glob(".writing*"))
    assert path.name.startswith(f"failure-{BAD_STEP:08d}-")
    assert (record_of(path)["epoch"], record_of(path)["step"]) == (0, BAD_STEP)
    rows = slice(BATCH * (BAD_STEP - 1), BATCH * BAD_STEP)
    batch = next(iter(tf.data.Dataset.load(f"{path}/batch")))
    assert np.isnan(batch[0][0]).all() and np.array_equal(batch[0][1:], X[rows][1:])
    np.testing.assert_array_equal(batch[1], Y[rows])
    before = model.get_weights()
    found = tfamp.triage(model, path)
    assert found.cause == "data" and "in 1 of 4" in found.evidence[0]
    assert_close(model, before)


class Spoils(keras.callbacks.Callback):
    """Breaks the model from outside."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.model.layers[1].moving_mean.assign(np.full(3, np.nan))


def test_what_no_step_makes_again_is_told(tmp_path):
    _, path = failed(tmp_path, Spoils(), bad=(), kind=unbuilt)
    record = record_of(path)
    assert record["cause"] == "weights" and "moving_mean" in record["message"]
    assert record["notes"][0].startswith("No step since the last good state failed")


class Secret(keras.layers.Layer):
    def get_config(self):
        raise NotImplementedError("not for saving")

    def call(self, x):
        return x


def test_a_model_that_cannot_be_saved_leaves_the_rest(tmp_path):
    model, path = failed(tmp_path, hidden=Secret())
    assert "not for saving" in record_of(path)["no_model"]
    assert not (path / "model.keras").exists()
    assert tfamp.triage(model, path).cause == "data"


def test_a_bundle_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch, caplog):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(snapshot_files, "write_bundle", full)
    (recovery,) = recoveries(tmp_path, 3)
    assert recovery.cause == "data"
    assert "No bundle of the failure could be written" in caplog.text


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
