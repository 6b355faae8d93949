"""Optimizers whose public methods are overridden, in `fit` and own steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
y = x @ np.array([[1.0], [2.0], [-1.0], [0.5]], "float32")
NUM_STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class Halved(keras.optimizers.SGD):
    """Takes half of each step, by a method that programs override."""

    calls = 0

    def halves(self, gradients):
        self.calls += 1
        return [None if g is None else g / 2 for g in gradients]


class Apply(Halved):
    def apply(self, grads, trainable_variables=None):
        return super().apply(self.halves(grads), trainable_variables)


class ApplyGradients(Halved):
    def apply_gradients(self, grads_and_vars):
        grads, variables = zip(*grads_and_vars, strict=True)
        return super().apply_gradients(
            list(zip(self.halves(grads), variables, strict=True))
        )


class UpdateStep(Halved):
    def update_step(self, gradient, variable, learning_rate):
        (half,) = self.halves([gradient])
        super().update_step(half, variable, learning_rate)


class OwnStep(keras.Model):
    """Hands pairs to its optimizer, as examples do."""

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            error = targets - self(inputs, training=True)
            loss = tf.reduce_mean(tf.square(error))
        gradients = tape.gradient(loss, self.trainable_variables)
        pairs = zip(gradients, self.trainable_variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"loss": loss}


def trained(policy, make, cls):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        i = keras.Input((4,))
        model = cls(i, layers.Dense(1)(layers.Dense(8, "tanh")(i)))
        optimizer = make(0.1)
        model.compile(optimizer, "mse", run_eagerly=True)
    batch = len(x) // NUM_STEPS
    model.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
    return model.get_weights(), optimizer.calls


@pytest.mark.quick("Apply-fit")
@pytest.mark.parametrize("cls", [keras.Model, OwnStep], ids=["fit", "own step"])
@pytest.mark.parametrize("make", [Apply, ApplyGradients, UpdateStep])
def test_it_is_called_as_often_and_does_what_it_does_in_float32(make, cls):
    if make is ApplyGradients and cls is keras.Model:
        pytest.skip("`fit` calls `apply`")
    exact, in_float32 = trained("float32", make, cls)
    half, in_float16 = trained("mixed_float16", make, cls)
    assert in_float16 == in_float32 > 0
    for one, other in zip(half, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02, atol=2e-3)
    whole, _ = trained("float32", Halved, cls)
    assert not np.allclose(whole[0], exact[0], rtol=0.02, atol=2e-3)
