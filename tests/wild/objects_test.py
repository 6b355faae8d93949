"""Layers and models that give objects of the user's, such as distributions."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = 3.0 * X[:, :1]


class Gamma:
    """A distribution, of which TensorFlow has no kernels in bfloat16."""

    def __init__(self, shape, rate, name):
        self.shape, self.rate, self.name = shape, rate, name

    def log_prob(self, y):
        a, b = self.shape, self.rate
        return (
            a * tf.math.log(b) + (a - 1.0) * tf.math.log(y) - b * y - tf.math.lgamma(a)
        )


class Likelihood(keras.layers.Layer):
    """Makes a distribution of what it is given."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dense(1) for _ in range(2)]

    def call(self, x):
        return Gamma(*(tf.nn.softplus(part(x)) + 0.1 for part in self.parts), "gamma")


class Probabilistic(keras.Model):
    """Learns the parameters of a distribution by its own step."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = keras.layers.Dense(8, "relu"), Likelihood()

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = -tf.reduce_mean(self(x, training=True).log_prob(tf.abs(y) + 0.1))
        weights = self.trainable_variables
        gradients = tape.gradient(error, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"error": error}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_the_parts_of_a_distribution_come_to_a_step_in_float32(policy):
    found = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(0)
        with tfamp.scope(each):
            model = Probabilistic()
            model.compile(keras.optimizers.Adam(0.01))
            history = model.fit(X, Y, epochs=3, verbose=0).history["error"]
        found.append(history[-1])
    assert found[1] == pytest.approx(found[0], rel=0.01)
    assert model.hidden.compute_dtype == policy.removeprefix("mixed_")
    assert model(X[:2]).name == "gamma"
