"""`activity_regularizer` and `add_loss`: what a layer adds is summed in float32."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED
from tests.styles import Own, assembled
from tests.wild.checking import made

layers, ops = keras.layers, keras.ops
POLICIES = ("mixed_float16", "mixed_bfloat16")
X = np.full((4, 2), 500.0, "float32")
Y = np.zeros((4, 1), "float32")


class AddsLoss(layers.Layer):
    """Adds the mean of its input to the loss, in the compute dtype."""

    def call(self, x):
        self.add_loss(ops.mean(x))
        return x


def regularized():
    return layers.Activation("linear", activity_regularizer=keras.regularizers.L2(1e-6))


def loss_in_fit(style, layer, mode):
    head = layers.Dense(1, kernel_initializer="zeros")
    model = assembled([layer, head], style, (2,))
    model.compile(keras.optimizers.SGD(0.0), "mse", **COMPILED[mode])
    return model.fit(X, Y, verbose=0).history["loss"][0]


@pytest.mark.quick("mixed_float16-functional-graph")
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_activity_regularizer(policy, style, mode):
    with tfamp.scope(policy):
        loss = loss_in_fit(style, regularized(), mode)
    # 1e-6 times the 8 squares of 500, which float16 cannot hold; later versions of
    # Keras divide by the batch of 4. The predictions are 0 and right.
    in_float32 = loss_in_fit(style, regularized(), "eager")
    assert in_float32 in (pytest.approx(2.0), pytest.approx(0.5))
    assert loss == pytest.approx(in_float32)


@pytest.mark.quick("mixed_float16-functional-graph")
@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_add_loss(policy, style, mode):
    with tfamp.scope(policy):
        loss = loss_in_fit(style, AddsLoss(), mode)
    assert loss == pytest.approx(500)


# A sum of squares of these is beyond float16, and rounded in bfloat16.
LARGE = np.linspace(10, 300, 32, dtype="float32").reshape(8, 4)


class Penalized(layers.Layer):
    """Adds a loss of its inputs, between sublayers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(4, kernel_initializer="identity", name="dense")
        self.norm = layers.LayerNormalization(name="norm")

    def call(self, x):
        hidden = self.dense(x)
        self.add_loss(1e-6 * ops.sum(ops.square(hidden)))
        return x + self.norm(hidden)


class WithLoss(keras.Model):
    """Adds a loss of what it computes itself, and multiplies at its end."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4, kernel_initializer="identity")
        self.last = layers.Dense(1)

    def call(self, x):
        hidden = self.first(x)
        self.add_loss(1e-6 * ops.sum(ops.square(hidden)))
        return self.last(hidden)


def around(layer):
    return assembled([layer, layers.Dense(1)], "functional", (4,))


def with_loss():
    model = WithLoss()
    model(LARGE)
    return model


@pytest.mark.quick("layer-apply-mixed_bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["enable", "apply"])
@pytest.mark.parametrize(
    "make", [lambda: around(Penalized()), with_loss], ids=["layer", "model"]
)
def test_a_loss_that_a_call_adds_is_summed_in_float32(make, way, policy):
    model = made(make, way, policy)
    model(LARGE)
    half = tf.cast(LARGE, policy.removeprefix("mixed_"))  # what the product gives
    expected = 1e-6 * np.sum(np.square(tf.cast(half, tf.float64)))
    (loss,) = model.losses
    assert loss.dtype == tf.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    model.compile("sgd", "mse", jit_compile=False)
    assert np.isfinite(model.fit(LARGE, LARGE[:, :1], verbose=0).history["loss"][0])
    assert model(LARGE).dtype == tf.float32


def test_sublayers_of_a_layer_with_a_loss_stay_in_half_precision():
    with tfamp.scope("mixed_bfloat16"):
        rows = tfamp.assignment(around(Penalized(name="penalized")))
    outer = rows["penalized"]
    assert (outer.rule, outer.compute_dtype) == ("default: own loss", "float32")
    assert outer.output_dtype == "bfloat16"
    assert rows["penalized/dense"].compute_dtype == "bfloat16"
    assert rows["penalized/norm"].compute_dtype == "float32"


class CastsByHand(layers.Layer):
    """Runs in float16 alone."""

    def call(self, x):
        y = x * tf.cast(2.0, tf.float16)
        self.add_loss(tf.reduce_mean(tf.square(y)))
        return y


def test_a_layer_that_float32_breaks_is_left_in_half_precision(caplog):
    with tfamp.scope("mixed_float16"):
        model = around(CastsByHand(name="by_hand"))
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 4), "float32")
    assert np.isfinite(model.fit(x, x[:, :1], verbose=0).history["loss"][0])
    assert tfamp.assignment(model)["by_hand"].compute_dtype == "float16"
    assert "'by_hand' computes in float16: in float32, for rule" in caplog.text
    with tfamp.scope("mixed_float16"):
        alone = CastsByHand()
        assert alone(x).dtype == "float16"


def adds_its_mean(call):
    """Has a `call` add the sum of the squares it gives, as a decorator does."""

    @functools.wraps(call)
    def adds(self, x):
        y = call(self, x)
        self.add_loss(ops.sum(ops.square(y)))
        return y

    return adds


class Decorated(layers.Layer):
    """Adds a loss that its own code does not name."""

    @adds_its_mean
    def call(self, x):
        return x * 1.0


class Derived(AddsLoss):
    """Adds a loss in the code of its base class."""

    def call(self, x):
        return super().call(x * 400.0)


class ByFunction(layers.Layer):
    """Adds a loss by a function."""

    def call(self, x):
        AddsLoss.call(self, x * 400.0)
        return x


@pytest.mark.quick("*-functional")
@pytest.mark.parametrize("style", ["functional", "subclassed"])
@pytest.mark.parametrize("layer", [Decorated, Derived, ByFunction])
def test_a_loss_is_seen_whatever_code_adds_it(layer, style):
    with tfamp.scope("mixed_float16"):
        loss = loss_in_fit(style, layer(), "graph")
    assert loss == pytest.approx(loss_in_fit(style, layer(), "graph"))
    assert np.isfinite(loss)


def test_a_regularizer_has_its_attributes_inside_a_call():
    def call(layer, x):
        factor = layer.activity_regularizer.l2
        assert layer.activity_regularizer.get_config() == {"l2": 0.5}
        layer.add_loss(factor * tf.reduce_sum(x * x))
        return x

    with tfamp.scope("mixed_bfloat16"):
        regularizer = keras.regularizers.L2(0.5)
        layer = Own(lambda x: call(layer, x), activity_regularizer=regularizer)
    layer(np.full((1, 2), 2.0, "float32"))
    # Half of the two squares of 2, by the layer and by its regularizer.
    assert [float(loss) for loss in layer.losses] == [4.0, 4.0]
