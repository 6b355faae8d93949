"""Traced graphs: operations, loops, their FLOPs by hand, and what memory they need."""

import keras
import pytest
import tensorflow as tf

from tfamp import graph
from tfamp.graph import products
from tfamp.graph.bodies import is_backward
from tfamp.graph.schedules import find_peak, read_schedule, scaled

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
    "Dense over tokens": (L.Dense(5), (2, 7, 3), 7 * 3 * 5),
    "EinsumDense": (L.EinsumDense("abc,cd->abd", (None, 5)), (2, 7, 3), 7 * 3 * 5),
    "Conv2D strided": (L.Conv2D(6, 3, 2, padding="same"), IMAGES, (4 * 4) * 6 * 9 * 4),
    "Conv2D in groups": (L.Conv2D(6, 3, groups=2), IMAGES, (6 * 6) * 6 * 9 * 2),
    "Conv3D": (L.Conv3D(3, 2), (2, 4, 4, 4, 2), 27 * 3 * 8 * 2),
    "separable": (L.SeparableConv2D(5, 3), IMAGES, 6 * 6 * 4 * 9 + 6 * 6 * 5 * 4),
    # Each of the 8 x 8 x 4 inputs is spread over a window of 9 x 5.
    "transposed": (L.Conv2DTranspose(5, 3, strides=2), IMAGES, (8 * 8 * 4) * 9 * 5),
    # Four projections of 8 x 8; two products of 6 x 6 x 4 for each of two heads.
    "attention": (attention(2, 4), TOKENS, 4 * (6 * 8 * 8) + 2 * 2 * (6 * 6 * 4)),
    # Six steps of inputs 8 x 16 and states 4 x 16 (four gates of four units).
    "LSTM": (L.LSTM(4), TOKENS, 6 * (8 * 16 + 4 * 16)),
    "Bidirectional GRU": (
        L.Bidirectional(L.GRU(4, return_sequences=True)),
        *(TOKENS, 2 * 6 * (8 * 12 + 4 * 12)),
    ),
    "no product": (L.LayerNormalization(), (2, 3), 0),
}


@pytest.mark.quick("EinsumDense", "Conv2D strided", "attention", "LSTM", "no product")
@pytest.mark.parametrize("layer, shape, expected", FORWARD.values(), ids=FORWARD)
def test_forward_flops_of_a_layer_are_those_by_hand(layer, shape, expected):
    assert flops_of(lambda x: layer(x, training=True), shape) == 2 * 2 * expected


ONE = 2 * 3 * 4 * 5  # of the product
# What is called, on a 3 x 4 and a 4 x 5 matrix.
FUNCTIONS = {
    "left transposed": (lambda a, b: tf.matmul(tf.transpose(a), b, True), ONE),
    "right transposed": (lambda a, b: tf.matmul(a, tf.transpose(b), False, True), ONE),
    "batch": (lambda a, b: tf.matmul(tf.stack([a, a]), tf.stack([b, b])), 2 * ONE),
    "einsum with dots": (
        lambda a, b: tf.einsum("...ij,jk->...ik", tf.stack([a, a]), b),
        2 * ONE,
    ),
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


@pytest.mark.quick("batch", "einsum with dots", "in a function", "unused")
@pytest.mark.parametrize("function, expected", FUNCTIONS.values(), ids=FUNCTIONS)
def test_flops_of_a_function_are_those_by_hand(function, expected):
    assert flops_of(function, (3, 4), (4, 5)) == expected


def scan(x):
    return tf.scan(lambda y, _: y @ y, tf.zeros(6), x)


LOOPS = {"map": (lambda x: tf.map_fn(lambda row: x @ x, x), 4), "scan": (scan, 6)}


@pytest.mark.parametrize("function, trips", LOOPS.values(), ids=LOOPS)
def test_a_loop_counts_once_for_each_entry_of_its_list(function, trips):
    assert flops_of(function, (4, 4)) == trips * 2 * 4**3


@pytest.mark.parametrize("function, trips", LOOPS.values(), ids=LOOPS)
def test_the_gradient_of_a_loop_counts_two_products_a_trip(function, trips):
    found = graph.read_operations(traced(with_gradient(function), (4, 4)))
    matmuls = [each for each in found if each.op_type == "MatMul"]
    assert sum(each.count for each in matmuls if not is_backward(each.name)) == trips
    assert sum(each.count for each in matmuls if is_backward(each.name)) == 2 * trips
    assert {products.flops_of(each) for each in matmuls} <= {2 * 4**3}


def test_a_loop_that_data_end_counts_once_and_is_told():
    def halved(x):
        return tf.while_loop(
            lambda x: tf.reduce_max(x) > 1.0, lambda x: tf.matmul(x, x) / 2, [x]
        )[0]

    flops, unknown = counted(traced(halved, (4, 4)))
    assert flops == 2 * 4**3 and len(unknown) == 1


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


# Bytes of 64 x 64 numbers in float32.
SQUARE, BYTES = (64, 64), 2**14


def peak_of(function, *specs):
    """Returns the peak of a traced function, and what lives then."""
    return find_peak(read_schedule(traced(function, *specs)))


def test_a_chain_that_writes_in_place_needs_one_buffer():
    peak = peak_of(lambda x: tf.exp(tf.tanh(tf.transpose(x))), SQUARE)
    assert peak.num_bytes == BYTES


def test_what_a_gradient_needs_is_kept_until_then():
    # tanh keeps its output: four in all, then the first gradient in place.
    chain = with_gradient(lambda x: tf.tanh(tf.tanh(tf.tanh(tf.tanh(x)))))
    peak = peak_of(lambda x: chain(x)[1], SQUARE)
    # Four outputs, and ones that the gradient starts from.
    assert 4 * BYTES <= peak.num_bytes <= 5 * BYTES
    assert sum(held.num_bytes for held in peak.held) == peak.num_bytes


def test_reshapes_and_reads_of_variables_cost_nothing():
    variable = tf.Variable(tf.zeros(SQUARE))

    def read(x):
        return tf.reshape(x, (-1,))[0] + tf.reshape(variable, (4096,))[0]

    assert peak_of(read, SQUARE).num_bytes <= 64


def test_a_loop_keeps_one_tensor_for_each_of_its_runs_and_no_variable():
    variable = tf.Variable(tf.zeros(SQUARE))

    def last(x):
        step = lambda y, _: tf.tanh(tf.matmul(y, variable))  # noqa: E731
        return tf.foldl(step, tf.zeros(10), x)

    kept = peak_of(lambda x: with_gradient(last)(x)[1], SQUARE).num_bytes / BYTES
    # Ten inputs of the product, which are the outputs of tanh before; not ten copies
    # of the variable beside them.
    assert 10 <= kept <= 18


def test_the_dearer_branch_of_a_condition_counts():
    def branches(x, is_large):
        return tf.cond(
            is_large,
            lambda: tf.reduce_sum(tf.transpose(tf.transpose(tf.transpose(x)))),
            lambda: tf.constant(0.0),
        )

    peak = peak_of(branches, SQUARE, tf.TensorSpec((), tf.bool))
    assert 2 * BYTES <= peak.num_bytes <= 2 * BYTES + 64


def test_a_plan_is_scaled_to_another_batch():
    plans = [
        read_schedule(traced(lambda x: tf.transpose(x @ tf.ones((8, 4))), (size, 8)))
        for size in (10, 20)
    ]
    plan = scaled(*plans, (10, 20), 50)
    assert find_peak(plan).num_bytes == 2 * 50 * 4 * 4
