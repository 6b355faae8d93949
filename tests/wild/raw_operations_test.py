"""Raw TensorFlow operations in layers, and layers that a `train_step` calls itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
logits = np.linspace(-4.0, 4.0, 2000).astype("float16")[None]


class Calling(layers.Layer):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def call(self, x):
        return self.operation(x)


def test_outside_of_managed_layers_they_are_tensorflows_own():
    with tfamp.scope("mixed_float16"):
        Calling(tf.nn.softmax)(logits)
    x = tf.constant(logits)
    assert tf.nn.softmax(x).dtype == "float16"
    np.testing.assert_array_equal(tf.nn.softmax(x), tf.raw_ops.Softmax(logits=x))


class Diffusion(keras.Model):
    """Normalizes and embeds in its train step, as guides of diffusion do."""

    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization(mean=0.5, variance=2.0)
        self.embed = layers.Dense(4)
        self.network = keras.Sequential([keras.Input((4,)), layers.Dense(4)])

    def call(self, inputs):
        return self.network(self.embed(self.normalizer(inputs)))

    def train_step(self, data):
        inputs, _ = data
        noise = tf.ones_like(inputs)
        rates = keras.random.uniform((tf.shape(inputs)[0], 1), seed=1)
        with tf.GradientTape() as tape:
            clean = self.embed(self.normalizer(inputs, training=True))
            noisy = rates * clean + (1.0 - rates) * noise
            loss = tf.reduce_mean(tf.square(self.network(noisy) - noise))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_weights, strict=True)
        )
        return {"mse": loss}


@pytest.mark.quick("True-mixed_bfloat16")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("eager", [True, False])
def test_layers_that_a_train_step_calls_give_it_float32(policy, eager):
    x = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
    losses = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(1)
        with tfamp.scope(each):
            model = Diffusion()
            model.compile(keras.optimizers.SGD(0.1), run_eagerly=eager)
        model(x)
        history = model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
        losses.append(history.history["mse"])
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert model.embed.compute_dtype != "float32"
    assert model.embed(x).dtype == model.embed.compute_dtype  # elsewhere as ever
