"""`tfamp.tune`: the layers that need float32 are found, and the metric holds."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import assembled
from tfamp.trials import scores
from tfamp.trials.run_records import Run, file_name
from tfamp.tuning.search import Judge

layers = keras.layers
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(2048, 8)).astype("float32")
Y = (X[:, :2].sum(axis=1) > 0).astype("int32")

pytestmark = pytest.mark.filterwarnings(
    "ignore:'mixed_float16' will be slow", "ignore:overflow encountered in cast"
)


@keras.saving.register_keras_serializable("tfamp_tests")
class Squares(layers.Layer):
    """Goes beyond the range of float16 on its way, and comes back."""

    def call(self, x):
        return tf.square(x * 1e4) / 1e8 + x


def made(places=(), style="sequential", width=16):
    keras.utils.set_random_seed(1)
    parts = []
    for place in range(3):
        parts.append(layers.Dense(width, activation="relu", name=f"dense_{place}_"))
        if place in places:
            parts.append(Squares(name=f"squares_{place}_"))
    model = assembled([*parts, layers.Dense(2, name="head")], style, (8,))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    return model


def trained(*given, **options):
    model = made(*given, **options)
    model.fit(X, Y, batch_size=256, verbose=0)
    return model


def tuned(model, **options):
    given = {"policy": "mixed_float16", "tolerance": 0.02, "metric": "accuracy"}
    return tfamp.tune(model, (X, Y), batch_size=128, **{**given, **options})


def kept_by_tune(plan):
    return {row.path.split("/")[-1] for row in plan.rows if row.rule == "tune"}


@pytest.mark.quick("functional")
@pytest.mark.parametrize("style", ["functional", "subclassed"])
def test_only_the_guilty_layer_is_in_float32(style):
    model = trained((1,), style)
    before = model.get_weights()
    plan = tuned(model)
    assert kept_by_tune(plan) == {"squares_1_"}
    tuning = plan.evidence["tuning"]
    assert len(tuning["evaluations"]) + 1 <= 12
    assert tuning["confirmed"]["holds"]
    np.testing.assert_equal(model.get_weights(), before)
    assert {layer.compute_dtype for layer in model._flatten_layers()} == {"float32"}

    def accuracy():
        return np.mean(np.argmax(model.predict(X, verbose=0), -1) == Y)

    plan.apply(model)
    low = accuracy()
    tfamp.apply(model, "float32")
    exact = accuracy()
    assert exact - low <= 0.02
    # The rules alone would not do.
    tfamp.apply(model, "mixed_float16")
    assert accuracy() < exact - 0.1


@pytest.mark.slow
def test_two_guilty_layers_are_both_found_and_a_harmless_model_keeps_none():
    assert kept_by_tune(tuned(trained((0, 2)))) == {"squares_0_", "squares_2_"}
    assert kept_by_tune(tuned(trained())) == set()


@pytest.mark.slow
def test_operations_of_a_graph_are_kept_as_well():
    x = keras.Input((8,))
    h = layers.Dense(16, activation="relu")(x)
    h = keras.ops.square(h * 1e4) / 1e8 + h
    keras.utils.set_random_seed(1)
    model = keras.Model(x, layers.Dense(2)(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    model.fit(X, Y, batch_size=256, verbose=0)
    before = model.predict(X, verbose=0)
    plan = tuned(model)
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)
    assert tfamp.PrecisionPlan.from_model(model).operations == ()
    assert plan.policy == "mixed_float16"
    assert "Square" in {operation.class_name for operation in plan.operations}


# How much worse each half of the examples is, and the reason of the plan.
JUDGEMENTS = {
    "none holds": (lambda half: 0.5, "no plan in half precision kept the metric"),
    "not on fresh examples": (lambda half: 0.5 * half, "on fresh examples"),
}


@pytest.mark.quick("not on fresh examples")
@pytest.mark.parametrize("worse, reason", JUDGEMENTS.values(), ids=JUDGEMENTS)
def test_a_plan_that_does_not_hold_is_float32_and_says_why(worse, reason, monkeypatch):
    def worsening(self, plan, half):
        return np.full(1024, worse(half))

    monkeypatch.setattr(Judge, "worsening", worsening)
    plan = tuned(trained())
    assert (plan.policy, {*plan.layers.values()}) == ("float32", {"float32"})
    assert reason in plan.evidence["tuning"]["reason"]


WRONG = {
    "tolerance": (lambda: tuned(made(), tolerance=0.0), "tolerance"),
    "too few examples": (
        lambda: tuned(trained(), tolerance=0.0005),
        "examples in each half can show; expected at least 7376",
    ),
    "one batch": (
        lambda: tfamp.tune(made(), (X[:8], Y[:8]), policy="mixed_float16", tolerance=1),
        "to choose by, one to judge by",
    ),
    "no such metric": (
        lambda: tuned(made(), metric=3),
        "the name of a metric of Keras that is a mean",
    ),
    "a metric of the batch": (
        lambda: tuned(made(), metric=lambda y, p: tf.reduce_mean(p)),
        "expected a value for each",
    ),
    "a metric that is NaN": (
        lambda: tuned(made(), metric=lambda y, p: p[:, 0] * np.nan),
        "expected finite numbers to compare with",
    ),
    "no model": (lambda: tuned(3), "expected a compiled"),
}


@pytest.mark.quick("tolerance", "one batch", "no model")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_a_clear_error_before_work_is_spent(case, monkeypatch):
    def never(*args, **options):
        raise AssertionError("the pass over layers was begun")

    monkeypatch.setattr("tfamp.tuning.sensitivity", never)
    call, text = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        call()


HALVES = [[0.1, 0.9], [0.8, 0.2]]
SQUARES = [[1.0, 3.0], [2.0, 2.0]]
# Metric, outputs, targets, and its value of each example.
SCORES = [
    ("accuracy", HALVES, [1, 1], [1, 0]),
    ("acc", HALVES, [[0, 1], [0, 1]], [1, 0]),
    ("accuracy", [[0.9], [0.2]], [1, 1], [1, 0]),
    ("mean_squared_error", SQUARES, [[0, 0], [2, 0]], [5, 2]),
    (keras.metrics.MeanAbsoluteError(), [[3.0], [1.0]], [[1], [1]], [2, 0]),
]


@pytest.mark.parametrize("metric, outputs, targets, expected", SCORES)
def test_a_metric_is_taken_of_each_example(metric, outputs, targets, expected):
    outputs, targets = tf.constant(outputs), tf.constant(targets)
    score = scores.score_of(made(), metric, outputs, targets)
    np.testing.assert_allclose(scores.values_of(score, targets, outputs), expected)


def test_examples_are_paired_where_both_runs_saw_the_same_in_one_order(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.arange(8, dtype="float32").reshape(4, 2), np.ones((4, 1), "float32")
    final = model.evaluate(x, y, verbose=0, return_dict=True)
    runs = Run(policy="float32", seed=0), Run(policy="mixed_float16", seed=0)

    def differences(second):
        for run, data in zip(runs, ((x, y), second), strict=True):
            path = tmp_path / file_name(run.policy, run.seed)
            assert scores.write_examples(path, model, data, final, 2) == 4
        return scores.differences(tmp_path, [runs], "mae")

    np.testing.assert_array_equal(differences((x, y)), np.zeros((1, 4)))
    assert differences((x[::-1], y)) is None
    assert differences((x, y + 1)) is None
