"""Loops that scale, divide and differentiate by hand, as code for Keras does."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import in_each_way

layers = keras.layers
TOLERANCE = 0.02
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = np.tanh(x @ np.array([[1.0], [2.0], [-1.0], [0.5]], "float32"))
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def network(policy):
    keras.utils.set_random_seed(2)
    with tfamp.scope(policy):
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )


def error(model):
    return tf.reduce_mean(tf.square(y - tf.cast(model(x, training=True), "float32")))


def half_as_good_as_float32(train):
    """What five steps leave in float16 is what they leave in float32."""
    left = {}
    for policy in ("float32", "mixed_float16"):
        model = network(policy)
        before = float(error(model))
        train(model)
        left[policy] = float(error(model))
        assert left[policy] < 0.9 * before
    assert left["mixed_float16"] == pytest.approx(left["float32"], rel=TOLERANCE)


WRAPPERS = {
    "ours": tfamp.LossScaleOptimizer,
    "Keras's": keras.optimizers.LossScaleOptimizer,
}


@pytest.mark.quick("ours-eager")
@in_each_way
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_gradients_divided_by_hand_go_to_the_inner_optimizer(wrap, decorate):
    def train(model):
        optimizer = wrap(keras.optimizers.SGD(0.2), 2.0**10)
        optimizer.build(model.trainable_variables)

        @decorate
        def step():
            with tf.GradientTape() as tape:
                loss = optimizer.scale_loss(error(model))
            found = tape.gradient(loss, model.trainable_variables)
            scale = tf.convert_to_tensor(optimizer.dynamic_scale.value)
            clipped, _ = tf.clip_by_global_norm([g / scale for g in found], 1.0)
            optimizer.inner_optimizer.apply(clipped, model.trainable_variables)

        for _ in range(5):
            step()
        assert int(optimizer.inner_optimizer.iterations) == 5

    half_as_good_as_float32(train)


def test_a_loss_is_scaled_inside_a_function_that_a_tape_records():
    def train(model):
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.2))
        loss = tf.function(lambda: optimizer.scale_loss(error(model)))
        for _ in range(5):
            with tf.GradientTape() as tape:
                scaled = loss()
            found = tape.gradient(scaled, model.trainable_variables)
            optimizer.apply(found, model.trainable_variables)
        assert optimizer.applied_steps == 5

    half_as_good_as_float32(train)


@pytest.mark.quick("eager")
@in_each_way
def test_an_update_inside_an_update(decorate):
    def train(model):
        optimizer = keras.optimizers.SGD(0.2)
        model(x)

        @decorate
        def step():
            variables = model.trainable_variables
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = error(model)
                slopes = inner.gradient(loss, variables)
                first, offset, last, end = (
                    tf.convert_to_tensor(v) - 0.1 * tf.cast(g, v.dtype)
                    for v, g in zip(variables, slopes, strict=True)
                )
                moved = tf.tanh(x @ first + offset) @ last + end
                loss = tf.reduce_mean(tf.square(y - moved))
            optimizer.apply(outer.gradient(loss, variables), variables)

        for _ in range(5):
            step()

    half_as_good_as_float32(train)
