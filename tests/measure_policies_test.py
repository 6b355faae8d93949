"""Policies chosen by timing a model's own step: what is picked, and what stays."""

import json
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, assembled
from tfamp.stepping.unchanged import unchanged
from tfamp.tuning import measured_policies, races
from tfamp.tuning.measured_policies import Measuring
from tfamp.tuning.races import Candidate, Prepared, Racer

layers = keras.layers
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
Y = X[:, :1]

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def made(style="sequential", **options):
    parts = [layers.Dense(4, activation="relu"), layers.BatchNormalization()]
    model = assembled([*parts, layers.Dense(1)], style, (6,))
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Steps:
    """Steps that take a known time each, and as long to prepare as is said."""

    def __init__(self, seconds, prepare=None, few=None):
        self.clock, self.seconds = Clock(), seconds
        self.prepare_seconds, self.few = prepare or {}, few or {}
        self.probed = []

    def prepare(self, candidate):
        took = self.prepare_seconds.get(candidate.name, 0.5)
        self.clock.now += took
        seconds = self.seconds[candidate.name]
        if seconds is None:
            return Prepared(candidate, None, took, "cannot run: no kernel")

        def run(steps):
            self.clock.now += steps * seconds
            return steps * seconds

        return Prepared(candidate, Racer(candidate.name, run, seconds), took, "")

    def probe(self, candidate, num_examples):
        self.probed.append(candidate.name)
        return self.few.get(candidate.name, 1.0)


def measured(seconds, *, budget=20.0, max_steps=200, names=None, **options):
    steps = Steps(seconds, **options)
    candidates = [
        Candidate(name.removesuffix(" with XLA"), name.endswith("XLA"))
        for name in names or seconds
    ]
    run = Measuring("m", steps, budget, max_steps, clock=steps.clock)
    return run.run(candidates, {}), steps


@pytest.fixture
def fast_units(monkeypatch):
    """All policies are worth whole batches."""
    monkeypatch.setattr(measured_policies.devices, "objection", lambda *given: None)


@pytest.mark.usefixtures("fast_units")
def test_the_fastest_is_picked_with_its_ratio():
    found, _ = measured(
        {"float32": 0.2, "mixed_bfloat16": 0.1, "float32 with XLA": 0.25}
    )
    assert (found.best.policy, found.best.jit_compile) == ("mixed_bfloat16", False)
    assert found.best.speedup == pytest.approx((2.0, 2.0, 2.0))
    assert found.is_clear
    assert "2.00 times as fast as float32" in found.reason
    assert "mixed_bfloat16" in found.table() and "best" in found.table()


@pytest.mark.usefixtures("fast_units")
def test_what_is_not_faster_by_more_than_the_noise_is_not_picked():
    found, _ = measured({"float32": 0.1, "mixed_bfloat16": 0.1, "mixed_float16": 0.2})
    assert found.best.policy == "float32"
    assert "no other policy was shown to be faster" in found.reason


@pytest.mark.usefixtures("fast_units")
def test_of_policies_within_three_percent_the_simpler_is_picked():
    found, _ = measured(
        {"float32": 0.2, "mixed_bfloat16": 0.1, "mixed_bfloat16 with XLA": 0.0985}
    )
    assert found.best.name == "mixed_bfloat16"


@pytest.mark.usefixtures("fast_units")
def test_of_short_steps_as_many_run_as_show_a_difference():
    """Of 1 ms each, ten times as many take the time of `max_steps` of 10 ms."""
    many, steps = measured({"float32": 0.001, "mixed_bfloat16": 0.000995}, max_steps=4)
    assert 4 * 2 * 0.01 <= steps.clock.now - 1.0 <= 4 * 2 * 0.01 + 0.05
    few, _ = measured({"float32": 0.1, "mixed_bfloat16": 0.0995}, max_steps=4)
    assert many.num_steps > 4 * 2
    assert few.num_steps == 4 * 2


@pytest.mark.usefixtures("fast_units")
def test_what_cannot_run_or_is_beyond_the_budget_is_said():
    found, steps = measured(
        {
            "float32": 0.1,
            "mixed_bfloat16": None,
            "float32 with XLA": 0.01,
        },
        budget=4.0,
        prepare={"float32": 1.0},
    )
    notes = {each.name: each.note for each in found.times}
    assert notes["mixed_bfloat16"] == "cannot run: no kernel"
    assert notes["float32 with XLA"].startswith("not tried: preparing it would take")
    assert found.best.policy == "float32"
    assert steps.clock.now <= 4.5
    found, _ = measured(
        {"float32": 0.1, "float32 with XLA": 0.1, "mixed_bfloat16 with XLA": 0.1},
        budget=4.0,
        prepare={"float32": 1.0},
    )
    assert [each.note.rpartition("about ")[2] for each in found.times[1:]] == [
        "4.0 s, beyond the budget",
        "4.0 s, beyond the budget",
    ]


def test_a_policy_without_units_is_tried_on_a_few_examples_first(monkeypatch):
    monkeypatch.setattr(
        measured_policies.devices,
        "objection",
        lambda policy, devices: "slow" if policy == "mixed_float16" else None,
    )
    found, steps = measured(
        {"float32": 0.1, "mixed_float16": 60.0, "mixed_float16 with XLA": 60.0},
        few={"float32": 0.01, "mixed_float16": 0.9},
    )
    assert [each.note for each in found.times[1:]] == 2 * [
        "90.0 times as slow as float32 on 2 examples"
    ]
    assert steps.probed == ["float32", "mixed_float16"]


@pytest.mark.slow
@pytest.mark.usefixtures("fast_units")  # or two slow examples may rule it out
def test_a_policy_whose_every_step_is_skipped_is_not_timed():
    inputs = keras.Input((6,))
    far = layers.Lambda(lambda x: tf.square(x * 1e4) / 1e4 / 1e4)(inputs)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(far)))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    found = tfamp.measure_policies(
        *(model, (X, Y)), policies=["mixed_float16"], jit_compile=False
    )
    assert found.best.policy == "float32"
    assert found.times[1].step_seconds is None
    assert found.times[1].note.startswith(
        "cannot run: its gradients were not finite in 20 steps in a row; `tfamp.tune`"
    )


def test_a_step_that_fails_in_float32_is_an_error():
    with pytest.raises(ValueError, match="fails in float32: cannot run: no kernel"):
        measured({"float32": None, "mixed_bfloat16": 0.1})


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("policy", ["", "mixed_bfloat16", "mixed_float16"])
def test_a_measured_model_is_as_it_was(style, policy):
    if policy:
        with tfamp.scope(policy, keep_float32=[layers.BatchNormalization]):
            model = made(style)
    else:
        model = made(style)
    model.fit(X, Y, verbose=0)
    before, optimizer = model.get_weights(), model.optimizer
    slots = [v.numpy() for v in optimizer.variables]
    dtypes = tfamp.PrecisionPlan.from_model(model).rows
    found = tfamp.measure_policies(
        model, (X, Y), jit_compile=False, max_steps=4, budget_seconds=60
    )
    assert [each.policy for each in found.times][0] == "float32"
    assert {each.policy for each in found.times} == set(measured_policies.POLICIES)
    np.testing.assert_equal(model.get_weights(), before)
    np.testing.assert_equal([v.numpy() for v in model.optimizer.variables], slots)
    assert model.optimizer is optimizer
    assert tfamp.PrecisionPlan.from_model(model).rows == dtypes
    model.fit(X, Y, verbose=0)


def test_a_step_is_traced_once_though_metrics_were_given_by_names():
    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data):
            traces.append(1)
            return super().train_step(data)

    model = Traced([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae", "accuracy"])
    tfamp.measure_policies(model, (X, Y), policies=["float32"], jit_compile=False)
    assert len(traces) == 1


def test_a_trace_for_each_policy_is_no_reason_to_warn(retracing):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    steps = races.PolicySteps(model, [(X, Y)])
    with unchanged(model), races.put_back(model):
        for _ in range(5):
            assert steps.prepare(Candidate("float32", False)).racer is not None
    assert retracing() == []


@pytest.mark.slow
def test_xla_is_timed_too_and_put_back():
    model = made(jit_compile=False)
    found = tfamp.measure_policies(model, (X, Y), policies=["float32"], max_steps=4)
    assert [each.name for each in found.times] == ["float32", "float32 with XLA"]
    assert model.jit_compile is False


def test_a_measurement_leaves_nothing_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tfamp.measure_policies(
        made(), (X, Y), policies=["float32"], jit_compile=False
    )
    assert found.best.policy == "float32"
    assert not [path for path in tmp_path.rglob("*") if "tfamp" in path.parts]


def faster(policy):
    """Returns `PolicySteps.prepare` for which one policy is twice as fast."""

    def prepare(self, candidate):
        is_fast = candidate.policy == policy and not candidate.jit_compile
        seconds = 0.05 if is_fast else 0.1
        racer = Racer(candidate.name, lambda steps: steps * seconds, seconds)
        return Prepared(candidate, racer, 0.01, "")

    return prepare


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_measure_trains_under_the_fastest_from_the_first_step(style, monkeypatch):
    monkeypatch.setattr(races.PolicySteps, "prepare", faster("mixed_bfloat16"))
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


def test_what_a_network_inside_was_traced_with_is_forgotten():
    dense = [keras.layers.Dense(3) for _ in range(2)]
    inner = keras.Sequential([keras.Input((4,)), *dense])
    model = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    x = np.full((1, 4), 1 / 3, np.float32)
    before = inner.predict(x, verbose=0)
    with races.put_back(model):
        tfamp.apply(model, "mixed_bfloat16")
        assert not np.array_equal(inner.predict(x, verbose=0), before)
    np.testing.assert_array_equal(inner.predict(x, verbose=0), before)


@pytest.mark.slow
def test_each_model_of_a_program_is_measured(monkeypatch):
    monkeypatch.setattr(races.PolicySteps, "prepare", faster("mixed_bfloat16"))
    with tfamp.scope("measure"):
        models = [made() for _ in range(2)]
        for model in models:
            model.fit(X, Y, verbose=0)
    assert [model.layers[0].compute_dtype for model in models] == 2 * ["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False])
def test_xla_stays_as_compile_was_told(told, monkeypatch):
    monkeypatch.setattr(races.PolicySteps, "prepare", faster("mixed_bfloat16"))
    with tfamp.scope("measure"):
        model = made(jit_compile=told)
        model.fit(X, Y, verbose=0)
    assert model.jit_compile is told


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
    only = [Candidate("float32", False)]
    monkeypatch.setattr(measured_policies, "candidates_of", lambda *given: only)
    with tfamp.scope("measure"):
        alone = data == "inputs alone"
        model = Autoencoder() if alone else made()
        model.compile("sgd", None if alone else "mse")
        model.fit(X if alone else Batches(), verbose=0)
        assert tfamp.status().why.startswith("measured: float32")


@pytest.mark.slow
def test_a_step_that_cannot_be_measured_trains_in_float32_all_the_same(
    monkeypatch, caplog
):
    def fails(self, candidate):
        return Prepared(candidate, None, 0.0, "cannot run: no kernel")

    monkeypatch.setattr(races.PolicySteps, "prepare", fails)
    with tfamp.scope("measure"):
        model = made()
        model.fit(X, Y, verbose=0)
    assert "cannot run: no kernel" in caplog.text
    assert model.layers[0].compute_dtype == "float32"


def test_data_that_can_be_read_once_is_left_alone_and_that_is_said(caplog):
    def batches():
        while True:
            yield X, Y

    with tfamp.scope("measure"):
        model = made()
        model.fit(batches(), steps_per_epoch=2, verbose=0)
    assert "of type generator, can be read only once" in caplog.text
    assert model.layers[0].compute_dtype == "float32"


WRONG = {
    "no model": (lambda: tfamp.measure_policies(3, (X, Y)), "expected a compiled"),
    "a policy": (
        lambda: tfamp.measure_policies(made(), (X, Y), policies=["int8"]),
        "int8",
    ),
    "no budget": (
        lambda: tfamp.measure_policies(made(), (X, Y), budget_seconds=0),
        "budget_seconds",
    ),
    "no data": (
        lambda: tfamp.measure_policies(
            made(), tf.data.Dataset.from_tensor_slices((X[:0], Y[:0])).batch(2)
        ),
        "holds no batches",
    ),
    "not compiled": (
        lambda: tfamp.measure_policies(keras.Sequential([layers.Dense(1)]), (X, Y)),
        "is not compiled",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_a_clear_error(case):
    call, text = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        call()


def test_a_measurement_goes_to_json_and_back():
    found, _ = measured({"float32": 0.1})
    again = tfamp.Measurement.from_json(found.to_json())
    assert again == found
    assert json.loads(found.to_json())["class"] == "Measurement"
