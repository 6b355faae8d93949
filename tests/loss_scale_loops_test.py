"""Training loops in the words of Keras 3 and of legacy Keras, and of neither."""

import threading
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


def test_the_two_styles_in_turn():
    weight = keras.Variable(1.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    turns = (keras_3, legacy, unscaled, legacy, keras_3, unscaled, legacy)
    for loop in (*turns, keras_3):
        before = float(weight)
        loop(optimizer, weight)
        assert float(weight) == pytest.approx(before / 4)


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


@pytest.mark.quick("keras_3_pairs")
@pytest.mark.parametrize("loop", LOOPS)
def test_who_scales_is_never_told(loop):
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.125))
    weight = keras.Variable(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            loop(optimizer, weight)


def test_without_a_scale_nothing_is_forgotten():
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(0.125), initial_scale=1, dynamic=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0)])


def test_what_a_tape_said_of_variables_ends_with_them():
    """Python gives the identity of an object that is gone to a later one."""
    sgd = keras.optimizers.SGD(0.01)
    not_built = tfamp.LossScaleOptimizer(sgd, initial_scale=8.0, dynamic=False)

    def gradients_that_nobody_applies():
        many = [tf.Variable(1.0) for _ in range(50)]
        with tf.GradientTape() as tape:
            loss = tf.add_n([2.0 * variable for variable in many])
        tape.gradient(loss, many)
        return frozenset(map(id, many))

    gone = gradients_that_nobody_applies()
    later = [keras.Variable(1.0) for _ in range(50)]
    variable = next(v for v in later if not gone.isdisjoint((id(v), id(v.value))))
    not_built.build([variable])
    not_built.apply([tf.constant(80.0)], [variable])  # scaled by hand
    assert float(variable) == pytest.approx(1.0 - 0.01 * 10.0)


def test_what_a_tape_said_in_a_thread_ends_with_it():
    """The system gives the number of a thread that has ended to a later one."""
    variable = keras.Variable(1.0)
    sgd = keras.optimizers.SGD(0.01)
    optimizer = tfamp.LossScaleOptimizer(sgd, initial_scale=8.0, dynamic=False)
    optimizer.build([variable])

    def compute():
        with tf.GradientTape() as tape:
            loss = 2.0 * tf.convert_to_tensor(variable)
        tape.gradient(loss, [variable.value])

    def apply():
        optimizer.apply([tf.constant(80.0)], [variable])  # scaled by hand

    for work in (compute, apply):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert float(variable) == pytest.approx(1.0 - 0.01 * 10.0)
