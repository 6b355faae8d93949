"""Layers that the `call` of another one makes anew, each time it runs."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
POLICIES = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")


class Noise(layers.Layer):
    """Mixes float32 into its inputs, as half precision cannot."""

    def call(self, x):
        return x + 0 * tf.random.normal(tf.shape(x))


class Encoder(keras.Model):
    """As a variational autoencoder that samples by a layer of the moment."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden = layers.Dense(4)
        self.head = layers.Dense(1, bias_initializer=keras.initializers.Constant(7e4))

    def call(self, x):
        return self.head(Noise()(self.hidden(x)))


class Tree(layers.Layer):
    """Joins what it made by a layer, and multiplies it with float32."""

    def __init__(self, **options):
        super().__init__(**options)
        self.decide = layers.Dense(4, activation="sigmoid")

    def call(self, x):
        chosen = self.decide(x)
        both = layers.concatenate([chosen, 1 - chosen])
        return keras.ops.ones([keras.ops.shape(x)[0], 8]) * both


class Joined(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.one, self.other = layers.Dense(2), layers.Dense(2)

    def call(self, x):
        return layers.concatenate([self.one(x), self.other(x)])


def test_a_head_behind_one_is_float32_and_one_line_tells_of_it(caplog):
    with tfamp.scope("mixed_float16"):
        model = Encoder()
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        targets = np.full((32, 1), 70_001.0, "float32")  # beyond float16
        history = model.fit(X, targets, batch_size=8, epochs=2, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    assert model.head.compute_dtype == "float32"
    told = [r for r in caplog.records if "computes in float32" in r.getMessage()]
    assert len(told) == 1


@POLICIES
def test_in_a_layer_that_is_kept_it_is_float32_too(policy):
    losses = []
    for each in ("float32", policy):
        keras.utils.set_random_seed(0)
        with tfamp.scope(each):
            inputs = keras.Input((4,))
            model = keras.Model(inputs, Tree()(inputs))
            model.compile(keras.optimizers.SGD(0.1), "mse")
            losses += model.fit(X, np.ones((32, 8)), verbose=0).history["loss"]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@POLICIES
def test_what_it_gives_for_a_head_is_float32(policy):
    with tfamp.scope(policy):
        body = [keras.Input((4,)), layers.Dense(8), Joined(name="joined")]
        model = keras.Sequential(body)
        found = model.predict(X, verbose=0)
    (row,) = [r for r in tfamp.assignment(model) if r.path == "joined"]
    assert str(found.dtype) == row.output_dtype == "float32"
