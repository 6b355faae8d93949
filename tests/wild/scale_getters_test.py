"""Logging what a loss-scale optimizer knows changes nothing of the training."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED, in_each_way
from tests.replicas import two_replicas

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
x = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
y = x[:, :1] - 0.5 * x[:, 1:2]

NUMBERS = (
    "scale",
    "applied_steps",
    "skipped_steps",
    "consecutive_skips",
    "num_stops",
    "gradient_norm",
    "last_step_skipped",
    "is_frozen",
)
OF_KERAS = (
    "dynamic_scale",
    "step_counter",
    "initial_scale",
    "dynamic_growth_steps",
    "learning_rate",
    "iterations",
    "variables",
    "inner_optimizer",
    "built",
    "name",
    "dynamic",
    "clipnorm",
    "use_ema",
)


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


def test_on_replicas_a_step_may_log_the_scale():
    losses = []
    for reads in (None, "scale"):
        strategy = two_replicas()
        with strategy.scope():
            losses.append(fitted(reads, jit_compile=False)[0]["error"])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] / 2


def loop(decorate, make, name, steps=4):
    """A loop of its own; returns the weights."""
    with tfamp.scope("mixed_float16"):
        model = small_model()
    optimizer = make(keras.optimizers.SGD(0.1))

    @decorate
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
            if name:
                read(optimizer, name)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        if name and name not in ("step_counter", "dynamic_scale"):
            read(optimizer, name)
        return loss

    optimizer.build(model.trainable_variables)
    losses = [float(step(tf.constant(x), tf.constant(y))) for _ in range(steps)]
    assert losses[-1] < losses[0] / 1.5
    return losses


MAKERS = {
    "ours": tfamp.LossScaleOptimizer,
    "stock": keras.optimizers.LossScaleOptimizer,
    "plain": lambda inner: inner,
}
CASES = [("ours", name) for name in (*NUMBERS, "dynamic_scale", "learning_rate")]
CASES += [("stock", name) for name in ("dynamic_scale", "step_counter", "iterations")]
CASES += [("plain", name) for name in ("learning_rate", "iterations", "variables")]


@pytest.mark.quick("ours-scale-eager", "ours-scale-graph", "stock-dynamic_scale-*")
@in_each_way
@pytest.mark.parametrize(("make", "name"), CASES, ids=map("-".join, CASES))
def test_a_loop_may_log_anything(make, name, decorate):
    expected = loop(decorate, MAKERS[make], None)
    assert loop(decorate, MAKERS[make], name) == expected


def test_what_is_read_says_nothing_of_gradients_from_elsewhere():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    weight = keras.Variable([1.0])
    with pytest.warns(UserWarning, match="scale_loss"):
        for _ in range(12):
            assert optimizer.scale == 8.0
            optimizer.apply([tf.constant([0.0])], [weight])
