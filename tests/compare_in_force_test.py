"""What is compared is put in force, and taken out again."""

import os

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.trials import tasks
from tfamp.trials import variant as module
from tfamp.trials.tasks import checked_policies, file_name
from tfamp.trials.variant import Variant, in_force

REWRITE = "auto_mixed_precision_onednn_bfloat16"


def compute_dtype():
    return keras.layers.Dense(2).compute_dtype


@pytest.mark.parametrize(
    "word, dtype, reason",
    [
        ("float32", "float32", "named by the caller"),
        ("mixed_bfloat16", "bfloat16", "named by the caller"),
        ("keras:mixed_bfloat16", "bfloat16", "stock Keras"),
    ],
)
def test_a_policy_is_in_force_inside_only(word, dtype, reason):
    before = keras.config.dtype_policy()
    with in_force(Variant.parse(word)) as (policy, why):
        assert policy == word.removeprefix("keras:")
        assert reason in why
        assert compute_dtype() == dtype
        assert tfamp.status().enabled == (not word.startswith("keras:"))
    assert keras.config.dtype_policy() == before
    assert not tfamp.status().enabled


@pytest.mark.parametrize("rules, dtype", [("", "float32"), ("+no_rules", "bfloat16")])
def test_rules_may_be_left_out(rules, dtype):
    with in_force(Variant.parse(f"mixed_bfloat16{rules}")):
        assert keras.layers.LayerNormalization().compute_dtype == dtype


@pytest.mark.parametrize("word", ["keras:float32", "float32+rewrite"])
def test_broken_instructions_are_avoided_where_enable_does_not(word, monkeypatch):
    calls = []
    broken = "avoid_broken_amx"
    monkeypatch.setattr(module.cpus, broken, lambda: calls.append("avoid"))
    monkeypatch.setattr(
        tf.config.optimizer, "set_experimental_options", lambda o: calls.append(o)
    )
    with in_force(Variant.parse(word)):
        options = [{REWRITE: True}] if "rewrite" in word else []
        assert calls == ["avoid", *options]
    if options:
        assert calls.pop() == {REWRITE: False}


def test_an_error_inside_takes_it_out_too():
    with pytest.raises(ZeroDivisionError), in_force(Variant.parse("keras:float16")):
        1 / 0  # noqa: B018
    assert compute_dtype() == "float32"


def small():
    parts = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *parts])


def test_a_plan_is_compared_by_its_file(tmp_path):
    with tfamp.scope("mixed_bfloat16", keep_float32=["first"]):
        plan = tfamp.PrecisionPlan.from_model(small())
    path = tasks.plan_file(tmp_path, plan)
    assert tfamp.PrecisionPlan.from_json(path) == plan
    assert tasks.plan_file(tmp_path, "float32") == "float32"
    words = checked_policies(["float32", f"{path}+xla"])
    assert words == ("float32", f"{path}+xla")
    assert "/" not in file_name(words[1], 0)
    variant = Variant.parse(words[1])
    assert variant.is_plan and variant.jit_compile and not variant.is_float32
    with in_force(variant) as (policy, why):
        assert (policy, why[:6]) == ("mixed_bfloat16", "a plan")
        model = small()
        model.compile("sgd", "mse")
    kept = tfamp.PrecisionPlan.from_model(model)
    assert [row.kind for row in kept.rows] == [row.kind for row in plan.rows]


@pytest.mark.parametrize("word", ["{}+no_rules", "keras:{}", "nowhere.json"])
def test_a_plan_that_cannot_be_compared_is_refused(word, tmp_path):
    path = tasks.plan_file(tmp_path, tfamp.PrecisionPlan.from_model(small()))
    with pytest.raises(ValueError, match="expected"):
        checked_policies(["float32", word.format(path)])


def test_results_of_a_plan_are_read_where_its_file_is_not():
    variant = Variant.parse("runs/a+b.json+xla")
    assert (variant.policy, variant.jit_compile) == ("runs/a+b.json", True)
    assert Variant.parse(str(variant)) == variant


def test_compare_writes_plans_for_its_runs(monkeypatch):
    plan = tfamp.PrecisionPlan.from_model(small())
    seen = []

    def job(**given):
        seen.extend(given["policies"])
        assert tfamp.PrecisionPlan.from_json(given["policies"][1]) == plan
        raise RuntimeError("here it would begin")

    monkeypatch.setattr("tfamp.comparison.Job", job)
    with pytest.raises(RuntimeError, match="here it would begin"):
        tfamp.compare(small, (1, 2), policies=("float32", plan))
    assert seen[0] == "float32" and not os.path.exists(seen[1])
