"""What is compared is put in force, and taken out again."""

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.trials import variant as module
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
    monkeypatch.setattr(module.amx, "avoid", lambda: calls.append("avoid"))
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
