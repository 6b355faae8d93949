"""Reading traced graphs: operations, loops, branches, and their FLOPs by hand."""

import keras
import pytest
import tensorflow as tf

from tfamp import graph
from tfamp.graph import products

L = keras.layers
pytestmark = pytest.mark.usefixtures("without_float16")


def traced(function, *specs):
    """Returns the concrete function of `function` on inputs of these shapes."""
    specs = [tf.TensorSpec(spec) if isinstance(spec, tuple) else spec for spec in specs]
    return tf.function(function).get_concrete_function(*specs)


def counted(concrete):
    """Returns the FLOPs of a call, and the names of products that are not known."""
    found = list(filter(products.is_product, graph.read_operations(concrete)))
    flops = [products.flops_of(each) for each in found]
    pairs = list(zip(found, flops, strict=True))
    unknown = [o.name for o, n in pairs if n is None or not o.is_counted]
    return sum((n or 0) * o.count for o, n in pairs), unknown


def flops_of(function, *specs):
    """Returns the FLOPs of a function on inputs of these shapes."""
    flops, unknown = counted(traced(function, *specs))
    assert unknown == []
    return flops


def in_training(layer, shape):
    """Returns the FLOPs of one forward pass in training mode."""
    return flops_of(lambda x: layer(x, training=True), shape)


def with_gradient(function):
    """Returns a function that gives what another gives, and its gradient."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, tape.gradient(y, x)

    return gradient


def attention(num_heads, key_dim):
    """Returns a model that attends over its own inputs of 6 x 8."""
    inputs = keras.Input((6, 8))
    layer = L.MultiHeadAttention(num_heads, key_dim)
    return keras.Model(inputs, layer(inputs, inputs))


# Multiply-adds of an example in a batch of 2; the numbers of a convolution are
# positions of the output * channels * window * channels in a group.
IMAGES, TOKENS = (2, 8, 8, 4), (2, 6, 8)
FORWARD = {
    "Dense": (L.Dense(5), (2, 3), 3 * 5),
    "Dense over tokens": (L.Dense(5), (2, 7, 3), 7 * 3 * 5),
    "EinsumDense": (L.EinsumDense("abc,cd->abd", (None, 5)), (2, 7, 3), 7 * 3 * 5),
    "Conv1D": (L.Conv1D(6, 3), (2, 8, 4), 6 * 6 * 3 * 4),
    "Conv2D valid": (L.Conv2D(6, (3, 5)), IMAGES, (6 * 4) * 6 * (3 * 5) * 4),
    "Conv2D strided": (L.Conv2D(6, 3, 2, padding="same"), IMAGES, (4 * 4) * 6 * 9 * 4),
    "Conv2D in groups": (L.Conv2D(6, 3, groups=2), IMAGES, (6 * 6) * 6 * 9 * 2),
    "Conv3D": (L.Conv3D(3, 2), (2, 4, 4, 4, 2), 27 * 3 * 8 * 2),
    "depthwise": (L.DepthwiseConv2D(3, depth_multiplier=2), IMAGES, 6 * 6 * 8 * 9),
    "separable": (L.SeparableConv2D(5, 3), IMAGES, 6 * 6 * 4 * 9 + 6 * 6 * 5 * 4),
    # Each of the 8 x 8 x 4 inputs is spread over a window of 9 x 5.
    "transposed": (L.Conv2DTranspose(5, 3, strides=2), IMAGES, (8 * 8 * 4) * 9 * 5),
    # Four projections of 8 x 8; two products of 6 x 6 x 4 for each of two heads.
    "attention": (attention(2, 4), TOKENS, 4 * (6 * 8 * 8) + 2 * 2 * (6 * 6 * 4)),
    # Six steps of inputs 8 x 16 and states 4 x 16 (four gates of four units).
    "LSTM": (L.LSTM(4), TOKENS, 6 * (8 * 16 + 4 * 16)),
    "Bidirectional GRU": (
        L.Bidirectional(L.GRU(4, return_sequences=True)),
        TOKENS,
        2 * 6 * (8 * 12 + 4 * 12),
    ),
    "no product": (L.LayerNormalization(), (2, 3), 0),
}


@pytest.mark.quick("EinsumDense", "Conv2D strided", "Conv3D", "attention", "no product")
@pytest.mark.parametrize("layer, shape, expected", FORWARD.values(), ids=FORWARD)
def test_forward_flops_of_a_layer_are_those_by_hand(layer, shape, expected):
    assert in_training(layer, shape) == 2 * 2 * expected


class Halving(L.Layer):
    """Multiplies by a matrix until the data say that it is enough."""

    def call(self, x):
        return tf.while_loop(
            lambda x: tf.reduce_max(x) > 1.0, lambda x: tf.matmul(x, x) / 2, [x]
        )[0]


def test_a_loop_that_data_end_counts_once_and_is_told():
    layer = Halving()
    flops, unknown = counted(traced(lambda x: layer(x), (4, 4)))
    assert flops == 2 * 4**3 and len(unknown) == 1


ONE = 2 * 3 * 4 * 5  # of the product


# What is called, on a 3 x 4 and a 4 x 5 matrix.
FUNCTIONS = {
    "matmul": (tf.matmul, ONE),
    "left transposed": (lambda a, b: tf.matmul(tf.transpose(a), b, True), ONE),
    "right transposed": (lambda a, b: tf.matmul(a, tf.transpose(b), False, True), ONE),
    "batch": (lambda a, b: tf.matmul(tf.stack([a, a]), tf.stack([b, b])), 2 * ONE),
    "einsum": (lambda a, b: tf.einsum("ij,jk->ki", a, b), ONE),
    "einsum with dots": (
        lambda a, b: tf.einsum("...ij,jk->...ik", tf.stack([a, a]), b),
        2 * ONE,
    ),
    # i is summed in the first factor before anything is multiplied.
    "einsum, one factor summed": (lambda a, b: tf.einsum("ij,jk->k", a, b), 2 * 4 * 5),
    "einsum of one": (lambda a, b: tf.einsum("ij->ji", a), 0),
    "in a function": (lambda a, b: tf.function(tf.matmul)(a, b), ONE),
    "unused": (lambda a, b: [tf.matmul(a, b), a][1], 0),
    "branch by data": (
        lambda a, b: tf.cond(
            tf.reduce_sum(a) > 8, lambda: tf.matmul(a, b), lambda: tf.zeros((3, 5))
        ),
        ONE,
    ),
}


@pytest.mark.quick("matmul", "batch", "einsum of one", "in a function", "unused")
@pytest.mark.parametrize("function, expected", FUNCTIONS.values(), ids=FUNCTIONS)
def test_flops_of_a_function_are_those_by_hand(function, expected):
    assert flops_of(function, (3, 4), (4, 5)) == expected


def loop_over_range(x):
    for _ in tf.range(2, 12, 3):  # 2, 5, 8, 11
        x = tf.matmul(x, x)
    return x


def loop_in_loop(x):
    for _ in tf.range(3):
        for _ in tf.range(tf.shape(x)[0]):
            x = tf.matmul(x, x)
    return x


@tf.function
def limited_by_an_argument(x, limit):
    return tf.while_loop(lambda i, x: i < limit, lambda i, x: (i + 1, x @ x), [0, x])[1]


def limit_in_a_loop(x):
    for _ in tf.range(3):
        x = limited_by_an_argument(x, tf.constant(2))
    return x


def squared_while(condition, first=0, step=1, **options):
    """Returns a function that squares a matrix as long as a count is as asked."""
    return lambda x: tf.while_loop(
        lambda i, x: condition(i), lambda i, x: (i + step, x @ x), [first, x], **options
    )[1]


LOOPS = {
    "limit of a function": (lambda x: limited_by_an_argument(x, tf.shape(x)[0]), 4),
    "limit kept in a loop": (limit_in_a_loop, 6),
    "range with a step": (loop_over_range, 4),
    "loop in a loop": (loop_in_loop, 12),
    "counting down": (squared_while(lambda i: i > 2, 7, -1), 5),
    "never": (squared_while(lambda i: i < 0), 0),
    "map": (lambda x: tf.map_fn(lambda row: x @ x, x), 4),
}


@pytest.mark.quick("range with a step", "loop in a loop", "map")
@pytest.mark.parametrize("function, trips", LOOPS.values(), ids=LOOPS)
def test_a_loop_counts_as_often_as_it_runs(function, trips):
    assert flops_of(function, (4, 4)) == trips * 2 * 4**3


# A stack holds how often the inner loop of a "loop in a loop" ran.
GRADIENTS = {name: loop for name, loop in LOOPS.items() if " in a loop" not in name}


@pytest.mark.quick("limit of a function", "range with a step")
@pytest.mark.parametrize("function, trips", GRADIENTS.values(), ids=GRADIENTS)
def test_the_gradient_of_a_loop_counts_two_products_a_trip(function, trips):
    found = graph.read_operations(traced(with_gradient(function), (4, 4)))
    matmuls = [each for each in found if each.op_type == "MatMul"]
    assert sum(each.count for each in matmuls if not each.is_backward) == trips
    assert sum(each.count for each in matmuls if each.is_backward) == 2 * trips
    assert {products.flops_of(each) for each in matmuls} <= {2 * 4**3}


def test_the_gradient_of_a_model_counts_by_hand():
    model = keras.Sequential(
        [keras.Input((6, 6, 2)), L.Conv2D(4, 3), L.Flatten(), L.Dense(3)]
    )

    def gradients(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(model(x, training=True))
        return y, tape.gradient(y, model.trainable_variables)

    convolution, product = 2 * 8 * 16 * 4 * 9 * 2, 2 * 8 * 64 * 3
    # The inputs need no gradient, so the convolution has one product backwards.
    assert flops_of(gradients, (8, 6, 6, 2)) == 2 * convolution + 3 * product


def test_an_unknown_batch_is_reported_by_name():
    assert counted(traced(tf.matmul, (None, 4), (4, 5))) == (0, ["MatMul"])
