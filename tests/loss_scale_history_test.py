"""What a loop of one's own reads from a `LossScaleOptimizer`, step by step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

INF = float("inf")
# Unscaled gradients of one weight; the second and third steps are skipped.
GRADIENTS = [3.0, INF, INF, 4.0, 0.5]
SKIPPED = [False, True, True, False, False]
# A scale of 8 halves after each skipped step. After two skips in a row a finite one
# doubles it, until it is back at 8.
SCALES = [8.0, 8.0, 4.0, 2.0, 2.0]
RATES = [0.4, 0.2, 0.1]


def loop(optimizer, weight, gradients, after_step=lambda: None):
    """Takes a step with each gradient, scaled as a backward pass would have it."""
    for gradient in gradients:
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])
        after_step()


def in_a_function(optimizer, weight, gradients, after_step=lambda: None):
    """As `loop`, in one traced function that is called for each step."""

    @tf.function
    def step(gradient):
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])

    optimizer.build([weight])
    for gradient in gradients:
        step(tf.constant(gradient))
        after_step()


LOOPS = {"eager": loop, "tf.function": in_a_function}


def trained(run, gradients=GRADIENTS, after_step=None, rate=1.0, **options):
    """An optimizer, and a weight of 0, after a loop over `gradients`."""
    weight = keras.Variable(0.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(rate), 8.0, **options)
    run(optimizer, weight, gradients, *(after_step(optimizer),) if after_step else ())
    return optimizer, weight


@pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)
def test_history_tells_each_step(run):
    optimizer, weight = trained(run)
    history = optimizer.history()
    assert history["step"].tolist() == [1, 2, 3, 4, 5]
    assert history["scale"].tolist() == SCALES
    assert history["gradient_norm"].tolist() == GRADIENTS
    assert history["skipped"].tolist() == SKIPPED
    assert float(weight) == -7.5


def test_history_is_empty_before_the_first_step():
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
    assert {k: v.shape for k, v in optimizer.history().items()} == {
        key: (0,) for key in ("step", "scale", "gradient_norm", "skipped")
    }


def test_history_holds_the_last_1024_steps():
    weight = keras.Variable(0.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), 1.0, dynamic=False)
    optimizer.build([weight])

    @tf.function
    def run():
        for number in tf.range(1.0, 1031.0):
            optimizer.apply([number], [weight])

    run()
    history = optimizer.history()
    assert history["step"].tolist() == list(range(7, 1031))
    np.testing.assert_array_equal(history["gradient_norm"], history["step"])


@pytest.mark.parametrize("run", LOOPS.values(), ids=LOOPS)
def test_a_schedule_stepped_by_hand_waits_for_skipped_steps(run):
    used = []

    def scheduling(optimizer):
        position = 0

        def step_schedule():
            nonlocal position
            used.append(float(optimizer.learning_rate))
            if not optimizer.last_step_skipped:
                position += 1
            if position < len(RATES):
                optimizer.learning_rate = RATES[position]

        return step_schedule

    _, weight = trained(run, after_step=scheduling, rate=RATES[0])
    assert used == pytest.approx([0.4, 0.2, 0.2, 0.2, 0.1])
    assert float(weight) == pytest.approx(-(0.4 * 3 + 0.2 * 4 + 0.1 * 0.5))


def test_a_schedule_inside_the_function_waits_too():
    weight, rates = keras.Variable(0.0), tf.constant(RATES)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(RATES[0]), 8.0)
    optimizer.build([weight])
    position = tf.Variable(0)

    @tf.function
    def step(gradient):
        optimizer.apply([optimizer.scale_loss(gradient)], [weight])
        position.assign_add(tf.cast(~optimizer.last_step_skipped, tf.int32))
        optimizer.learning_rate.assign(rates[tf.minimum(position, 2)])

    for gradient in GRADIENTS:
        step(tf.constant(gradient))
    assert int(position) == 3
    assert float(weight) == pytest.approx(-(0.4 * 3 + 0.2 * 4 + 0.1 * 0.5))
