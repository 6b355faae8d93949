"""`tfamp.remat`: the same training with activations computed again, not kept."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.styles import STYLES, Own, assembled

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")

L = keras.layers
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
WAYS = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "xla": {"jit_compile": True},
    "several steps": {"steps_per_execution": 2},
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8)).astype(np.float32)
Y = RNG.normal(size=(32, 3)).astype(np.float32)
# Rounding of one step, and of the steps that follow from it; half precision rounds
# otherwise where a graph fuses otherwise.
TOLERANCE = {"float32": 1e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 1e-2}


@keras.saving.register_keras_serializable(package="tests")
class Block(L.Layer):
    """Layers in a layer: dropout, statistics, a loss of its own, an optional scale."""

    def __init__(self, width=8, **options):
        super().__init__(**options)
        self.width = width
        self.norm = L.BatchNormalization()
        self.dense = L.Dense(width, activation="gelu")
        self.drop = L.Dropout(0.3)
        self.supports_masking = True

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=None, scale=None):
        y = self.drop(self.dense(self.norm(x, training=training)), training=training)
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.cast(y, "float32") ** 2))
        return x + y if scale is None else x + y * scale


class Attending(keras.Model):
    """Attention with a mask, keyword arguments and a flag."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = L.Embedding(20, 8, mask_zero=True)
        self.attend = L.MultiHeadAttention(2, 4, dropout=0.2, name="attend")
        self.block = Block(name="block")
        self.head = L.Dense(3)

    def call(self, ids, training=None):
        x = self.table(ids)
        y = self.attend(query=x, value=x, training=training, use_causal_mask=True)
        y = self.block(y, training=training, scale=0.5)
        return self.head(keras.ops.mean(y, axis=1))


def blocks(num=4):
    return [*(Block() for _ in range(num)), L.Dense(3)]


def trained(make, policy, options, *, again, data=(X, Y), epochs=2):
    """Losses, weights and statistics after a short training."""
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy):
        model = make()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, "mse", **options)
    x, y = data
    model(x[:1])
    if again is True:
        assert tfamp.remat(model) is model
    elif again:
        tfamp.remat([layer for layer in model.layers if layer.name in again])
    history = model.fit(x, y, 8, epochs, shuffle=False, verbose=0)
    return history.history["loss"], [np.asarray(w) for w in model.variables], model


def assert_same(make, policy, options, *, again=True, **arguments):
    plain, weights, _ = trained(make, policy, options, again=False, **arguments)
    losses, ours, model = trained(make, policy, options, again=again, **arguments)
    tolerance = TOLERANCE[policy]
    np.testing.assert_allclose(losses, plain, rtol=tolerance)
    for a, b, variable in zip(ours, weights, model.variables, strict=True):
        if "seed" in variable.path or a.dtype.kind in "iu":
            np.testing.assert_array_equal(a, b, err_msg=variable.path)
        else:
            np.testing.assert_allclose(a, b, atol=5 * tolerance, rtol=5 * tolerance)
    return model


# Each policy, each way and each style once.
CELLS = [
    (POLICIES[-1 - place % len(POLICIES)], way, STYLES[place % len(STYLES)])
    for place, way in enumerate(WAYS)
]


@pytest.mark.quick("mixed_bfloat16-eager-*")
@pytest.mark.parametrize(("policy", "way", "style"), CELLS)
def test_training_is_the_same(policy, way, style):
    assert_same(lambda: assembled(blocks(2), style, (8,)), policy, WAYS[way])


@pytest.mark.slow
def test_attention_with_masks_and_keyword_arguments():
    ids = RNG.integers(0, 20, (32, 6))
    again = ["attend", "block"]
    assert_same(Attending, "float32", {}, again=again, data=(ids, Y))


def gradient_of(model, **options):
    @tf.function(**options)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return step


def matmuls(model):
    """The matrix products of a traced train step."""
    targets = np.zeros((len(X), *model.output_shape[1:]), np.float32)
    graph = gradient_of(model).get_concrete_function(X, targets).graph
    return sum(operation.type == "MatMul" for operation in graph.get_operations())


def deep():
    dense = [L.Dense(8, activation="tanh", name=f"dense_{i}") for i in range(9)]
    return keras.Sequential([keras.Input((8,)), *dense, L.Dense(3, name="last")])


def test_a_graph_is_cut_and_all_but_the_last_segment_computed_again():
    model = deep()
    plain = matmuls(model)
    tfamp.remat(model)
    # Of three segments two are computed again: seven of ten layers.
    assert plain < matmuls(model) <= plain + 8
    tfamp.remat(model, enabled=False)
    assert matmuls(model) == plain
    assert tfamp.remat(model.layers[2:4]) == model.layers[2:4]
    assert matmuls(model) == plain + 2
    assert tfamp.remat(model.layers[2], enabled=False) is model.layers[2]
    assert matmuls(model) == plain + 1


@pytest.mark.parametrize(("widths", "before"), [((64, 8, 64), 2), ((64, 64, 8), 1)])
def test_a_cut_lies_where_the_fewest_bytes_pass(widths, before):
    layers = [L.Dense(width, activation="tanh") for width in widths]
    model = keras.Sequential([keras.Input((8,)), *layers])
    plain = matmuls(model)
    # And one for the gradient of the inputs.
    assert matmuls(tfamp.remat(model)) == plain + before + 1


def test_a_loop_of_ones_own():
    found = []
    for again in (False, True):
        keras.utils.set_random_seed(0)
        model = assembled(blocks(), "functional", (8,))
        if again:
            tfamp.remat(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
            loss += tf.add_n(model.losses)
        found.append([loss, *tape.gradient(loss, model.trainable_variables)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def refused_in_fit(layer, message, **options):
    model = keras.Sequential([keras.Input((8,)), L.Dense(8), layer, L.Dense(3)])
    model.compile("sgd", "mse", **options)
    tfamp.remat(layer)
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_what_would_differ_a_second_time_is_refused(eager):
    layer = Own(lambda x: x + tf.random.normal(tf.shape(x)))
    why = "the second time" if eager else "draws random numbers"
    told = rf"Cannot compute '{layer.name}' .* {why}"
    refused_in_fit(layer, told, run_eagerly=eager)


def test_a_write_past_keras_is_refused():
    count = tf.Variable(0.0)

    def counted(x):
        count.assign_add(1.0)
        return x * 2

    refused_in_fit(Own(counted), "writes to a variable")


def test_xla_computes_again_too():
    def tanhs(model):
        step = gradient_of(model, jit_compile=True)
        program = step.experimental_get_compiler_ir(tf.constant(X), tf.constant(Y))
        return len(re.findall(r"\btanh\(", program(stage="optimized_hlo")))

    model = deep()
    plain = tanhs(model)
    assert tanhs(tfamp.remat(model)) >= plain + 5


def test_kerass_own_still_fails_where_ours_works():
    def make():
        layers = [L.Dense(8), L.BatchNormalization(), L.Dropout(0.2), L.Dense(3)]
        return keras.Sequential([keras.Input((8,)), *layers])

    with keras.RematScope(mode="full"):
        model = make()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="keywords arguments only when eager"):
        model.fit(X, Y, verbose=0)
    assert_same(make, "mixed_float16", {})
