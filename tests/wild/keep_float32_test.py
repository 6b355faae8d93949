"""Naming a layer in `keep_float32` never takes the others' safety away."""

import keras
import pytest
from keras import layers

import tfamp


def model_of(name="odd.(name)"):
    hidden = layers.Dense(8, name=name)
    return keras.Sequential(
        [
            keras.Input((8,)),
            hidden,
            layers.Dense(8, name="plain"),
            layers.UnitNormalization(name="norm"),
            layers.Dense(1, activation="sigmoid", name="head"),
        ]
    )


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
        rule = tfamp.assignment(model)["odd.(name)"].rule
        assert rule == (
            "keep_float32: 'odd.(name)'"
            if entry
            else "keep_float32: layer 'odd.(name)'"
        )


def dotted():
    inner = [keras.Input((8,)), layers.Dense(8, name="conv_1")]
    return keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8, name="conv_1"),
            keras.Sequential(inner, name="blockx"),
            layers.Dense(8, name="conv.1"),
            keras.Sequential(inner[:1] + [layers.Dense(8, name="b")], name="block."),
            layers.Dense(1, name="head"),
        ]
    )


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
    keep = ["none", name]
    if way == "enable":
        with tfamp.scope("mixed_bfloat16", keep_float32=keep):
            model = dotted()
            model.compile("sgd", "mse")
    else:
        model = dotted()
        tfamp.apply(model, "mixed_bfloat16", keep_float32=keep)
    assert in_float32(model) == expected
    rules = {row.rule for row in tfamp.assignment(model) if row.path not in expected}
    assert rules == {"policy mixed_bfloat16"}
