"""Int8, simulated: rounding, which layers it spoils, and the few that stay in float."""

import keras
import numpy as np
import pytest

from tfamp.serving.exports.int8_layers import (
    Kept,
    keep_guilty,
    rank,
    rounded_activations,
    rounded_weights,
)
from tfamp.serving.exports.request import NothingRoundedError
from tfamp.serving.gate import judged
from tfamp.serving.parity import MetricChange, Parity

L = keras.layers
# What gives a channel its size.
SCALED = ("kernel", "bias", "gamma", "beta")


def dense_net(depth=4, width=32):
    layers = [L.Dense(width, activation="relu", name=f"d{i}") for i in range(depth)]
    head = L.Dense(10, name="head")
    return keras.Sequential([keras.Input((16,)), *layers, head], name="net")


def convolutions():
    x = y = keras.Input((8, 8, 3))
    for number in range(3):
        y = L.Conv2D(16, 3, padding="same", use_bias=False, name=f"c{number}")(y)
        y = L.ReLU()(L.BatchNormalization(name=f"b{number}")(y))
    y = L.Dense(10, name="head")(L.GlobalAveragePooling2D()(y))
    return keras.Model(x, y, name="convolutions")


def plant(model, maker, taker, channel=3, factor=1000.0):
    """Has one channel between two layers be larger, the function unchanged."""
    maker, taker = model.get_layer(maker), model.get_layer(taker)
    for weight in (each for each in maker.weights if each.name in SCALED):
        value = np.array(weight)
        value[..., channel] *= factor
        weight.assign(value)
    value = np.array(taker.kernel)
    value[..., channel, :] /= factor
    taker.kernel.assign(value)


def inputs_of(model, number=48):
    rng = np.random.default_rng(0)
    return rng.normal(size=(number, *model.input_shape[1:])).astype("float32")


PLANTED = {
    "dense": (dense_net, "d1", "d2", "d1"),
    "folded normalization": (convolutions, "b1", "c2", "c1"),
}


@pytest.mark.parametrize("build, maker, taker, producer", PLANTED.values(), ids=PLANTED)
def test_a_planted_outlier_channel_is_found_with_who_gives_it(
    build, maker, taker, producer
):
    keras.utils.set_random_seed(1)
    model = build()
    x = inputs_of(model)
    before = model(x).numpy()
    plant(model, maker, taker)
    np.testing.assert_allclose(model(x), before, rtol=1e-3, atol=1e-4)
    weights = [w.copy() for w in model.get_weights()]
    worst, *others = rank(model, x)
    assert worst.path == taker and worst.is_guilty and "channel 3" in worst.reason
    assert worst.producers == (producer,)
    assert not any(each.is_guilty for each in others)
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)
    assert "an outlier channel" in worst.reason


def test_what_rounds_weights_and_inputs_is_off_by_more():
    model = dense_net(2)
    x = 30 * inputs_of(model) ** 3
    alone = {each.path: each.error for each in rank(model, x, scheme="weights")}
    both = {each.path: each.error for each in rank(model, x)}
    assert all(0 < alone[path] < both[path] for path in both)


def test_rounding_is_off_by_half_a_step_at_most():
    values = np.random.default_rng(0).normal(size=(50, 7)) * 10.0 ** np.arange(7)
    steps = np.abs(values).max(axis=0) / 127
    assert (np.abs(rounded_weights(values, (1,)) - values) <= steps / 2 * 1.001).all()
    step = (values.max() - values.min()) / 255
    assert np.abs(rounded_activations(values) - values).max() <= step * 1.001
    assert rounded_activations(np.zeros(3)).tolist() == [0, 0, 0]


def parity(worse, number=1000):
    bound = worse + 0.003
    metric = MetricChange(
        "accuracy", "y", 0.9, 0.9 - worse, worse, worse, bound, 0.005, number
    )
    return Parity(*judged([], [metric]), "onnx", number, (), (metric,))


def searched(needed, mode, model=None):
    """Returns the search on a model whose int8 is as good with some layers in float."""
    asked = []

    def evaluate(paths):
        asked.append(paths)
        return parity(0.0 if {*needed} <= {*paths} else 0.3)

    if model is None:
        keras.utils.set_random_seed(1)
        model = dense_net()
        plant(model, "d1", "d2")
    return keep_guilty(model, inputs_of(model), evaluate, scheme=mode), asked, model


SEARCHES = {
    "dynamic": ("dynamic", ["d2"], ["d2"]),
    "static": ("static", ["d2", "d1"], ["d2", "d1"]),
    "harmless": ("dynamic", [], []),
}


def test_attention_and_recurrent_layers_are_ranked_by_what_multiplies():
    tokens = x = keras.Input((6, 8))
    x = x + L.MultiHeadAttention(2, 4, name="attention")(L.LayerNormalization()(x), x)
    model = keras.Model(tokens, L.Dense(3, name="head")(L.LSTM(5, name="lstm")(x)))
    found = {each.path: each for each in rank(model, inputs_of(model))}
    inner = [f"attention/{each}" for each in ("query", "key", "value")]
    assert {*inner, "attention/attention_output", "lstm", "head"} == {*found}
    assert all(0 < each.error < 0.1 for each in found.values())


@pytest.mark.parametrize("mode, needed, expected", SEARCHES.values(), ids=SEARCHES)
def test_few_layers_are_kept_in_few_evaluations(mode, needed, expected):
    kept, asked, model = searched(needed, mode)
    assert list(kept.layers) == expected and kept.holds
    assert len(asked) == len(kept.evaluations) <= 3
    if mode == "static":
        assert kept.layers["d1"] == "it gives the outlier channel of 'd2'"
    assert Kept.from_dict(kept.to_dict()) == kept


def test_a_model_without_guilty_layers_is_tried_whole_first():
    model = dense_net()
    kept, asked, _ = searched([], "dynamic", model)
    assert asked == [()] and kept.layers == {}


def test_where_nothing_holds_it_says_so():
    kept, asked, _ = searched(["nobody"], "dynamic")
    assert not kept.holds and len(asked) == 3


def test_a_layer_that_the_gate_alone_asks_for_is_kept_and_said():
    model = dense_net()
    spoilt = rank(model, inputs_of(model))[0].path  # the first, though not guilty
    kept, asked, _ = searched([spoilt], "dynamic", model)
    assert asked == [(), (spoilt,)] and kept.holds
    assert kept.layers == {spoilt: "the gate needs it, as the next in the ranking"}


def test_where_what_is_kept_was_all_there_is_to_round_fewer_are():
    keras.utils.set_random_seed(1)
    model = dense_net()
    plant(model, "d1", "d2")

    def evaluate(paths):
        if paths:
            raise NothingRoundedError("nothing")
        return parity(0.3)

    kept = keep_guilty(model, inputs_of(model), evaluate, scheme="dynamic")
    assert not kept.holds and kept.layers == {}
