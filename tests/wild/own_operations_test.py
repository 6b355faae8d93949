"""What a layer computes itself is float32 where a loss or an output comes of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

layers, ops = keras.layers, keras.ops
POLICIES = ["mixed_float16", "mixed_bfloat16"]
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
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
        self.seen = hidden.dtype
        self.add_loss(1e-6 * ops.sum(ops.square(hidden)))
        return x + self.norm(hidden)


class CastsByHand(layers.Layer):
    """Runs in float16 alone."""

    def call(self, x):
        y = x * tf.cast(2.0, tf.float16)
        self.add_loss(tf.reduce_mean(tf.square(y)))
        return y


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


class Tied(keras.Model):
    """Its logits are products with the table of its embedding."""

    def __init__(self, size=20):
        super().__init__()
        self.table = layers.Embedding(size, 8)
        self.dense = layers.Dense(8)

    def call(self, ids):
        hidden = self.dense(self.table(ids))
        return ops.matmul(hidden, ops.transpose(self.table.embeddings))


def functional(layer):
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(1)(layer(inputs)))


def managed(make, way, policy):
    if way == "enable":
        with tfamp.scope(policy):
            return make()
    model = make()
    if not model.built:
        model(LARGE)
    tfamp.apply(model, policy)
    return model


@pytest.mark.quick("layer-apply-mixed_bfloat16")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["enable", "apply"])
@pytest.mark.parametrize(
    "make", [lambda: functional(Penalized()), WithLoss], ids=["layer", "model"]
)
def test_a_loss_that_a_call_adds_is_summed_in_float32(make, way, policy):
    model = managed(make, way, policy)
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
        model = functional(Penalized(name="penalized"))
    rows = {row.class_name: row for row in tfamp.assignment(model).layers}
    outer = tfamp.assignment(model)["penalized"]
    assert (outer.rule, outer.compute_dtype) == ("default: own loss", "float32")
    assert outer.output_dtype == "bfloat16"
    assert tfamp.assignment(model)["penalized/dense"].compute_dtype == "bfloat16"
    assert rows["LayerNormalization"].compute_dtype == "float32"


def test_a_layer_that_float32_breaks_is_left_in_half_precision(caplog):
    with tfamp.scope("mixed_float16"):
        model = functional(CastsByHand(name="by_hand"))
    assert tfamp.assignment(model)["by_hand"].compute_dtype == "float16"
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((8, 4), "float32")
    assert np.isfinite(model.fit(x, x[:, :1], verbose=0).history["loss"][0])
    assert "'by_hand' computes in float16: in float32, for rule" in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["enable", "apply"])
def test_a_product_of_the_models_own_that_ends_it_is_float32(way, policy):
    keras.utils.set_random_seed(0)
    ids = np.arange(12).reshape(3, 4)
    if way == "enable":
        with tfamp.scope(policy):
            model = Tied()
    else:
        model = Tied()
        model(ids)
        tfamp.apply(model, policy)
    logits = model(ids)
    hidden = tf.cast(model.dense(model.table(ids)), tf.float64)
    table = tf.cast(model.table.embeddings.value, tf.float64)
    expected = tf.matmul(hidden, tf.tile(table[None], (3, 1, 1)), transpose_b=True)
    assert logits.dtype == tf.float32
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-7)
    rows = {row.class_name: row for row in tfamp.assignment(model).layers}
    assert rows["Tied"].rule == "default: heads"
    assert rows["Dense"].compute_dtype == policy.removeprefix("mixed_")


@keras.saving.register_keras_serializable("own_operations")
class Scaled(keras.Model):
    """Multiplies by a float32 tensor, between sublayers without weights as yet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = layers.Embedding(20, 8)
        self.last = layers.Dense(2)

    def call(self, ids):
        hidden = self.table(ids)
        hidden *= tf.math.sqrt(8.0)
        return self.last(hidden)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_first_called_eagerly_is_loaded_with_its_weights(policy, tmp_path):
    ids = np.arange(8).reshape(2, 4)
    with tfamp.scope(policy):
        model = Scaled()
    expected = model(ids)
    model.save(tmp_path / "model.keras")
    loaded = tfamp.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(ids), expected)
