"""What is tried in half precision ahead of a call has no effects, and is tried once."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers = keras.layers
POLICIES = ["mixed_float16", "mixed_bfloat16"]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
X = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
WAYS = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step, autograph=False),
    "autograph": tf.function,
}


@tf.custom_gradient
def reverse(x):
    """Turns gradients round, by a float32 factor."""
    return tf.identity(x), lambda upstream: upstream * tf.constant(-0.3)


class Counting(layers.Layer):
    """Counts its calls in a variable, in TensorFlow's own, on itself, and in print."""

    def __init__(self, function=None, **options):
        super().__init__(**options)
        self.function = function
        self.norm = layers.BatchNormalization(momentum=0.5)
        self.count = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False, name="count"
        )
        self.total = tf.Variable(0)
        self.calls = 0

    def call(self, x, training=None):
        self.calls += 1
        print("called")
        self.count.assign_add(1)
        self.total.assign_add(1)
        x = self.norm(x, training=training)
        return x if self.function is None else self.function(x)


FAULTS = {"none": None, "backward": reverse, "forward": lambda x: x + tf.ones((1, 6))}


@pytest.mark.quick("eager-none-mixed_float16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_bare_layer_has_its_effects_once(way, fault, policy, capsys):
    with tfamp.scope(policy):
        layer = Counting(FAULTS[fault])
        run = way(lambda x: layer(x, training=True))
        run(np.full((4, 6), 10, "float32"))
        printed = capsys.readouterr().out.count("called")
        assert layer.count.numpy() == layer.total.numpy() == 1
        np.testing.assert_array_equal(layer.norm.moving_mean, np.full(6, 5.0))
        # Python's own: once where it runs, as Keras traces it, and once by AutoGraph.
        assert layer.calls == printed
        run(np.full((4, 6), 10, "float32"))
        assert layer.count.numpy() == layer.total.numpy() == 2


@pytest.mark.quick("none")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_in_fit_has_its_effects_once_a_step(fault):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.counting = Counting(FAULTS[fault])
            self.last = layers.Dense(1)

        def call(self, x, training=None):
            return self.last(self.counting(x, training=training))

    with tfamp.scope("mixed_bfloat16"):
        model = Model()
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, X[:, :1], epochs=2, batch_size=8, verbose=0)
    # Two epochs of two steps.
    assert model.counting.count.numpy() == model.counting.total.numpy() == 4


@pytest.mark.quick("None")
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_python_of_a_layer_in_an_eager_loop_runs_as_often_as_in_stock(policy, capsys):
    with tfamp.scope(policy) if policy else contextlib.nullcontext():
        layer = Counting()
        layer.norm.build((None, 6))
        layer.build((None, 6))
        for _ in range(3):
            layer(X, training=True)
    assert layer.calls == 3
    assert capsys.readouterr().out.count("called") == 3


class Picky(layers.Layer):
    """Refuses its input with a word that is a dtype, too."""

    def __init__(self, error, fails=1000):
        super().__init__()
        self.error, self.left, self.num_calls = error, fails, 0

    def call(self, x):
        self.num_calls += 1
        if tf.executing_eagerly() and self.left:
            self.left -= 1
            raise self.error
        return x * 2


def test_an_error_that_passes_leaves_the_layer_as_it_was(caplog):
    error = ValueError("the crop must be at least half of the image")
    with tfamp.scope("mixed_bfloat16"):
        layer = Picky(error, fails=1)
        with pytest.raises(type(error)):
            layer(X)
        assert layer(X).dtype == tf.bfloat16
    assert layer.compute_dtype == "bfloat16"
    assert "computes in float32" not in caplog.text
