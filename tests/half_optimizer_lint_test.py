"""What stock optimizers lose on half-precision weights, and the rule that tells it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.lint_rules_test import head, sequential, stock
from tfamp import lint

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


@pytest.mark.parametrize("cls", [K.Adam, K.AdamW, K.Lamb])
def test_adam_moves_no_bfloat16_weight_at_its_default_beta(cls):
    # sqrt(1 - 1**t) is 0, and so is every update.
    assert trained(cls(0.1), "bfloat16", [1.0], *[1.0] * 10)[0] == [1.0]
    moved = trained(cls(0.1, beta_2=0.99), "bfloat16", [1.0], 1.0)[0][0]
    # One update is about the rate, with the errors of some roundings of 2**-8.
    assert abs(moved - 0.9) < 8 * 2**-8


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


NO_MOVE, INFINITE = "no weight ever moves", "weights turn infinite or NaN"


LOST = {
    "beta_2": ("bfloat16", K.Adam, "`beta_2=0.999` of 'mine' is 1 in bfloat16"),
    "momentum": (
        "bfloat16",
        lambda **named: K.SGD(0.1, momentum=0.999, **named),
        "`momentum=0.999` of 'mine' is 1",
    ),
    "epsilon": (
        "float16",
        lambda **named: K.Adam(epsilon=1e-8, **named),
        "`epsilon=1e-08` of 'mine' is 0 in float16",
    ),
    "epsilon_1": ("float16", K.Adafactor, "`epsilon_1=1e-30` of 'mine' is 0"),
}


@pytest.mark.parametrize("dtype, make, message", LOST.values(), ids=LOST)
def test_what_an_optimizer_loses_is_an_error_beside_the_weights(dtype, make, message):
    found = lint(model_of(dtype, make(name="mine"))).of(rule="half-weights")
    assert [(each.severity, each.layer) for each in found] == [
        ("error", "low"),
        ("warning", "low"),
    ]
    assert found[0].message.startswith(message)
    assert f"mixed_{dtype}" in found[0].remedy
    mixed = lint(model_of(f"mixed_{dtype}", make(name="mine")))
    assert mixed.of(rule="half-weights") == ()


def test_numbers_that_the_format_tells_from_1_are_no_finding():
    tie, below = 1 - 2.0**-9, 1 - 1.01 * 2.0**-9
    for value, count in ((tie, 2), (below, 1)):
        model = model_of("bfloat16", K.SGD(0.1, momentum=value))
        assert len(lint(model).of(rule="half-weights")) == count
