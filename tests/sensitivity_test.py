"""`tfamp.sensitivity`: which layers float16 or bfloat16 would spoil, and why."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.lint_test import CONTROLS
from tests.styles import STYLES, Own, assembled
from tfamp.numerics.sensitivity import Sensitivity, sensitivity

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
L, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.integers(0, 3, 32)
TARGETS = RNG.normal(size=(32, 1)).astype(np.float32)
LOSS = "sparse_categorical_crossentropy"


def stack(*middle):
    """The layers of a small classifier around some others."""
    return [
        L.Dense(8, activation="relu", name="first"),
        *middle,
        L.LayerNormalization(name="norm"),
        L.Dense(3, activation="softmax", name="head"),
    ]


def made(parts, style="sequential"):
    keras.utils.set_random_seed(0)
    model = assembled(parts, style, (8,))
    model.compile("adam", LOSS)
    return model


def regressor(*layers):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", "mse")
    return model


@pytest.mark.quick("nested")
@pytest.mark.parametrize("style", STYLES)
def test_producer_and_consumer_of_a_huge_value_are_guilty(style):
    model = made(stack(L.Rescaling(1e5, name="huge")), style)
    found = sensitivity(model, (X, Y))
    prefix = "inner/" if style == "nested" else ""
    assert found.verdict == "layers"
    assert set(found.guilty) == {f"{prefix}huge", f"{prefix}norm"}
    assert "overflow: its outputs reach" in found.guilty[f"{prefix}huge"]
    assert "overflow: its inputs reach" in found.guilty[f"{prefix}norm"]
    # With both in float32 the rest is as good as in float32.
    assert found.whole_error < 0.05
    assert sensitivity(model, (X, Y), dtype="bfloat16").verdict == "safe"


def many_ones(x):
    return tf.cumsum(tf.ones_like(tf.tile(x, [1, 600])), 1)[:, -8:]


def mean_of_many(x):
    # Not the same in each column, which the normalization behind it would mend.
    return x + 1e-3 * many_ones(x) * tf.cast(tf.range(8), x.dtype)


def root_of_square(x):
    return tf.sqrt(tf.square(x * 1e3) + 1e3) * 1e-3


BOTH = ("digits", "digits")
# Layer -> reasons of its guilt in float16 and in bfloat16.
SPOILED = {
    "square": (root_of_square, ("overflow", "")),
    "mean of many": (mean_of_many, BOTH),
    "difference of close numbers": (lambda x: (x + 3000.0) - 3000.0, BOTH),
    "small product": (
        lambda x: (x * 1e-5) * (x * 1e-5) * 1e4 * 1e4 * 1e2,
        ("underflow", ""),
    ),
}


@pytest.mark.quick("square-float16", "small product-float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("function, reasons", SPOILED.values(), ids=SPOILED)
def test_a_layer_is_guilty_for_the_reason(function, reasons, dtype):
    model = made(stack(Own(function, name="own")))
    found = sensitivity(model, (X, Y), dtype=dtype)
    reason = reasons[dtype == "bfloat16"]
    guilty = {layer.path: layer.reason for layer in found.layers if layer.is_guilty}
    assert guilty == ({"own": reason} if reason else {})
    assert found.verdict == ("layers" if reason else "safe")


def test_a_number_beyond_range_on_the_way_is_told():
    found = sensitivity(made(stack(Own(root_of_square, name="own"))), (X, Y))
    assert "a number on the way is beyond range, while its out" in found.guilty["own"]
    (row,) = [row for row in found.table().splitlines() if "not finite" in row]
    assert "own" in row


def test_a_layer_that_looks_bad_and_does_no_harm_is_no_alarm():
    # The same in each column, so the normalization takes it away with its error.
    model = made(stack(Own(lambda x: x + 1e-3 * many_ones(x), name="own")))
    found = sensitivity(model, (X, Y))
    assert (found.layers[1].path, found.verdict) == ("own", "safe")
    assert found.layers[1].forward_error > 1


def test_a_layer_that_is_wrong_backward_only_is_found():
    @tf.custom_gradient
    def twice_through_beyond_range(x):
        # 1e30 is a number of bfloat16 and not of float16.
        return tf.identity(x), lambda dy: dy * 1e30 * tf.cast(1e-30, dy.dtype)

    class Shift(L.Layer):
        """Spoils the gradient of its weight alone."""

        def build(self, shape):
            self.shift = self.add_weight(shape=shape[1:], initializer="zeros")

        def call(self, x):
            return x + twice_through_beyond_range(tf.convert_to_tensor(self.shift))

    for layer in (Own(twice_through_beyond_range, name="own"), Shift(name="own")):
        found = sensitivity(made(stack(layer)), (X, Y))
        assert list(found.guilty) == ["own"]
        assert found.guilty["own"].startswith("backward: its gradients overflow")
        # Its own arithmetic is that of one rounding.
        assert found.layers[1].forward_error < 2.0**-10


def test_gradients_that_another_scale_cures_blame_no_layer():
    model = made([*stack(), L.Rescaling(1.0, name="last")])
    model.compile("adam", lambda y, p: tf.reduce_mean(tf.square(p)) * 3e-10)
    found = sensitivity(model, (X, Y))
    assert (found.verdict, found.guilty) == ("loss scale", {})
    assert found.loss_scale == tfamp.ranges(model, (X, Y)).best_loss_scale == 2.0**24
    assert "'initial_scale': 2.0**24" in found.advice


@pytest.mark.quick("bfloat16-4-safe")
@pytest.mark.parametrize(
    ("dtype", "count", "verdict"),
    [
        *(("float16", 24, "amplification"), ("float16", 10, "amplification")),
        *(("float16", 5, "safe"), ("bfloat16", 4, "safe")),
    ],
)
def test_a_chain_of_maps_amplifies_with_its_length(dtype, count, verdict):
    """Ten of them leave gradients of float16 off by 0.4 times their size.

    Those of 24 overflow in the first one at any scale, which float32 there would
    not cure.
    """
    maps = [Own(lambda x: 1 - 1.9 * tf.square(x), name=f"map{i}") for i in range(count)]
    model = regressor(L.Dense(8, activation="tanh"), *maps, L.Dense(1))
    y = np.random.default_rng(1).normal(size=(32, 1)).astype(np.float32)
    found = sensitivity(model, (X, y), dtype=dtype)
    assert (found.verdict, found.guilty) == (verdict, {})


@pytest.mark.quick("mlp-float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("build, data", CONTROLS.values(), ids=CONTROLS)
def test_no_alarm_on_healthy_models(build, data, dtype):
    keras.utils.set_random_seed(0)
    found = sensitivity(build(), data, dtype=dtype)
    assert (found.verdict, found.guilty) == ("safe", {})


ADDED = {
    "log": (lambda x: -ops.mean(ops.log(1 - ops.sigmoid(x * 10 + 12))), True),
    "square": (lambda x: ops.mean(ops.square(x * 10 + 600)), True),
    "small": (lambda x: ops.mean(ops.square(x)), False),
}


@pytest.mark.parametrize("function, is_bad", ADDED.values(), ids=ADDED)
def test_a_loss_that_a_layer_adds_counts(function, is_bad):
    class Adding(L.Layer):
        def call(self, x):
            self.add_loss(1e-3 * function(x))
            return x

    found = sensitivity(regressor(Adding(), L.Dense(1)), (X / 10, TARGETS))
    assert (found.verdict == "layers") is is_bad
    assert any("adding" in path for path in found.guilty) is is_bad


def test_what_it_tells_goes_to_json_and_into_a_table_and_cures():
    model = made(stack(L.Rescaling(1e5, name="huge")))
    expected = model.predict(X, verbose=0)
    found = sensitivity(model, (X, Y))
    assert Sensitivity.from_json(found.to_json()) == found
    text = str(found)
    assert max(map(len, text.splitlines())) <= 110
    assert "Keep them in float32: `keep_float32=['huge', 'norm']`." in text
    tfamp.apply(model, "mixed_float16", keep_float32=["default", *found.guilty])
    # Eight roundings of a probability to float16 at most.
    np.testing.assert_allclose(
        model.predict(X, verbose=0), expected, rtol=0, atol=8 * 2.0**-11
    )


def test_a_model_that_fails_in_float32_is_sent_to_triage():
    message = "are not finite in float32; expected a healthy step to begin with. Ask "
    with pytest.raises(ValueError, match=re.escape(message)):
        sensitivity(made(stack()), (X * np.nan, Y))


@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_gradients_that_a_later_normalization_cancels_are_no_fault(offset):
    """What the second one takes out again, the first one's scale cannot change."""
    model = regressor(
        L.Dense(8, name="before"),
        L.BatchNormalization(name="first"),
        L.Rescaling(1.0, offset=offset, name="offset"),
        L.BatchNormalization(name="second"),
        L.Dense(1, name="head"),
    )
    found = sensitivity(model, (X, TARGETS), dtype="bfloat16")
    assert set(found.guilty) == ({"offset", "second"} if offset else set())
