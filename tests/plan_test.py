"""Plans: what each layer computes in, as a file says it, on models made anew."""

import dataclasses
import json
import re

import keras
import numpy as np
import pytest

import tfamp
from tests.styles import STYLES, assembled
from tfamp.keras_hooks import exact_values

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 6, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 8)


def made(style="functional", *, fitted=True, **options):
    """Returns a model with layers that rules keep, and one that names itself anew."""
    parts = [
        layers.Dense(5, activation="relu"),
        layers.LayerNormalization(),
        layers.Bidirectional(layers.SimpleRNN(2)),
        layers.Dense(3),
    ]
    model = assembled(parts, style, (6, 4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **options)
    if fitted:
        model.fit(X, Y, verbose=0)
    return model


def plan_of(style="functional", policy="mixed_bfloat16", **options):
    with tfamp.scope(policy):
        return tfamp.PrecisionPlan.from_model(made(style, **options))


def dtypes_of(model_or_plan):
    """Returns class, dtype, kind and rule of each layer; names differ by numbers."""
    plan = model_or_plan
    if not isinstance(plan, tfamp.PrecisionPlan):
        plan = tfamp.PrecisionPlan.from_model(plan)
    fields = ("class_name", "compute_dtype", "kind", "output_dtype", "rule")
    return [tuple(getattr(row, name) for name in fields) for row in plan.rows]


def with_dense_kept(plan):
    """Returns a plan in which the first Dense layer is in float32 as well."""
    changes = {"compute_dtype": "float32", "dtype_policy": "float32"}
    changes |= {"kind": "float32 inside", "output_dtype": "bfloat16"}
    place = next(i for i, r in enumerate(plan.rows) if r.class_name == "Dense")
    rows = list(plan.rows)
    rows[place] = dataclasses.replace(rows[place], rule="measured", **changes)
    return plan.replace(rows=tuple(rows))


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_model_made_under_a_plan_computes_as_it_says(style, tmp_path):
    plan = with_dense_kept(plan_of(style))
    plan.to_json(tmp_path / "plan.json")
    assert tfamp.PrecisionPlan.from_json(tmp_path / "plan.json") == plan
    with tfamp.scope(tmp_path / "plan.json"):
        model = made(style)  # Keras numbers its names on
    assert dtypes_of(model) == dtypes_of(plan) != dtypes_of(plan_of(style))
    assert "measured" in str(tfamp.assignment(model))
    assert model.predict(X, verbose=0).dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_trained_model_is_put_under_a_plan_with_its_weights(style):
    plan = with_dense_kept(plan_of(style, "mixed_float16"))
    model = made(style)
    before = model.get_weights()
    slots = [variable.numpy() for variable in model.optimizer.variables]
    assert plan.apply(model) is model
    assert dtypes_of(model) == dtypes_of(plan)
    np.testing.assert_equal(model.get_weights(), before)
    assert isinstance(model.optimizer, tfamp.LossScaleOptimizer)
    inner = model.optimizer.inner_optimizer
    np.testing.assert_equal([v.numpy() for v in inner.variables], slots)
    model.fit(X, Y, verbose=0)
    assert int(model.optimizer.applied_steps) == 1


def stack(*names):
    """Returns a model of Dense layers of these names (None: Keras's), or a ReLU."""
    keras.backend.clear_session()
    parts = [n() if n is layers.ReLU else layers.Dense(3, name=n) for n in names]
    return assembled(parts, "sequential", (4,))


DIFFERENT = {
    "class": (
        [layers.ReLU, None],
        "layer 1 is 're_lu', a ReLU, where the plan has 'dense', a Dense",
    ),
    "fewer": ([None], "layer 2 is nothing, where the plan has 'dense_1', a Dense"),
    "more": ([None] * 3, "layer 3 is 'dense_2', a Dense, where the plan has nothing"),
    "name": (
        ["a", None],
        "layer 1 is 'a', a Dense, where the plan has 'dense', a Dense",
    ),
}


@pytest.mark.parametrize(("names", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_plan_refuses_another_model_by_the_first_difference(names, text):
    with tfamp.scope("mixed_bfloat16"):
        plan = tfamp.PrecisionPlan.from_model(stack(None, None))
    model = stack(*names)
    with pytest.raises(ValueError, match=re.escape(text)):
        plan.apply(model)
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    with tfamp.scope(plan), pytest.raises(ValueError, match=re.escape(text)):
        stack(*names).compile("sgd", "mse")


def test_a_loaded_model_is_under_its_plan_with_evidence_and_operations(tmp_path):
    def build():
        parts = [layers.Dense(3), keras.ops.exp, layers.Dense(2)]
        return assembled(parts, "functional", (4,))

    with tfamp.scope("mixed_bfloat16"):
        model = build()
    (operation,) = [o for _, o in exact_values.operations_in(model)]
    exact_values.keep(operation, "bfloat16", "measured", "it overflows")
    plan = tfamp.PrecisionPlan.from_model(model, evidence={"ratio": 1.5})
    assert [(o.class_name, o.rule) for o in plan.operations] == [("Exp", "measured")]
    plan = plan.replace(jit_compile=False)
    with tfamp.scope(plan):
        again = build()
        again.compile("sgd", "mse")
    again.save(tmp_path / "m.keras")
    loaded = tfamp.load_model(tmp_path / "m.keras")
    found = tfamp.PrecisionPlan.from_model(loaded)
    assert found.evidence == {"ratio": 1.5}
    assert found.jit_compile is False
    assert [(o.rule, o.reason) for o in found.operations] == [
        ("measured", "it overflows")
    ]
    assert dtypes_of(found) == dtypes_of(plan)
    # exp(0) + 2**-10 is 1 in bfloat16, so what is inside tells the dtype.
    np.testing.assert_array_equal(loaded(X[:, 0]), again(X[:, 0]))


@pytest.mark.parametrize(("told", "expected"), [("auto", True), (False, False)])
def test_compile_uses_xla_as_planned_unless_it_is_told(told, expected, tmp_path):
    plan = plan_of(fitted=False).replace(jit_compile=True)
    with tfamp.scope(plan):
        model = made(fitted=False, jit_compile=told)
    assert model.jit_compile is expected
    applied = plan.apply(made(fitted=False, jit_compile=False))
    assert applied.jit_compile is True
    applied.save(tmp_path / "model.keras")
    assert keras.saving.load_model(tmp_path / "model.keras").jit_compile is True


WRONG = {
    "rules beside a plan": (
        lambda plan: tfamp.enable(plan, keep_float32=["Dense"]),
        "stands beside a plan, which says of every layer what it computes in",
    ),
    "another record": (
        lambda plan: tfamp.PrecisionPlan.from_json('{"class": "Status"}'),
        "expected 'PrecisionPlan'",
    ),
    "a later version": (
        lambda plan: tfamp.PrecisionPlan.from_dict({**plan.to_dict(), "schema": 99}),
        "update tfamp",
    ),
    "no model": (lambda plan: plan.apply("model"), "expected a Keras 3 model"),
    "an unbuilt model": (
        lambda plan: tfamp.PrecisionPlan.from_model(
            keras.Sequential([layers.Dense(2)])
        ),
        "is not built",
    ),
}


@pytest.mark.quick("rules beside a plan", "a later version", "an unbuilt model")
@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_is_a_clear_error_before_anything_changes(case):
    call, text = WRONG[case]
    plan = plan_of(fitted=False)
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as caught:
        call(plan)
    assert text in str(caught.value)
    assert not tfamp.status().enabled


def test_a_plan_says_what_it_is(monkeypatch, tmp_path):
    plan = with_dense_kept(plan_of(fitted=False))
    assert set(plan.layers.values()) == {"float32", "bfloat16"}
    kept = list(plan.kept.values())
    assert kept == ["measured", "default: LayerNormalization", "default: heads"]
    text = plan.table()
    assert "policy mixed_bfloat16" in text and "measured" in text
    assert json.loads(plan.to_json())["class"] == "PrecisionPlan"
    plan.to_json(tmp_path / "p.json")
    monkeypatch.setenv("TFAMP_POLICY", str(tmp_path / "p.json"))
    with tfamp.scope() as status:
        assert "3 layers and operations in float32" in status.why
