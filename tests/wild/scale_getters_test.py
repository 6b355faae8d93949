"""Logging what a loss-scale optimizer knows changes nothing of the training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED, in_each_way

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
x = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
y = x[:, :1] - 0.5 * x[:, 1:2]

NUMBERS = ("scale", "skipped_steps", "gradient_norm", "is_frozen")
OF_KERAS = ("dynamic_scale", "learning_rate", "variables", "clipnorm")


def read(optimizer, name):
    return getattr(optimizer, name)


class Logging(keras.Model):
    """Reads something of its optimizer while a tape records, as to log it."""

    reads = None

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
            seen = read(self.optimizer, self.reads) if self.reads else 0.0
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        logs = {"error": loss}
        if self.reads in NUMBERS:
            logs["seen"] = tf.cast(seen, "float32")
        return logs


def small_model():
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return Logging(inputs, keras.layers.Dense(1)(hidden))


def fitted(reads, **how):
    with tfamp.scope("mixed_float16"):
        model = small_model()
        model.compile(keras.optimizers.SGD(0.1), "mse", **how)
    model.reads = reads
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return history.history, model.get_weights()


@pytest.fixture(scope="module")
def unread():
    """What each way to run a step gives where nothing is read."""
    found = {}

    def of(mode):
        if mode not in found:
            found[mode] = fitted(None, **COMPILED[mode])
        return found[mode]

    return of


@pytest.mark.quick("scale-*", "gradient_norm-graph", "learning_rate-graph")
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("name", NUMBERS + OF_KERAS)
def test_a_step_of_the_models_own_may_log_anything(name, mode, unread):
    logs, weights = fitted(name, **COMPILED[mode])
    expected, kept = unread(mode)
    assert logs["error"] == expected["error"]
    assert expected["error"][-1] < expected["error"][0] / 2
    for one, other in zip(weights, kept, strict=True):
        np.testing.assert_array_equal(one, other)


def loop(decorate, make, name):
    """A loop of its own that reads something while a tape records; its losses."""
    with tfamp.scope("mixed_float16"):
        model = small_model()
    optimizer = make(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @decorate
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
            if name:
                read(optimizer, name)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [float(step(tf.constant(x), tf.constant(y))) for _ in range(4)]
    assert losses[-1] < losses[0] / 1.5
    return losses


LOOPS = {
    "ours": (tfamp.LossScaleOptimizer, "scale"),
    "stock": (keras.optimizers.LossScaleOptimizer, "dynamic_scale"),
}


@in_each_way
@pytest.mark.parametrize(("make", "name"), LOOPS.values(), ids=LOOPS)
def test_a_loop_may_log_the_scale(make, name, decorate):
    assert loop(decorate, make, name) == loop(decorate, make, None)
