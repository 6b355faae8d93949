"""Int8, simulated: rounding, which layers it spoils, and the few that stay in float."""

import keras
import numpy as np

from tfamp.serving.exports.int8_layers import (
    layers_kept,
    rank,
)

L = keras.layers
# What gives a channel its size.
SCALED = ("kernel", "bias", "gamma", "beta")


def dense_net(depth=4, width=32):
    layers = [L.Dense(width, activation="relu", name=f"d{i}") for i in range(depth)]
    head = L.Dense(10, name="head")
    return keras.Sequential([keras.Input((16,)), *layers, head], name="net")


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


def test_a_planted_outlier_channel_is_found_with_who_gives_it():
    keras.utils.set_random_seed(1)
    model = dense_net()
    x = inputs_of(model)
    before = model(x).numpy()
    plant(model, "d1", "d2")
    np.testing.assert_allclose(model(x), before, rtol=1e-3, atol=1e-4)
    weights = [w.copy() for w in model.get_weights()]
    worst, *others = rank(model, x)
    assert worst.path == "d2" and worst.times > 20
    assert worst.ahead == "d1"
    assert not any(each.times > 20 for each in others)
    for now, then in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, then)


def test_heads_stay_in_float32_unless_they_are_much_of_the_model():
    assert list(layers_kept(dense_net(), [])) == ["head"]
    alone = keras.Sequential([keras.Input((8,)), L.Dense(3)])
    assert layers_kept(alone, []) == {}
