"""Taps see every layer's inputs, outputs and gradients, however a model is written."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfamp.stepping.eager_step import Observer, floats, sites, tapped
from tfamp.stepping.layer_calls import units

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def dense(units=3, **options):
    return L.Dense(units, kernel_initializer="ones", **options)


def functional():
    x = keras.Input((3,))
    y = dense(name="a")(x)
    return keras.Model(x, dense(name="b")(y * 2.0))


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((3,)), dense(name="a")], name="in")
        self.b = dense(name="b")

    def call(self, x):
        return self.b(2.0 * self.inner(x))


MODELS = {
    "functional": (functional, "a", 2.0),
    "nested": (Nested, "in/a", 2.0),
}


class Everything(Observer):
    wants_gradients = True

    def __init__(self):
        self.inputs, self.outputs, self.gradients = {}, {}, {}

    def on_call(self, call):
        self.inputs[call.site.path, call.number] = floats((call.args, call.kwargs))

    def on_outputs(self, call, outputs):
        self.outputs[call.site.path, call.number] = floats(outputs)

    def on_gradient(self, call, of, at, gradient):
        self.gradients[call.site.path, call.number, of, at] = gradient


def run(model, seen):
    x = tf.constant(X)
    with tapped(model, seen), tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(model(x))
    return tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("build, path, factor", MODELS.values(), ids=MODELS)
def test_inputs_outputs_and_gradients_are_those_by_hand(build, path, factor):
    model = build()
    expected = np.asarray(model(X))
    seen = Everything()
    run(model, seen)
    np.testing.assert_array_equal(model(X), expected)
    assert all("call" not in vars(site.layer) for site in sites(model))
    a = X.sum(axis=1, keepdims=True) * np.ones((1, 3), np.float32)
    np.testing.assert_allclose(seen.inputs[path, 0][0], X, rtol=1e-6)
    np.testing.assert_allclose(seen.outputs[path, 0][0], a, rtol=1e-5)
    # Each output of `b` is the sum of three numbers, and the loss the sum of three.
    gradient = seen.gradients[path, 0, "outputs", 0]
    np.testing.assert_allclose(gradient, np.full((4, 3), 3 * factor), rtol=1e-6)
    gradient = seen.gradients[path, 0, "inputs", 0]
    np.testing.assert_allclose(gradient, np.full((4, 3), 9 * factor), rtol=1e-6)


def test_operations_of_a_functional_graph_are_seen():
    model = functional()
    seen = Everything()
    run(model, seen)
    operation = next(path for path, _ in seen.outputs if path.startswith("multiply"))
    np.testing.assert_allclose(
        seen.outputs[operation, 0][0], 2 * seen.inputs[operation, 0][0].numpy()
    )


def test_masks_and_logits_pass_through_a_tap():
    x = keras.Input((5,))
    y = L.Embedding(9, 3, mask_zero=True)(x)
    y = L.GlobalAveragePooling1D()(y)
    model = keras.Model(x, L.Dense(2, activation="softmax")(y))
    ids = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 0]])
    expected = np.asarray(model(ids))
    seen = Everything()
    with tapped(model, seen):
        found = model(ids)
    np.testing.assert_array_equal(found, expected)
    assert found._keras_logits.shape == (2, 2)


class OwnOperations(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((3,)), dense(name="a")], name="in")
        self.rnn = L.LSTM(2, name="rnn")
        self.each = L.TimeDistributed(dense(name="b"), name="each")

    def call(self, x):
        return self.rnn(self.each(self.inner(x)[:, None]))


def test_units_are_what_computes_by_itself():
    model = OwnOperations()
    model(X)
    assert [site.path for site in units(model)] == [
        model.name,
        "in/a",
        "rnn",
        "each",
    ]
