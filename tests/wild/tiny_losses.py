"""A regression on losses so small that float16 has no gradients of them unscaled."""

import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import DECORATORS
from tfamp.loss_scale import tape

layers = keras.layers
# Of the loss: its gradients leave float16 below, were they not scaled.
TINY = 1e-7
TOLERANCE = 0.02  # of losses, computed in float16 with 11 bits over a few steps
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x @ np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")


@pytest.fixture(autouse=True)
def nothing_of_other_tests(monkeypatch):
    """What is not built may yet turn out to train what any loop trains."""
    monkeypatch.setattr(tape, "_KNOWN", weakref.WeakSet())


def network(policy="mixed_float16", seed=2, **options):
    keras.utils.set_random_seed(seed)
    with tfamp.scope(policy, **options):
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(1)]
        )


def sgd(**options):
    return keras.optimizers.SGD(0.1 / TINY, **options)


def error_of(model):
    """Returns what training leaves."""
    return float(tf.reduce_mean(tf.square(y - model(x))))


def gradients_of(model, inputs=x, targets=y, factor=TINY, scale=lambda loss: loss):
    """Returns a model's loss times a factor, and the gradients of what is scaled."""
    with tf.GradientTape() as tape:
        error = targets - model(inputs, training=True)
        loss = factor * tf.reduce_mean(tf.square(error))
        scaled = scale(loss)
    return loss, tape.gradient(scaled, model.trainable_variables)


def trainer(model, optimizer, decorate=DECORATORS["eager"], scale=lambda loss: loss):
    """Returns a step of a loop; it knows nothing of loss scales, or scales by hand."""

    @decorate
    def step(inputs, targets, factor):
        loss, gradients = gradients_of(model, inputs, targets, factor, scale)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss / factor

    return lambda factor=TINY: float(step(x, y, tf.constant(factor)))


def replica_trainer(strategy, model, optimizer, decorate, scale=lambda loss: loss):
    """Returns a step of two replicas, each with half of the loss."""

    def on_replica(factor):
        _, gradients = gradients_of(model, factor=factor / 2, scale=scale)
        optimizer.apply(gradients, model.trainable_variables)

    step = decorate(lambda factor: strategy.run(on_replica, args=(factor,)))
    return lambda factor=TINY: step(tf.constant(factor))
