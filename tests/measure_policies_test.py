"""Policies chosen by timing a model's own step: what is picked, and what stays."""

import collections
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.refusals import refusals
from tests.styles import STYLES, assembled
from tfamp.tuning import measured_policies
from tfamp.tuning.measured_policies import PolicyTime, Racer, race

layers = keras.layers
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :1]
DENSE = layers.Dense(1)
POLICIES = ("mixed_bfloat16", "mixed_float16")

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def made(style="sequential", **options):
    parts = [layers.Dense(4, activation="relu"), layers.BatchNormalization()]
    model = assembled([*parts, layers.Dense(1)], style, (6,))
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


def raced(seconds, *, budget=20.0):
    """A measurement of steps that take a known time each, on a clock of their own.

    Preparing one takes half a second.
    """
    now = [0.0]

    def prepare(candidate):
        now[0] += 0.5
        took = seconds[candidate.name]

        def run(steps):
            now[0] += steps * took
            return steps * took

        return Racer(run, took)

    candidates = [
        PolicyTime(name.removesuffix(" with XLA"), name.endswith("XLA"))
        for name in seconds
    ]
    found = race("m", candidates, prepare, budget, {}, clock=lambda: now[0])
    return found, now[0]


def test_the_fastest_is_picked_with_its_ratio():
    times = {"float32": 0.2, "mixed_bfloat16": 0.1, "float32 with XLA": 0.25}
    found, _ = raced(times)
    assert (found.best.policy, found.best.jit_compile) == ("mixed_bfloat16", False)
    assert found.best.speedup == pytest.approx((2.0, 2.0, 2.0))
    assert "2.00 times as fast as float32" in found.reason
    assert "mixed_bfloat16" in found.table() and "best" in found.table()
    assert tfamp.Measurement.from_json(found.to_json()) == found


def test_the_budget_ends_it_and_what_is_hopeless_takes_few_turns():
    found, seconds = raced({"float32": 1.0, "mixed_bfloat16": 0.9}, budget=10.0)
    assert seconds <= 11.0
    found, _ = raced(
        {"float32": 0.1, "mixed_bfloat16": 0.1, "float32 with XLA": 0.1}, budget=1.5
    )
    assert found.times[2].note.startswith("not tried: those before took half of the")
    _, quick = raced({"float32": 0.1, "mixed_bfloat16": 0.09}, budget=1000)
    _, slow = raced({"float32": 0.1, "mixed_float16": 0.5}, budget=1000)
    assert slow < quick


@pytest.mark.quick("mixed_float16")
@pytest.mark.parametrize(
    "policy, style", [*zip(("float32", *POLICIES), STYLES, strict=False)]
)
def test_a_measured_model_is_as_it_was(style, policy):
    with tfamp.scope(policy, keep_float32=[layers.BatchNormalization]):
        model = made(style)
    model.fit(X, Y, verbose=0)
    before, optimizer = model.get_weights(), model.optimizer
    slots = [v.numpy() for v in optimizer.variables]
    dtypes = tfamp.PrecisionPlan.from_model(model).rows
    found = tfamp.measure_policies(
        model, (X, Y), jit_compile=False, policies=POLICIES, budget_seconds=10
    )
    assert [each.policy for each in found.times] == ["float32", *POLICIES]
    np.testing.assert_equal(model.get_weights(), before)
    np.testing.assert_equal([v.numpy() for v in model.optimizer.variables], slots)
    assert model.optimizer is optimizer
    assert tfamp.PrecisionPlan.from_model(model).rows == dtypes
    model.fit(X, Y, verbose=0)


@pytest.fixture
def bfloat16_is_faster(monkeypatch):
    """Has steps in bfloat16 take half of the time, and the others all of it."""

    def prepared(model, batches, candidate):
        is_fast = candidate == PolicyTime("mixed_bfloat16", False)
        return Racer(lambda steps: steps * (0.05 if is_fast else 0.1), 0.1)

    only = [PolicyTime("float32", False), PolicyTime("mixed_bfloat16", False)]
    monkeypatch.setattr(measured_policies, "candidates_of", lambda *given: only)
    monkeypatch.setattr(measured_policies, "_prepared", prepared)


@pytest.mark.quick("functional")
@pytest.mark.usefixtures("bfloat16_is_faster")
@pytest.mark.parametrize("style", ["functional", "subclassed"])
def test_measure_trains_under_the_fastest_from_the_first_step(style):
    with tfamp.scope("measure", keep_float32=[layers.BatchNormalization]):
        model = made(style)
        assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}
        model.fit(X, Y, verbose=0)
        assert "mixed_bfloat16: 2.00 times as fast" in tfamp.status().why
        plan = tfamp.PrecisionPlan.from_model(model)
    assert [r.compute_dtype for r in plan.rows if r.class_name == "Dense"] == [
        "bfloat16",
        "float32",
    ]
    kept = [r for r in plan.rows if r.class_name == "BatchNormalization"]
    assert kept[0].rule.startswith("keep_float32")
    assert plan.evidence["measured"]["times"]
    weights = model.get_weights()
    model.fit(X, Y, verbose=0)  # and not again
    assert not np.array_equal(weights[0], model.get_weights()[0])


@pytest.mark.slow("XLA compiles for ten seconds")
@pytest.mark.usefixtures("bfloat16_is_faster")
def test_xla_stays_as_compile_was_told():
    with tfamp.scope("measure"):
        model = made(jit_compile=True)
        model.fit(X, Y, verbose=0)
    assert model.jit_compile is True


class Autoencoder(keras.Model):
    """Trains by a step of its own, on inputs alone."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(4)
        self.outer = layers.Dense(6)

    def call(self, x):
        return self.outer(self.inner(x))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(data) - data))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]


@pytest.mark.quick("inputs alone")
@pytest.mark.parametrize("data", ["inputs alone", "a PyDataset"])
def test_measure_takes_what_fit_takes(data, monkeypatch):
    only = [PolicyTime("float32", False)]
    monkeypatch.setattr(measured_policies, "candidates_of", lambda *given: only)
    with tfamp.scope("measure"):
        alone = data == "inputs alone"
        model = Autoencoder() if alone else made()
        model.compile("sgd", None if alone else "mse")
        model.fit(X if alone else Batches(), verbose=0)
        assert tfamp.status().why.startswith("measured: float32")


@pytest.mark.parametrize("why", ["no kernel", "can be read only once"])
def test_what_cannot_be_measured_trains_in_float32_and_that_is_said(
    why, monkeypatch, caplog
):
    def fails(model, batches, candidate):
        raise ValueError("no kernel")

    def batches():
        while True:
            yield X, Y

    monkeypatch.setattr(measured_policies, "_prepared", fails)
    data = (X, Y) if why == "no kernel" else (batches(),)
    with tfamp.scope("measure"):
        model = made()
        model.fit(*data, steps_per_epoch=1, verbose=0)
    assert why in caplog.text
    assert model.layers[0].compute_dtype == "float32"


def asked(model, **options):
    return lambda: tfamp.measure_policies(model(), (X, Y), **options)


WRONG = {
    "no model": (asked(lambda: 3), "expected a compiled", TypeError),
    "a policy": (asked(made, policies=["int8"]), "int8"),
    "not compiled": (asked(lambda: keras.Sequential([DENSE])), "is not compiled"),
}
test_wrong_use_is_a_clear_error = refusals(WRONG)


def test_what_devices_have_no_units_for_is_tried_only_where_it_is_asked_for(
    monkeypatch,
):
    def objection(policy, devices):
        return "slow here" if "float16" in policy else None

    monkeypatch.setattr(measured_policies.devices, "objection", objection)
    found = measured_policies.candidates_of(None, False)
    notes = {each.policy: each.note for each in found}
    assert notes["float32"] == ""
    assert notes["mixed_float16"] == "not tried: slow here"
    asked = measured_policies.candidates_of(["mixed_float16"], False)
    assert asked == [PolicyTime("float32", False), PolicyTime("mixed_float16", False)]


# --- how often a policy that takes the same time as float32 is preferred

STEP_SECONDS = 0.005
EVERY_WAY = [
    PolicyTime(policy, xla)
    for xla in (False, True)
    for policy in measured_policies.POLICIES
]


class Machine:
    """Steps whose times scatter, and whose made up clock is what they took together."""

    def __init__(self, seed, noise, gain=1.0, has_bursts=False, drift=0.0):
        self.random, self.noise, self.gain = random.Random(seed), noise, gain
        self.has_bursts, self.drift, self.now = has_bursts, drift, 0.0

    def prepare(self, candidate):
        gain = self.gain if candidate.policy != "float32" else 1.0
        return Racer(lambda steps: self.seconds_of(steps, gain), STEP_SECONDS)

    def seconds_of(self, steps, gain):
        factor = math.exp(self.random.gauss(0.0, self.noise)) + self.drift * self.now
        if self.has_bursts and self.random.random() < 0.1:
            factor *= 1 + self.random.expovariate(1.0)
        seconds = STEP_SECONDS * steps * factor / gain
        self.now += seconds
        return seconds


def picked(candidates, times, **how):
    """Returns how often each policy is the best of that many measurements."""
    found = collections.Counter()
    for seed in range(times):
        machine = Machine(seed, **how)
        given = (candidates, machine.prepare, 20.0, {})
        measured = race("model", *given, clock=lambda m=machine: m.now)
        found[measured.best.name] += 1
    return found


@pytest.mark.quick("2-even-0.02")
@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("has_bursts", [False, True], ids=["even", "bursts"])
@pytest.mark.parametrize("number", [2, 6])
def test_of_policies_that_take_the_same_time_float32_is_kept(number, has_bursts, noise):
    times = 300
    found = picked(EVERY_WAY[:number], times, noise=noise, has_bursts=has_bursts)
    others = times - found["float32"]
    # 2 %, and what 300 draws may be off it by.
    assert others <= 0.02 * times + 2 * math.sqrt(0.02 * 0.98 * times)


def test_neither_drift_nor_a_gain_of_less_than_5_percent_is_a_gain():
    # A machine that gets slower slows all alike.
    assert picked(EVERY_WAY, 50, noise=0.01, drift=0.5)["float32"] == 50
    assert picked(EVERY_WAY[:2], 100, noise=0.003, gain=1.04)["float32"] == 100


@pytest.mark.parametrize(("gain", "noise"), [(1.1, 0.05), (1.3, 0.1)])
def test_a_gain_that_is_worth_a_change_is_picked(gain, noise):
    found = picked(EVERY_WAY[:2], 100, noise=noise, gain=gain)
    assert found["mixed_bfloat16"] >= 95
