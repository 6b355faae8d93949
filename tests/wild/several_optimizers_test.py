"""Models trained by several optimizers, under names that `compile` does not know."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
Scaling = tfamp.LossScaleOptimizer
x = np.random.default_rng(0).normal(1.0, 0.5, (32, 4)).astype("float32")
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


class GAN(keras.Model):
    """Two networks and two optimizers, in the manner of the guides."""

    normalization = layers.BatchNormalization

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                self.normalization(),
                layers.LeakyReLU(),
                layers.Dense(1),
            ]
        )
        self.maker = keras.Sequential(
            [keras.Input((2,)), layers.Dense(8, "relu"), layers.Dense(4)]
        )
        self.noise = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def optimizer_of(self, name):
        return getattr(self, f"{name}_optimizer")

    def train_step(self, data):
        real = data[0] if isinstance(data, tuple) else data
        size = tf.shape(real)[0]
        labels = tf.concat([tf.ones((size, 1)), tf.zeros((size, 1))], 0)
        fake = self.maker(keras.random.normal((size, 2), seed=self.noise))
        both = tf.concat([real, tf.cast(fake, real.dtype)], 0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.critic(both, training=True))
        weights = self.critic.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.optimizer_of("d").apply_gradients(zip(gradients, weights, strict=True))
        noise = keras.random.normal((size, 2), seed=self.noise)
        with tf.GradientTape() as tape:
            scores = self.critic(self.maker(noise))
            g_loss = self.loss_fn(tf.ones((size, 1)), scores)
        weights = self.maker.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.optimizer_of("g").apply_gradients(zip(gradients, weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {m.name: m.result() for m in self.metrics}


class InAList(GAN):
    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile(None, None, loss_fn)
        self.optimizers = [d_optimizer, g_optimizer]

    def optimizer_of(self, name):
        return self.optimizers["dg".index(name)]


def trained(policy, cls=GAN, data=x, epochs=3, **changes):
    keras.utils.set_random_seed(4)
    with tfamp.scope(policy):
        model = cls()
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.optimizers.SGD(1e-2),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    for name, value in changes.items():
        setattr(model, name, value)
    history = model.fit(data, epochs=epochs, batch_size=16, shuffle=False, verbose=0)
    return model, history.history


HOLDERS = [GAN, InAList]


@pytest.mark.quick("GAN-graph", "InAList-graph")
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
@pytest.mark.parametrize("cls", HOLDERS)
def test_each_gets_a_scale_of_its_own(cls, mode):
    how = {"run_eagerly": mode == "eager", "jit_compile": mode == "xla"}
    _, exact = trained("float32", cls, **how)
    model, half = trained("mixed_float16", cls, **how)
    for name in ("d_loss", "g_loss"):
        assert half[name] == pytest.approx(exact[name], rel=0.02)
    d, g = (model.optimizer_of(name) for name in "dg")
    assert isinstance(d, Scaling) and isinstance(g, Scaling)
    assert d is not g
    assert (d.applied_steps, g.applied_steps) == (6, 6)
    assert isinstance(d.inner_optimizer, keras.optimizers.Adam)
