"""Loops that scale, divide and differentiate by hand, and steps that log the scale."""

import functools
import operator

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED, OwnStep, in_each_way
from tests.wild.tiny_losses import (
    TOLERANCE,
    network,
    nothing_of_other_tests,  # noqa: F401 - a fixture of every test
    sgd,
    trainer,
    x,
    y,
)

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
Y = np.tanh(y)


def error(model):
    return tf.reduce_mean(tf.square(Y - tf.cast(model(x, training=True), "float32")))


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
    "ours": (tfamp.LossScaleOptimizer, "scale"),
    "Keras's": (keras.optimizers.LossScaleOptimizer, "dynamic_scale"),
}


@pytest.mark.quick("ours-eager")
@in_each_way
@pytest.mark.parametrize("wrap, _", WRAPPERS.values(), ids=WRAPPERS)
def test_gradients_divided_by_hand_go_to_the_inner_optimizer(wrap, _, decorate):
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
                loss = tf.reduce_mean(tf.square(Y - moved))
            optimizer.apply(outer.gradient(loss, variables), variables)

        for _ in range(5):
            step()

    half_as_good_as_float32(train)


# --- logging what an optimizer knows changes nothing of the training ---

READ = (
    *("scale", "skipped_steps", "gradient_norm", "is_frozen", "dynamic_scale"),
    *("learning_rate", "variables", "clipnorm"),
)


class Logging(OwnStep):
    """Reads something of its optimizer while a tape records, as to log it."""

    reads = None

    def scaled(self, loss):
        seen = getattr(self.optimizer, self.reads) if self.reads else 0.0
        self.seen = tf.cast(seen if self.reads in READ[:4] else 0.0, "float32")
        return loss

    def train_step(self, data):
        return {**super().train_step(data), "seen": self.seen}


@functools.cache
def fitted(reads, mode):
    keras.utils.set_random_seed(3)
    with tfamp.scope("mixed_float16"):
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = Logging(inputs, keras.layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1), "mse", **COMPILED[mode])
    model.reads = reads
    logs = model.fit(x, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return logs.history["own_loss"], model.get_weights()


@pytest.mark.quick("scale-eager", "*-graph")
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("name", READ)
def test_a_step_of_the_models_own_may_log_anything(name, mode):
    errors, weights = fitted(name, mode)
    expected, kept = fitted(None, mode)
    assert errors == expected
    assert expected[-1] < expected[0] / 2
    for one, other in zip(weights, kept, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.quick("*-graph", "*-eager")
@in_each_way
@pytest.mark.parametrize(("wrap", "name"), WRAPPERS.values(), ids=WRAPPERS)
def test_a_loop_may_log_the_scale(wrap, name, decorate):
    def losses(read):
        model, optimizer = network(), wrap(sgd())
        optimizer.build(model.trainable_variables)
        logged = lambda loss: (loss, read(optimizer))[0]  # noqa: E731
        step = trainer(model, optimizer, decorate, logged)
        return [step() for _ in range(4)]

    found = losses(operator.attrgetter(name))
    assert found == losses(lambda optimizer: None)
    assert found[-1] < found[0] / 1.5
