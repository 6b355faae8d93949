"""`apply` onto built models under `enable`, and enabling by the environment."""

import json
import re

import numpy as np
import pytest
from keras import layers

import tfamp
from tests.styles import assembled


@pytest.fixture(autouse=True)
def disabled_afterwards():
    yield
    tfamp.disable()


def regression():
    parts = [
        layers.Dense(8, activation="relu", name="sensitive"),
        layers.Dense(8, activation="relu", name="plain"),
        layers.Dense(1, name="out"),
    ]
    return assembled(parts, "functional", (4,))


def dtypes(model):
    rows = tfamp.assignment(model)
    return {row.path: row.compute_dtype for row in rows if row.path != model.name}


HALF = {"sensitive": "bfloat16", "plain": "bfloat16", "out": "float32"}
KEPT = {**HALF, "sensitive": "float32"}


@pytest.mark.quick("before")
@pytest.mark.parametrize("when", ["before", "after"])
def test_apply_follows_the_rules_that_are_enabled(when):
    early = regression()
    tfamp.enable("mixed_bfloat16", keep_float32=["sensitive"])
    model = early if when == "before" else regression()
    assignment = tfamp.apply(model)
    assert dtypes(model) == KEPT
    assert "keep_float32" in assignment["sensitive"].rule


APPLIED = {
    "policy named": ({"policy": "mixed_bfloat16"}, KEPT),
    "a further rule": ({"keep_float32": ["plain"]}, {**KEPT, "plain": "float32"}),
    "a further class": ({"keep_float32": [layers.Dense]}, {**KEPT, "plain": "float32"}),
    "no rules": ({"keep_float32": "none"}, dict.fromkeys(HALF, "bfloat16")),
    "a rule alone": (
        {"keep_float32": ["none", "plain"]},
        {**dict.fromkeys(HALF, "bfloat16"), "plain": "float32"},
    ),
    "another policy": (
        {"policy": "mixed_float16"},
        {"sensitive": "float32", "plain": "float16", "out": "float32"},
    ),
    "float32": ({"policy": "float32"}, dict.fromkeys(HALF, "float32")),
}


@pytest.mark.quick("policy named", "a rule alone")
@pytest.mark.parametrize("arguments, expected", APPLIED.values(), ids=APPLIED)
def test_what_apply_is_given_comes_on_top_of_the_rules(arguments, expected):
    model = regression()
    with tfamp.scope("mixed_bfloat16", keep_float32=["sensitive"]):
        tfamp.apply(model, **arguments)
    assert dtypes(model) == expected


def test_apply_does_not_ask_this_model_for_what_an_enabled_rule_names():
    tfamp.enable("mixed_bfloat16", keep_float32=["of_another_model"])
    model = regression()
    tfamp.apply(model, keep_float32=["plain"])  # warnings are errors
    assert dtypes(model)["plain"] == "float32"
    message = "Pattern 'typo' in `keep_float32` matches none of the 3 layers"
    with pytest.raises(ValueError, match=re.escape(message)):
        tfamp.apply(model, keep_float32=["typo"])
    assert dtypes(model)["plain"] == "float32"


def a_plan():
    with tfamp.scope("mixed_bfloat16", keep_float32=["sensitive"]):
        return tfamp.PrecisionPlan.from_model(regression())


def test_apply_follows_the_plan_that_is_enabled():
    plan = a_plan()
    model = regression()
    tfamp.enable(plan)
    tfamp.apply(model)
    assert dtypes(model) == KEPT
    with pytest.raises(ValueError, match="stands beside a plan"):
        tfamp.apply(model, keep_float32=["plain"])


def enabled(model):
    tfamp.enable()
    return regression()


def scoped(model):
    with tfamp.scope():
        return regression()


def applied(model):
    tfamp.apply(model)
    return model


def applied_auto(model):
    tfamp.apply(model, "auto")
    return model


def compiled_and_applied(model):
    model.compile("sgd", "mse")
    tfamp.apply(model)
    return model


ENTRIES = [enabled, scoped, applied, applied_auto, compiled_and_applied]


@pytest.mark.quick("plan-enabled", "policy-applied")
@pytest.mark.parametrize("put", ENTRIES)
@pytest.mark.parametrize("named", ["plan", "policy"])
def test_the_environment_names_a_policy_or_plan_for_every_entry(
    named, put, tmp_path, monkeypatch
):
    path = tmp_path / "plan.json"
    a_plan().to_json(path)
    stock = regression()
    value = str(path) if named == "plan" else "mixed_bfloat16"
    monkeypatch.setenv("TFAMP_POLICY", value)
    model = put(stock)
    model.compile("sgd", "mse")
    assert dtypes(model) == (KEPT if named == "plan" else HALF)


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("TFAMP_POLICY", "fp16")
    for put in ENTRIES:
        stock = regression()
        with pytest.raises(ValueError, match="Unknown `TFAMP_POLICY` 'fp16'"):
            put(stock)
        assert set(dtypes(stock).values()) == {"float32"}
    assert layers.Dense(2).compute_dtype == "float32"
    assert not tfamp.status().enabled


X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


def measured(put):
    """Returns what was measured for a model that `put` makes, in its first `fit`."""
    model = put(regression())
    assert set(dtypes(model).values()) == {"float32"}
    model.compile("sgd", "mse")
    history = model.fit(X, X[:, :1], batch_size=32, verbose=0).history
    assert np.isfinite(history["loss"][0])
    return tfamp.PrecisionPlan.from_model(model).evidence.get("measured")


@pytest.mark.quick("applied")
@pytest.mark.parametrize("put", [enabled, applied, compiled_and_applied])
def test_the_environment_asks_every_entry_to_measure(put, monkeypatch):
    monkeypatch.setenv("TFAMP_POLICY", "measure")
    assert "mixed_bfloat16" in json.dumps(measured(put))


def test_apply_measures_where_that_is_enabled():
    stock = regression()
    tfamp.enable("measure")
    assert measured(lambda _: (tfamp.apply(stock), stock)[1]) is not None
