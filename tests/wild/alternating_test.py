"""Loops that train one part of a model in one microbatch and another in the next."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import in_each_way
from tests.replicas import two_replicas

# As many roundings as an update has operations.
FLOAT32 = 8 * np.finfo(np.float32).eps

pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


def accumulating(inner, steps=2):
    return tfamp.LossScaleOptimizer(
        inner, initial_scale=1, dynamic=False, accumulation_steps=steps
    )


def steps_of(optimizer, variables, decorate):
    """Returns for each variable a step that trains it alone."""

    def step_on(variable):
        return decorate(lambda g: optimizer.apply([g], [variable]))

    optimizer.build(variables)
    return [step_on(v) for v in variables]


@pytest.mark.quick("eager")
@in_each_way
def test_each_part_of_a_window_counts(decorate):
    variables = [keras.Variable(0.0) for _ in range(2)]
    optimizer = accumulating(keras.optimizers.SGD(1.0))
    first, second = steps_of(optimizer, variables, decorate)
    for _ in range(2):
        first(tf.constant(2.0))
        second(tf.constant(6.0))
    # Each gradient is one of two in its window.
    assert [float(v) for v in variables] == [-2, -6]
    assert optimizer.applied_steps == int(optimizer.iterations) == 2


@pytest.mark.quick("eager")
@in_each_way
def test_what_a_window_did_not_train_does_not_move(decorate):
    inner = keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.25)
    variables = [keras.Variable(1.0) for _ in range(3)]
    optimizer = accumulating(inner)
    steps = steps_of(optimizer, variables, decorate)
    for step in (0, 1, 0, 2, 2, 2):
        steps[step](tf.constant(2.0))
    by_hand = [keras.Variable(1.0) for _ in range(3)]
    plain = keras.optimizers.SGD(1.0, momentum=0.5, weight_decay=0.25)
    plain.build(by_hand)
    for means in ([1.0, 1.0, None], [1.0, None, 1.0], [None, None, 2.0]):
        plain.apply([g if g is None else tf.constant(g) for g in means], by_hand)
    np.testing.assert_allclose(variables, by_hand, rtol=FLOAT32)


@pytest.mark.quick("eager")
@in_each_way
def test_flush_applies_what_other_calls_added(decorate):
    variables = [keras.Variable(1.0) for _ in range(3)]
    optimizer = accumulating(keras.optimizers.SGD(1.0, weight_decay=0.5), 4)
    first, second, _ = steps_of(optimizer, variables, decorate)
    first(tf.constant(2.0))
    second(tf.constant(6.0))
    decorate(optimizer.flush)()
    # Each is half of the window, and half of each weight decays.
    assert [float(v) for v in variables] == [-0.5, -2.5, 1.0]


@pytest.mark.quick("eager")
@pytest.mark.parametrize("jit", [None, tf.function], ids=["eager", "graph"])
def test_on_two_replicas(jit):
    strategy = two_replicas()
    with strategy.scope():
        variables = [keras.Variable(0.0) for _ in range(3)]
        optimizer = accumulating(keras.optimizers.SGD(1.0, momentum=0.5))
        optimizer.build(variables)

    def step_on(variable):
        def step(x):
            strategy.run(lambda x: optimizer.apply([x * x], [variable]), args=(x,))

        return jit(step) if jit else step

    steps = [step_on(v) for v in variables]
    for step in (0, 1, 0, 2):
        steps[step](tf.constant(1.0))
    # Replicas are summed; the second time the first adds half of what it moved.
    assert [float(v.numpy()) for v in variables] == [-2.5, -1, -1]
