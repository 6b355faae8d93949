"""`activity_regularizer` and `add_loss` work in `fit` under both mixed policies."""

import keras
import numpy as np
import pytest

import tfamp
from tests.styles import assembled

layers = keras.layers
POLICIES = ("mixed_float16", "mixed_bfloat16")
X = np.full((4, 2), 500.0, "float32")
Y = np.zeros((4, 1), "float32")

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class AddsLoss(layers.Layer):
    """Adds the mean of its input to the loss, in the compute dtype."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return x


def regularized():
    return layers.Activation("linear", activity_regularizer=keras.regularizers.L2(1e-6))


def loss_in_fit(style, layer, mode="graph"):
    head = layers.Dense(1, kernel_initializer="zeros")
    model = assembled([layer, head], style, (2,))
    model.compile(
        keras.optimizers.SGD(0.0),
        "mse",
        run_eagerly=mode == "eager",
        jit_compile=mode == "xla",
    )
    return model.fit(X, Y, verbose=0).history["loss"][0]


@pytest.mark.quick("mixed_float16-functional-graph")
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_activity_regularizer(policy, style, mode):
    with tfamp.scope(policy):
        loss = loss_in_fit(style, regularized(), mode)
    # 1e-6 times the 8 squares of 500, which float16 cannot hold; later versions of
    # Keras divide by the batch of 4. The predictions are 0 and right.
    in_float32 = loss_in_fit(style, regularized(), "eager")
    assert in_float32 in (pytest.approx(2.0), pytest.approx(0.5))
    assert loss == pytest.approx(in_float32)


@pytest.mark.quick("mixed_float16-functional-graph")
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_add_loss(policy, style, mode):
    with tfamp.scope(policy):
        loss = loss_in_fit(style, AddsLoss(), mode)
    assert loss == pytest.approx(500)
