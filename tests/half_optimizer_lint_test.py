"""What stock optimizers lose on half-precision weights, and the rules that tell it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lint_rules_test import head, places, sequential, stock
from tfamp.numerics.lint import lint

L = keras.layers
K = keras.optimizers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def trained(optimizer, dtype, weights, *gradients):
    """Weights after updates by stock Keras, and the optimizer's own variables."""
    variable = keras.Variable(np.array(weights, "float32"), dtype=dtype)
    optimizer.build([variable])
    for gradient in gradients:
        optimizer.apply([tf.fill([len(weights)], tf.cast(gradient, dtype))])
    slots = {v.path.split("/")[-1].split("_")[-1]: v for v in optimizer.variables}
    return numbers(variable), {name: numbers(v) for name, v in slots.items()}


def numbers(variable):
    return np.ravel(tf.cast(variable.value, "float32").numpy()).tolist()


# --- what Keras computes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rates_are_cast_to_the_weight_and_moments_are_stored_as_it_is(dtype):
    optimizer = K.Adam(0.1)
    trained(optimizer, dtype, [1.0], 1.0)
    stored = {v.path.split("/")[-1]: v.dtype for v in optimizer.variables}
    assert stored.pop("learning_rate") == "float32"
    assert stored.pop("iteration").startswith("int")
    assert set(stored.values()) == {dtype}


@pytest.mark.parametrize("cls", [K.Adam, K.AdamW, K.Lamb])
def test_adam_moves_no_bfloat16_weight_at_its_default_beta(cls):
    # sqrt(1 - 1**t) is 0, and so is every update.
    assert trained(cls(0.1), "bfloat16", [1.0], *[1.0] * 10)[0] == [1.0]
    moved = trained(cls(0.1, beta_2=0.99), "bfloat16", [1.0], 1.0)[0][0]
    # One update is about the rate, with the errors of some roundings of 2**-8.
    assert abs(moved - 0.9) < 8 * 2**-8


DIVERGING = {
    "Nadam, beta_2": (lambda b: K.Nadam(0.1, beta_2=b), np.isnan),
    "Adam, beta_1": (lambda b: K.Adam(0.1, beta_1=b, beta_2=0.9), np.isinf),
    "Lamb, beta_1": (lambda b: K.Lamb(0.1, beta_1=b, beta_2=0.9), np.isnan),
    "Adamax, beta_1": (lambda b: K.Adamax(0.1, beta_1=b), np.isinf),
}


@pytest.mark.parametrize("dtype, beta", [("float16", 0.9998), ("bfloat16", 0.999)])
@pytest.mark.parametrize("make, is_bad", DIVERGING.values(), ids=DIVERGING)
def test_other_betas_that_are_1_end_in_infinity_or_nan(make, is_bad, dtype, beta):
    assert is_bad(trained(make(beta), dtype, [1.0], 1.0)[0]).all()
    assert np.isfinite(trained(make(0.95), dtype, [1.0], 1.0)[0]).all()


def test_a_momentum_that_is_1_never_decays():
    for momentum, left in ((0.999, -0.25), (0.5, -0.125)):
        _, slots = trained(K.SGD(0.25, momentum), "bfloat16", [1.0], 1.0, 0.0)
        assert slots["momentum"] == [left]


def test_an_average_of_lion_that_is_1_takes_no_gradient():
    assert trained(K.Lion(0.5, beta_2=0.999), "bfloat16", [1.0], 1.0)[1][
        "momentum"
    ] == [0.0]


def test_an_average_of_weights_that_is_1_stays_at_the_first_update():
    # The weight goes 1, 0.75, 0.5; the average begins at 0.75.
    for momentum, average in ((0.999, 0.75), (0.5, 0.625)):
        optimizer = K.SGD(0.25, use_ema=True, ema_momentum=momentum)
        weights, slots = trained(optimizer, "bfloat16", [1.0], 1.0, 1.0)
        assert (weights, slots["average"]) == ([0.5], [average])


def test_weight_decay_below_half_a_spacing_is_lost():
    ulp = 2.0**-10  # from 1 on in float16; half of it below 1

    def decayed(weights, rate, decay):
        optimizer = K.SGD(rate, weight_decay=decay)
        return trained(optimizer, "float16", weights, 0.0)[0]

    weights = [1.0, 1 + ulp]
    assert decayed(weights, 2.0**-6, 2.0**-7) == weights
    # Three quarters of half a spacing above 1, and one and a half times that below.
    assert decayed(weights, 1.5 * 2**-6, 2.0**-6) == [1 - ulp / 2, 1 + ulp]
    assert decayed(weights, 2.0**-5, 2.0**-5) == [1 - ulp, 1.0]


def test_an_update_of_half_a_spacing_is_lost():
    # Lion's update is the rate itself; below 1 bfloat16 lies 2**-8 apart.
    assert trained(K.Lion(2.0**-9), "bfloat16", [1.0], 1.0)[0] == [1.0]
    assert trained(K.Lion(2.0**-8), "bfloat16", [1.0], 1.0)[0] == [1 - 2.0**-8]


def test_adafactors_epsilon_is_0_in_float16():
    assert np.isnan(trained(K.Adafactor(0.1), "float16", [1.0], 0.0)[0]).all()
    safe = K.Adafactor(0.1, epsilon_1=1e-7)
    assert trained(safe, "float16", [1.0], 0.0)[0] == [1.0]


# --- the rules


def model_of(dtype, optimizer, name="low"):
    with stock(dtype):
        return sequential(L.Dense(8, name=name), head(), optimizer=optimizer)


BETA_1 = {"beta_1": 0.999, "beta_2": 0.9}
EMA = {"use_ema": True, "ema_momentum": 0.999}
NO_MOVE, INFINITE = "no weight ever moves", "weights turn infinite or NaN"
NOT_COUNTED = "new gradients do not count in its average"
NO_DECAY = "what it has gathered never decays"
STAYS = "the average stays what it was after the first update"
ROUNDED = {
    "Adam": (K.Adam, {}, "error", NO_MOVE),
    "AdamW": (K.AdamW, {}, "error", NO_MOVE),
    "Lamb": (K.Lamb, {}, "error", NO_MOVE),
    "Nadam": (K.Nadam, {}, "error", "every weight turns NaN"),
    "Adamax": (K.Adamax, {}, "warning", NO_DECAY),
    "beta_1": (K.Adam, BETA_1, "error", INFINITE),
    "Adamax's beta_1": (K.Adamax, BETA_1, "error", INFINITE),
    "Nadam's beta_1": (K.Nadam, BETA_1, "warning", NOT_COUNTED),
    "Lion": (K.Lion, {"beta_2": 0.999}, "warning", NOT_COUNTED),
    "SGD": (K.SGD, {"momentum": 0.999}, "warning", NO_DECAY),
    "RMSprop": (K.RMSprop, {"rho": 0.999}, "warning", NO_DECAY),
    "average of weights": (K.SGD, EMA, "warning", STAYS),
}


@pytest.mark.quick("AdamW", "beta_1", "Nadam's beta_1", "Lion", "average of weights")
@pytest.mark.parametrize(
    "cls, options, severity, effect", ROUNDED.values(), ids=ROUNDED
)
def test_rounded_momentum_tells_what_a_beta_of_1_does(cls, options, severity, effect):
    (found,) = lint(model_of("bfloat16", cls(0.1, **options))).of(
        rule="rounded-momentum"
    )
    assert (found.severity, found.layer) == (severity, "low")
    assert "is 1 in bfloat16, in which 'low' are stored: " in found.message
    assert effect in found.message
    assert "Use the policy 'mixed_bfloat16'" in found.remedy
    assert "=0.99`" in found.remedy


def test_rounded_momentum_tells_the_argument_and_its_value():
    (found,) = lint(model_of("bfloat16", K.Adam(name="mine"))).of(
        rule="rounded-momentum"
    )
    assert found.message.startswith("`beta_2=0.999` of 'mine' is 1 in bfloat16")
    assert (found.figure, found.details["argument"]) == (0.999, "beta_2")


def test_rounded_momentum_asks_the_dtype_of_the_weights():
    rule = "rounded-momentum"
    assert places(model_of("float16", K.Adam()), rule) == []
    assert places(model_of("float16", K.Adam(beta_2=0.9998)), rule) == [
        ("error", "low")
    ]
    assert places(model_of("mixed_bfloat16", K.Adam()), rule) == []
    # 1 - 2**-9 is a tie between 1 and 1 - 2**-8, and goes to 1.
    tie, below = 1 - 2.0**-9, 1 - 1.01 * 2.0**-9
    assert places(model_of("bfloat16", K.SGD(0.1, tie)), rule) == [("warning", "low")]
    assert places(model_of("bfloat16", K.SGD(0.1, below)), rule) == []
    unused = K.SGD(0.1, ema_momentum=0.999)
    assert places(model_of("bfloat16", unused), rule) == []


def test_optimizer_epsilon_knows_adafactors():
    rule = "optimizer-epsilon"
    (found,) = lint(model_of("float16", K.Adafactor(name="mine"))).of(rule=rule)
    assert found.severity == "error"
    assert found.message.startswith("The epsilon_1 1e-30 of 'mine' is 0 in")
    assert found.remedy.startswith(
        "Use the policy 'mixed_float16', which keeps weights and moments in float32, "
        "or pass `epsilon_1=1e-07`."
    )
    assert places(model_of("float16", K.Adafactor(epsilon_1=1e-7)), rule) == []
    assert places(model_of("bfloat16", K.Adafactor()), rule) == []


def test_optimizer_epsilon_tells_one_that_is_large_enough():
    (found,) = lint(model_of("float16", K.Adam())).of(rule="optimizer-epsilon")
    assert "or pass `epsilon=1e-03`." in found.remedy
    large = K.Adam(epsilon=1e-3)
    assert places(model_of("float16", large), "optimizer-epsilon") == []
