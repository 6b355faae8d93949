"""`NanRecovery`: a failing fit goes back to its last good state, and on from there."""

import json
import os
import re
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import OwnStep
from tests.refusals import refusals, refused_arguments
from tests.styles import Subclassed
from tfamp.callbacks import NanRecovery, Recovery, RecoveryError

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
    """Waits for no disk; `snapshots_test.py` kills processes instead."""
    monkeypatch.setattr(os, "fsync", lambda number: None)


def data(*bad, value=np.nan):
    """Batches of all epochs in a row; those at the steps `bad` hold `value`."""
    x = X.copy()
    for step in bad:
        x[step * BATCH] = value
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH)


def linear(optimizer=None, kind=keras.Sequential, hidden=None, **options):
    keras.utils.set_random_seed(7)
    layers = [hidden or keras.layers.Dense(4), keras.layers.Dense(1)]
    if kind is keras.Model:
        inputs = keras.Input((3,))
        model = keras.Model(inputs, layers[1](layers[0](inputs)))
    elif kind is keras.Sequential:
        model = keras.Sequential([keras.Input((3,)), *layers])
    else:
        model = kind(layers)
    model.compile(
        keras.optimizers.SGD(0.02) if optimizer is None else optimizer,
        "mse",
        **{"run_eagerly": True, **options},
    )
    return model


def fit(model, batches, recovery, *others, **options):
    settings = {"epochs": EPOCHS, "steps_per_epoch": STEPS, "verbose": 0, **options}
    return model.fit(batches, callbacks=[*others, recovery], **settings)


def often(folder, **options):
    """Takes a snapshot every second step."""
    return NanRecovery(folder, **{"every_seconds": 0, **options})


def quality(model):
    return model.evaluate(CLEAN_X, CLEAN_Y, verbose=0, batch_size=400)


class Own(OwnStep, Subclassed):
    """Makes its weights late, and has logs of its own."""

    def train_step(self, batch):
        loss = super().train_step(batch)["own_loss"]
        return {"loss": loss, "twice": 2 * loss}


WAYS = {
    "functional": dict(kind=keras.Model),
    "sequential": {},
    "own train_step": dict(kind=Own),
    "graph": dict(run_eagerly=False),
    "jit": dict(run_eagerly=False, jit_compile=True),
    "several steps a call": dict(run_eagerly=False, steps_per_execution=2),
    "own train_step in a graph": dict(kind=Own, run_eagerly=False),
}


@pytest.fixture(scope="module")
def undisturbed():
    """Quality of a run without the fault."""
    model = linear()
    model.fit(data(), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=0)
    return quality(model)


@pytest.mark.quick("functional", "own train_step in a graph")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_bad_batch_in_epoch_2_is_dropped_and_quality_is_kept(
    way, undisturbed, tmp_path
):
    model, recovery = linear(**way), often(tmp_path)
    run = fit(model, data(STEPS + 3), recovery)
    assert run.history["recoveries"] == [0, 1, 1, 1]
    assert np.all(np.isfinite(run.history["loss"]))
    found = [(each.epoch, each.cause, each.remedy) for each in recovery.recoveries]
    assert found == [(1, "data", "drop batch")]  # by tfamp's own triage
    assert run.recoveries == recovery.recoveries
    assert quality(model) == pytest.approx(undisturbed, rel=0.01)


def test_the_model_goes_back_bit_by_bit_and_on_with_the_next_batch(tmp_path):
    optimizer = keras.optimizers.Adam(0.05)
    model = linear(optimizer)
    run = fit(model, data(5), often(tmp_path), epochs=1)
    # Snapshots follow steps 1, 3 and 5; that of step 5 was never proven.
    assert run.recoveries[0].restored_step == 3
    twin = linear(keras.optimizers.Adam(0.05))
    kept = [(X[i * 4 : i * 4 + 4], Y[i * 4 : i * 4 + 4]) for i in (0, 1, 2, 6, 7)]
    for x, y in kept:
        twin.train_on_batch(x, y)
    for mine, other in zip(model.variables, twin.variables, strict=True):
        assert mine.numpy().tobytes() == other.numpy().tobytes()
    assert int(optimizer.iterations.numpy()) == 5
    # With the failure a step later that of step 5 has proven itself.
    run = fit(linear(), data(6), often(tmp_path), epochs=1)
    assert run.recoveries[0].restored_step == 5


def test_bad_weights_behind_a_finite_loss_prove_no_snapshot(tmp_path):
    """Seen after the very step, so the snapshot of the step before is not trusted."""
    (each,) = recoveries(tmp_path, 5, model=hiding(), triage="data")
    assert (each.step, each.restored_step) == (6, 3)


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
        self._note()

    def on_epoch_end(self, epoch, logs=None):
        self._note()

    def _note(self):
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


def hiding():
    """Its moving statistics get NaN while its loss stays finite."""
    keras.utils.set_random_seed(7)
    inputs, options = keras.Input((3,)), {"center": False, "scale": False}
    seen = keras.layers.BatchNormalization(name="statistics", **options)(inputs)
    outputs = keras.layers.Dense(1)(Hidden()(inputs)) + 0 * Hidden()(seen)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


# Keras says so at the end of any data of unknown length.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("is_known", [True, False], ids=["known length", "unknown"])
def test_weights_are_judged_before_the_epoch_ends_where_the_loss_is_finite(
    is_known, tmp_path
):
    model, seen = hiding(), Seen()
    batches = data(STEPS - 3).take(STEPS)
    if not is_known:
        batches = batches.filter(lambda x, y: True)
    recovery = NanRecovery(tmp_path, every_seconds=1e6)
    fit(model, batches, recovery, seen, steps_per_epoch=None, epochs=1)
    assert [each.sign for each in recovery.recoveries] == [
        f"{model.get_layer('statistics').moving_mean.path} holds values that are not "
        "finite"
    ]
    assert seen.weights[-1]


def test_a_snapshot_with_a_bad_slot_is_no_candidate(tmp_path):
    model = linear(keras.optimizers.SGD(0.02, momentum=0.9))

    class Spoil(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 3:
                self.model.optimizer.variables[-1].assign([np.inf])

    recovery = NanRecovery(tmp_path, every_seconds=0, max_recoveries=1)
    fit(model, data(), recovery, Spoil(), epochs=1)
    assert len(recovery.recoveries) == 1
    assert np.all(np.isfinite(model.optimizer.variables[-1].numpy()))


def recoveries(folder, *bad, model=None, triage=None, value=np.nan, **options):
    """What is done in an epoch, or in `epochs`, with bad batches."""
    epochs = options.pop("epochs", 1)
    triage = named(triage) if isinstance(triage, str) else triage
    recovery = often(folder, triage=triage, **options)
    fit(model or linear(), data(*bad, value=value), recovery, epochs=epochs)
    return recovery.recoveries


def named(cause, layer=None, remedy="", layers=()):
    """A triage that always gives this verdict, and notes what it was asked."""

    def triage(model, batch):
        asked.append(([v.numpy() for v in model.variables], batch))
        return types.SimpleNamespace(
            cause=cause, layer=layer, remedy=remedy, layers=layers
        )

    asked = []
    triage.asked = asked
    return triage


def test_a_cut_lasts_when_a_snapshot_from_before_it_comes_back(tmp_path):
    model = linear(keras.optimizers.SGD(0.5))
    # Never a snapshot but the first, so each recovery goes back behind the cut before.
    options = {"every_seconds": 1e6, "triage": "optimizer", "model": model}
    details = [each.detail for each in recoveries(tmp_path, 2, 4, 6, **options)]
    assert details == ["0.5 -> 0.25", "0.25 -> 0.125", "0.125 -> 0.0625"]
    assert float(model.optimizer.learning_rate.numpy()) == 0.0625


def huge_inside():
    """float16 ends at 65504; what makes and what takes 1e6 overflows."""
    layers = [
        keras.layers.Dense(3, name="low", use_bias=False),
        keras.layers.Rescaling(1e6, name="huge"),
        keras.layers.Rescaling(1e-6, name="back"),
        keras.layers.Dense(1, name="head"),
    ]
    return keras.Sequential([keras.Input((3,)), *layers])


@pytest.mark.slow
def test_a_recovery_leaves_the_plan_that_the_next_run_begins_with(tmp_path):
    def made():
        model = huge_inside()
        model.compile(keras.optimizers.Adam(0.02), "mse", run_eagerly=True)
        return model

    keras.utils.set_random_seed(7)
    triage = named("precision", layers=("huge", "back"))
    with tfamp.scope("mixed_float16"):
        first = fit(made(), data(), often(tmp_path, triage=triage))
    assert [each.remedy for each in first.recoveries] == ["keep in float32"]
    plan = tfamp.PrecisionPlan.from_json(tmp_path / "plan.json")
    assert plan.kept["huge"] == plan.kept["back"] == "NanRecovery"
    assert plan.evidence["recovery"]["remedy"] == "keep in float32"
    with tfamp.scope(tmp_path / "plan.json"):
        model = made()
        second = fit(model, data(), often(tmp_path / "next", triage=triage))
    assert second.recoveries == ()
    assert not (tmp_path / "next" / "plan.json").exists()
    assert model.get_layer("low").compute_dtype == "float16"


class Root(keras.layers.Layer):
    """Finite forward at 0, where its gradient is 0 times infinity."""

    def build(self, shape):
        self.factor = self.add_weight(name="factor", shape=(), initializer="ones")

    def call(self, x):
        return x + tf.sqrt(self.factor * x**2)


def rooted(optimizer, **options):
    return linear(optimizer, hidden=Root(), **options)


def guard(**options):
    settings = {"initial_scale": 1.0, "dynamic": False, "max_consecutive_skips": 2}
    return tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.01), **{**settings, **options}
    )


@pytest.mark.quick("graph")
@pytest.mark.parametrize("way", ["sequential", "graph", "jit"])
def test_the_error_of_a_stalled_loss_scale_ends_no_training(way, tmp_path):
    model = rooted(guard(), **WAYS[way])
    recovery = often(tmp_path, triage=named("none"))
    run = fit(model, data(12, 13, value=0.0), recovery)
    assert [each.remedy for each in run.recoveries] == ["drop batch"]
    assert run.recoveries[0].sign.startswith("Skipped 2 updates in a row")
    assert len(run.history["loss"]) == EPOCHS
    rate = model.optimizer.inner_optimizer.learning_rate
    assert float(rate.numpy()) == pytest.approx(0.01)


@pytest.fixture
def no_time_passes(monkeypatch):
    """Has everything that is looked at now and then be looked at after each step."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


@pytest.mark.usefixtures("no_time_passes")
def test_a_scale_at_its_floor_is_a_failure_after_8_skips_in_a_row(tmp_path):
    optimizer = guard(dynamic=True, min_scale=0.5, max_consecutive_skips=None)
    options = {"triage": "none", "value": 0.0, "epochs": EPOCHS}
    model = rooted(optimizer)
    (each,) = recoveries(tmp_path, *range(2, 11), model=model, **options)
    text = "the loss scale stands at 0.5 after 8 skipped steps in a row"
    assert (each.step, each.sign) == (10, text)


@pytest.mark.usefixtures("no_time_passes")
def test_keras_own_loss_scale_is_a_failure_when_it_has_fallen(tmp_path):
    inner = keras.optimizers.SGD(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**-12)
    options = {"triage": "none", "value": 0.0}
    found = recoveries(tmp_path, 2, 3, 4, model=rooted(optimizer), **options)
    assert found[0].sign == "the loss scale has fallen to 3.05176e-05"
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**-12


SCALES = {
    "lowered": ("", 2.0**15, "32768 -> 2048", 2.0**11),
    "raised": ("Raise the loss scale.", 2.0**3, "8 -> 128", 2.0**7),
    "no further than its floor": ("", 2.0, "2 -> 0.5", 0.5),
}


@pytest.mark.quick("lowered")
@pytest.mark.parametrize("remedy, first, detail, last", SCALES.values(), ids=SCALES)
def test_the_loss_scale_is_moved_within_its_bounds(
    remedy, first, detail, last, tmp_path
):
    optimizer = guard(dynamic=True, initial_scale=first, min_scale=0.5)
    triage = named("loss scale", remedy=remedy)
    (each,) = recoveries(tmp_path, 3, model=linear(optimizer), triage=triage)
    assert (each.remedy, each.detail) == ("move loss scale", detail)
    assert float(optimizer.dynamic_scale.numpy()) == last


@pytest.mark.quick("a step a call")
@pytest.mark.parametrize("steps", [1, 4], ids=["a step a call", "several"])
def test_the_triage_is_asked_with_good_weights_and_the_failing_batch(steps, tmp_path):
    triage = named("data")
    model = linear(run_eagerly=False, steps_per_execution=steps)
    recoveries(tmp_path, 3, model=model, triage=triage)
    ((weights, (x, y)),) = triage.asked
    assert all(np.all(np.isfinite(weight)) for weight in weights)
    rows = slice(3 * BATCH, 4 * BATCH)
    assert np.isnan(x[0]).all() and np.array_equal(x[1:], X[rows][1:])
    assert np.array_equal(y, Y[rows])


def test_a_triage_that_fails_has_batches_dropped(tmp_path, caplog):
    found = recoveries(tmp_path, 3, 5, triage=lambda model, batch: {}["nothing"])
    remedies = [(each.cause, each.remedy) for each in found]
    assert remedies == [("", "drop batch")] * 2
    lines = (tmp_path / "recoveries.jsonl").read_text().splitlines()
    assert [Recovery.from_dict(json.loads(x)) for x in lines] == list(found)
    assert "The triage failed" in caplog.text and "nothing" in caplog.text


def endless(folder, **options):
    """Each batch from the second on is bad."""
    model = linear()
    recovery = often(folder, **{"max_recoveries": 2, **options})
    return model, recovery, data(*range(2, EPOCHS * STEPS))


def test_after_the_last_recovery_an_error_tells_what_was_tried(tmp_path):
    model, recovery, batches = endless(tmp_path, triage=named("none"))
    with pytest.raises(RecoveryError) as caught:
        fit(model, batches, recovery)
    text = str(caught.value)
    assert text.startswith(
        "Training was stopped at epoch 1, step 5: loss is nan, and `max_recoveries` 2 "
        "are used up; expected a remedy to help. The model is as it was at step 1, its "
        "last good snapshot."
    )
    lines = text.splitlines()[1:]
    assert lines[0].split()[0] == "epoch" and len(lines) == 4
    assert "drop batch" in lines[1] and "drop batch" in lines[2]
    assert "stop" in lines[3]
    assert caught.value.recoveries == recovery.recoveries
    assert all(np.all(np.isfinite(v.numpy())) for v in model.variables)


def test_a_fault_of_the_model_stops_at_once_with_the_advice_of_the_triage(tmp_path):
    triage = named("model", "root", "Add an epsilon under the root.")
    recovery = often(tmp_path, triage=triage)
    with pytest.raises(RecoveryError, match="no remedy is left") as caught:
        fit(linear(), data(3), recovery)
    assert "Add an epsilon under the root." in str(caught.value)
    assert len(recovery.recoveries) == 1


def test_a_snapshot_that_helped_twice_to_nothing_gives_way_to_an_older_one(tmp_path):
    """Snapshots of steps 1, 3 and 5 are proven; later steps fail at once."""
    recovery = often(tmp_path, triage=named("data"), max_recoveries=4)
    fit(linear(), data(*range(6, 10)), recovery)
    assert [each.restored_step for each in recovery.recoveries] == [5, 5, 3, 3]


def test_several_workers_are_refused_with_what_works_there(tmp_path, monkeypatch):
    workers = tf.distribute.MultiWorkerMirroredStrategy
    spread = property(lambda self: workers.__new__(workers))
    monkeypatch.setattr(keras.Model, "distribute_strategy", spread)
    recovery = NanRecovery(tmp_path)
    recovery.set_model(keras.Sequential())
    message = (
        "Leave it out, and train with `tfamp.LossScaleOptimizer(optimizer)`, which "
        "skips a bad step on all of them alike, and `tfamp.callbacks.Resume`, which "
        "brings all back to one step."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        recovery.on_train_begin()


def test_training_that_begins_with_bad_weights_is_refused(tmp_path):
    model = linear()
    model.layers[0].bias.assign([1, np.nan, np.inf, 1])
    with pytest.raises(ValueError) as caught:
        fit(model, data(), often(tmp_path))
    assert str(caught.value).startswith(
        "Training begins with 2 weights or optimizer values that are not finite, the "
        f"first in {model.layers[0].bias.path!r}; expected finite ones. Load a good"
    )


def test_a_loss_that_runs_away_proves_nothing_until_it_stays(tmp_path):
    """From step 8 on the loss is 400 times what it was."""
    x = np.ones((24 * BATCH, 3), np.float32)
    y = np.where(np.arange(len(x)) < 8 * BATCH, 1.0, 20.0)[:, None].astype("float32")
    x[20 * BATCH] = np.nan
    model = linear(keras.optimizers.SGD(0.0))
    model.layers[1].kernel.assign(np.zeros((4, 1)))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    recovery = often(tmp_path, triage=named("data"))
    run = fit(model, batches, recovery, epochs=1, steps_per_epoch=24)
    assert [each.restored_step for each in run.recoveries] == [7]


test_arguments_are_checked = refused_arguments(
    lambda **given: NanRecovery(**{"directory": "x", **given}),
    ("every_seconds", -1.0, ";"),
    ("max_recoveries", -1, ";"),
    ("learning_rate_factor", 1.0, "; expected a number above 0 and below 1."),
    ("directory", None, ", of type", TypeError),
)
test_names_are_checked = refusals(
    {
        "remedy": (
            dict(remedies=["drop batches"]),
            "Unknown `remedies` 'drop batches'; expected 'drop batch', 'cut learning",
        ),
        "end": (dict(on_exhausted="ignore"), "Unknown `on_exhausted` 'ignore'"),
    },
    lambda given: NanRecovery("x", **given),
)
