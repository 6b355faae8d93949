"""Training loops in the words of Keras 3 and of legacy Keras, and of neither."""

import warnings

import keras
import pytest
import tensorflow as tf

import tfamp
from tests.loops import in_each_way

SCALE = 2.0**15


def loss_of(weight):
    """3 w squared, whose gradient at 1 is 6."""
    return 3.0 * tf.square(tf.convert_to_tensor(weight))


def keras_3(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(loss_of(weight))
    optimizer.apply(tape.gradient(loss, [weight.value]), [weight])


def keras_3_pairs(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(loss_of(weight))
    gradients = tape.gradient(loss, [weight.value])
    optimizer.apply_gradients(zip(gradients, [weight], strict=True))


def legacy(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = optimizer.get_scaled_loss(loss_of(weight))
    gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [weight.value]))
    optimizer.apply_gradients(zip(gradients, [weight], strict=True))


def unscaled(optimizer, weight):
    with tf.GradientTape() as tape:
        loss = loss_of(weight)
    optimizer.apply(tape.gradient(loss, [weight.value]), [weight])


LOOPS = [
    keras_3,
    keras_3_pairs,
    legacy,
    unscaled,
]


@pytest.mark.quick("keras_3-xla-built", "legacy-graph-unbuilt")
@pytest.mark.parametrize("is_built", [True, False], ids=["built", "unbuilt"])
@in_each_way
@pytest.mark.parametrize("loop", LOOPS)
def test_every_way_makes_the_same_updates(loop, decorate, is_built):
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    if is_built:
        optimizer.build([weight])
    step = decorate(lambda: loop(optimizer, weight))
    step()
    assert float(weight) == 1 - 6 / 8
    assert optimizer.gradient_norm == 6
    step()
    assert float(weight) == 0.25 - 1.5 / 8
    assert int(optimizer.iterations) == 2


FORGOTTEN = "no loss was multiplied by it"


def by_symbols(optimizer, weight):
    loss = loss_of(weight)
    optimizer.apply(tf.gradients(loss, [weight.value]), [weight])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_gradients_of_no_tape_are_told_of_once(jit_compile):
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    optimizer.build([weight])
    step = tf.function(
        lambda: by_symbols(optimizer, weight), autograph=False, jit_compile=jit_compile
    )
    with pytest.warns(UserWarning, match=FORGOTTEN) as caught:
        step()
    step()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_gradients_made_by_hand_are_not_told_at_once():
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            optimizer.apply([tf.constant(SCALE)], [weight])
    with pytest.warns(UserWarning, match=FORGOTTEN):
        optimizer.apply([tf.constant(SCALE)], [weight])
