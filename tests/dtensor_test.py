"""DTensor trains wrongly with momentum where slots are laid out otherwise.

When one of these fails, it works, and `docs/scale.md` may say so.
"""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

rng = np.random.default_rng(0)
X, Y, *WEIGHTS = (
    rng.normal(size=shape).astype("float32")
    for shape in ((16, 8), (16, 1), (8, 16), (16, 1))
)
RATE, MOMENTUM, STEPS = 0.01, 0.9, 20
TOLERANCE = 1e-5  # sums in another order
pytestmark = pytest.mark.slow("nothing: it is TensorFlow's, not tfamp's")


def one_device(momentum):
    """Returns the last loss, in plain NumPy and float64."""
    first, second = (w.astype(float) for w in WEIGHTS)
    slots = [np.zeros_like(first), np.zeros_like(second)]
    for _ in range(STEPS):
        hidden = np.maximum(X @ first, 0.0)
        error = hidden @ second - Y
        loss = float(np.mean(error**2))
        back = 2.0 * error / len(X)
        gradients = X.T @ (back @ second.T * (hidden > 0)), hidden.T @ back
        slots = [momentum * s + g for s, g in zip(slots, gradients, strict=True)]
        first, second = first - RATE * slots[0], second - RATE * slots[1]
    return loss


def sharded(momentum, *, slots_as_weights):
    """Returns the last loss with both weights divided over two devices."""
    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    whole = dtensor.Layout.replicated(mesh, 2)
    layouts = [
        dtensor.Layout([dtensor.UNSHARDED, "model"], mesh),
        dtensor.Layout(["model", dtensor.UNSHARDED], mesh),
    ]

    def variable(array, layout):
        return dtensor.DVariable(
            dtensor.relayout(dtensor.copy_to_mesh(array, whole), layout)
        )

    weights = [variable(w, at) for w, at in zip(WEIGHTS, layouts, strict=True)]
    slots = [
        variable(np.zeros_like(w), at if slots_as_weights else whole)
        for w, at in zip(WEIGHTS, layouts, strict=True)
    ]
    x, y = dtensor.copy_to_mesh(X, whole), dtensor.copy_to_mesh(Y, whole)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.nn.relu(x @ weights[0]) @ weights[1] - y) ** 2)
        gradients = tape.gradient(loss, weights)
        for weight, slot, gradient in zip(weights, slots, gradients, strict=True):
            slot.assign(momentum * slot + gradient)
            weight.assign_sub(RATE * slot)
        return loss

    for _ in range(STEPS):
        loss = step(x, y)
    return float(dtensor.unpack(loss)[0])


def test_momentum_with_slots_of_another_layout_is_silently_wrong():
    right, found = one_device(MOMENTUM), sharded(MOMENTUM, slots_as_weights=False)
    assert abs(found - right) > 0.1 * right


def test_slots_laid_out_as_the_weights_are_right():
    found = sharded(MOMENTUM, slots_as_weights=True)
    assert found == pytest.approx(one_device(MOMENTUM), rel=TOLERANCE)


def test_plain_steps_are_right():
    found = sharded(0.0, slots_as_weights=True)
    assert found == pytest.approx(one_device(0.0), rel=TOLERANCE)
