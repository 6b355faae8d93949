"""Which buffers a plan holds at the same time, against sums made by hand."""

import pytest
import tensorflow as tf

from tfamp.graph.liveness import find_peak
from tfamp.graph.schedules import read_schedule, scaled

pytestmark = pytest.mark.usefixtures("without_float16")
KIB = 2**10
# 64 x 64 numbers in float32.
ONE = 16 * KIB


def peak_of(function, *specs):
    """Returns the peak of a traced function, and what lives then."""
    concrete = tf.function(function).get_concrete_function(*specs)
    return find_peak(read_schedule(concrete))


def square(dtype=tf.float32):
    return tf.TensorSpec((64, 64), dtype)


def test_a_chain_that_writes_in_place_needs_one_buffer():
    peak = peak_of(lambda x: tf.exp(tf.tanh(tf.transpose(x))), square())
    assert peak.num_bytes == ONE


def test_what_a_gradient_needs_is_kept_until_then():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            # tanh keeps its output: four in all, then the first gradient in place.
            y = tf.tanh(tf.tanh(tf.tanh(tf.tanh(x))))
        return tape.gradient(y, x)

    peak = peak_of(gradient, square())
    # Four outputs, and ones that the gradient starts from.
    assert 4 * ONE <= peak.num_bytes <= 5 * ONE
    assert sum(held.num_bytes for held in peak.held) == peak.num_bytes


def test_reshapes_and_reads_of_variables_cost_nothing():
    variable = tf.Variable(tf.zeros((64, 64)))

    def read(x):
        return tf.reshape(x, (-1,))[0] + tf.reshape(variable, (4096,))[0]

    assert peak_of(read, square()).num_bytes <= 64


def test_a_loop_keeps_one_tensor_for_each_of_its_runs():
    def loop(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(10):
                y = tf.tanh(y)
        return tape.gradient(y, x)

    kept = peak_of(loop, square()).num_bytes / ONE
    # Ten outputs of tanh; a few more for the running value and its gradient.
    assert 10 <= kept <= 14


def test_a_variable_that_a_loop_reads_is_not_kept_for_each_run():
    variable = tf.Variable(tf.zeros((64, 64)))

    def loop(x):
        with tf.GradientTape() as tape:
            y = x
            for _ in tf.range(10):
                y = tf.tanh(tf.matmul(y, variable))
        return tape.gradient(y, variable)

    kept = peak_of(loop, square()).num_bytes / ONE
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

    peak = peak_of(branches, square(), tf.TensorSpec((), tf.bool))
    assert 2 * ONE <= peak.num_bytes <= 2 * ONE + 64


def test_a_plan_is_scaled_to_another_batch():
    function = tf.function(lambda x: tf.transpose(tf.matmul(x, tf.ones((8, 4)))))
    plans = [
        read_schedule(function.get_concrete_function(tf.TensorSpec((size, 8))))
        for size in (10, 20)
    ]
    plan = scaled(*plans, (10, 20), 50)
    assert find_peak(plan).num_bytes == 2 * 50 * 4 * 4
