"""Naming a layer in `keep_float32` never takes the others' safety away."""

import contextlib

import keras
import pytest
from keras import layers

import tfamp
from tests.styles import assembled


def model_of():
    parts = [layers.Dense(8, name=name) for name in ("odd.(name)", "plain")]
    parts += [layers.UnitNormalization(name="norm"), layers.Dense(1, name="head")]
    return assembled(parts, "sequential", (8,))


def in_float32(model):
    rows = tfamp.assignment(model)
    return {row.path for row in rows if row.compute_dtype == "float32"}


@pytest.mark.parametrize(
    "keep, expected",
    [
        (["plain"], {"plain", "norm", "head"}),
        ("plain", {"plain", "norm", "head"}),
        (["default", "plain"], {"plain", "norm", "head"}),
        ([], {"norm", "head"}),
        (["none", "plain"], {"plain"}),
        ("none", set()),
    ],
    ids=["sequence", "word", "with default", "empty", "with none", "none"],
)
def test_a_sequence_adds_to_the_default_rules(keep, expected):
    with tfamp.scope("mixed_bfloat16", keep_float32=keep):
        model = model_of()
        model.compile("sgd", "mse")
    assert in_float32(model) == expected


def test_a_layer_and_a_name_with_odd_characters_are_taken_as_they_are():
    for entry in ("odd.(name)", None):
        model = model_of()
        keep = [entry or model.layers[0]]
        tfamp.apply(model, "mixed_bfloat16", keep_float32=keep)
        assert in_float32(model) == {"odd.(name)", "norm", "head"}
        told = "'odd.(name)'" if entry else "layer 'odd.(name)'"
        assert tfamp.assignment(model)["odd.(name)"].rule == f"keep_float32: {told}"


def dotted():
    def block(name, of):
        parts = [keras.Input((8,)), layers.Dense(8, name=of)]
        return keras.Sequential(parts, name=name)

    parts = [layers.Dense(8, name="conv_1"), block("blockx", "conv_1")]
    parts += [layers.Dense(8, name="conv.1"), block("block.", "b")]
    return assembled([*parts, layers.Dense(1, name="head")], "sequential", (8,))


@pytest.mark.parametrize("way", ["enable", "apply"])
@pytest.mark.parametrize(
    "name, expected",
    [
        ("conv.1", {"conv.1"}),
        ("block./b", {"block./b"}),
        ("block.", {"block.", "block./b"}),
        ("conv[_.]1", {"conv_1", "blockx/conv_1", "conv.1"}),
        ("block.*", {"blockx", "blockx/conv_1", "block.", "block./b"}),
    ],
)
def test_an_exact_name_is_no_pattern_for_others(name, expected, way):
    settings = {"policy": "mixed_bfloat16", "keep_float32": ["none", name]}
    with tfamp.scope(**settings) if way == "enable" else contextlib.nullcontext():
        model = dotted()
        model.compile("sgd", "mse")
    if way == "apply":
        tfamp.apply(model, **settings)
    assert in_float32(model) == expected
    rules = {row.rule for row in tfamp.assignment(model) if row.path not in expected}
    assert rules == {"policy mixed_bfloat16"}
