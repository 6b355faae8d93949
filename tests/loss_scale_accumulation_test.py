"""Accumulation on one device: n microbatches of b are one batch of n times b."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import COMPILED, in_each_way
from tests.replicas import two_replicas

rng = np.random.default_rng(0)
X = rng.normal(size=(48, 4)).astype("float32")
Y = (X @ [1.0, -2.0, 0.5, 0.0] + 0.25).astype("float32")[:, None]
NAN = float("nan")
# The mean over microbatches is rounded once more than the mean over the batch.
FLOAT32 = 1e-6

pytestmark = pytest.mark.filterwarnings(
    "ignore:'mixed_float16' will be slow", "ignore:Gradients do not exist"
)


def model_of(optimizer, *, jit_compile=False, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(4, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse", jit_compile=jit_compile, **options)
    return model


def unscaled(inner, steps, **options):
    return tfamp.LossScaleOptimizer(
        inner, initial_scale=1, dynamic=False, accumulation_steps=steps, **options
    )


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)


INNER = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam with a schedule": lambda: keras.optimizers.Adam(schedule()),
    "AdamW with averages": lambda: keras.optimizers.AdamW(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.05, weight_decay=0.01),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.5),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.2),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
MODES = {**COMPILED, "bulk": {"steps_per_execution": 3, "jit_compile": False}}


def weights_of(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


# Two optimizers are enough to tell the modes apart.
RUNS = [
    (inner, mode)
    for inner in INNER
    for mode in MODES
    if mode == "graph" or inner in ("Adam with a schedule", "global_clipnorm")
]


@pytest.mark.quick("Adam with a schedule-graph")
@pytest.mark.parametrize("inner, mode", RUNS, ids=map("-".join, RUNS))
def test_microbatches_equal_one_batch(inner, mode):
    inner, mode = INNER[inner], MODES[mode]
    options = {"verbose": 0, "shuffle": False, "epochs": 2}
    whole = model_of(inner())
    whole.fit(X, Y, batch_size=16, **options)
    parts = model_of(unscaled(inner(), 4), **mode)
    parts.fit(X, Y, batch_size=4, **options)
    assert int(parts.optimizer.iterations) == int(whole.optimizer.iterations) == 6
    np.testing.assert_allclose(
        weights_of(parts), weights_of(whole), rtol=0, atol=FLOAT32
    )


def by_hand(optimizer, microbatches, decorate=tf.function):
    """Applies gradients to a weight of 0 by SGD(1): it ends at minus their means."""
    weight = keras.Variable(0.0)
    optimizer.build([weight])
    step = decorate(lambda g: optimizer.apply([optimizer.scale_loss(g)], [weight]))
    trail = []
    for gradient in microbatches:
        step(tf.constant(gradient))
        trail.append(float(weight))
    return weight, trail


@pytest.mark.quick("eager")
@in_each_way
def test_a_bad_microbatch_never_happened(decorate):
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), 8.0, accumulation_steps=2
    )
    _, trail = by_hand(optimizer, [1.0, NAN, 3.0, NAN, NAN, 5.0, 7.0], decorate)
    # The scale changes in mid-window: what is added up is unscaled.
    assert trail == [0, 0, -2, -2, -2, -2, -8]
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (2, 3)
    assert int(optimizer.iterations) == 2
    assert optimizer.gradient_norm == 6


@pytest.mark.quick("eager")
@in_each_way
def test_flush_gives_a_partial_window_its_own_mean(decorate):
    optimizer = unscaled(keras.optimizers.SGD(1.0), 4)
    weight, trail = by_hand(optimizer, [1.0, 2.0, 3.0, 2.0, 4.0, 8.0], decorate)
    assert trail[-1] == -2
    decorate(optimizer.flush)()
    assert float(weight) == -8  # the mean of 4 and 8 is 6
    optimizer.flush()
    assert (float(weight), int(optimizer.iterations)) == (-8, 2)


@pytest.mark.quick("eager")
@in_each_way
def test_finite_parts_whose_sum_is_not(decorate):
    optimizer = unscaled(keras.optimizers.SGD(1.0), 2)
    weight, trail = by_hand(optimizer, [1.5e19, 1.5e19, 1.0, 3.0], decorate)
    # Each square is finite, that of the sum is not; the window is dropped.
    assert trail == [0, 0, 0, -2]
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 1)


def test_fit_applies_what_is_left_at_the_end_of_an_epoch():
    # Five microbatches: a window of four, and one of one.
    parts = model_of(unscaled(keras.optimizers.SGD(0.1), 4), run_eagerly=True)
    by_batches = model_of(keras.optimizers.SGD(0.1), run_eagerly=True)
    parts.fit(X[:20], Y[:20], batch_size=4, epochs=2, verbose=0, shuffle=False)
    for _ in range(2):
        by_batches.train_on_batch(X[:16], Y[:16])
        by_batches.train_on_batch(X[16:20], Y[16:20])
    assert int(parts.optimizer.iterations) == 4
    np.testing.assert_allclose(
        weights_of(parts), weights_of(by_batches), rtol=0, atol=FLOAT32
    )


def test_nothing_leaks_out_of_a_fit_that_was_broken_off():
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    model = model_of(unscaled(keras.optimizers.SGD(0.1), 4), run_eagerly=True)
    start = model.get_weights()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Break()], shuffle=False)
    whole = model_of(keras.optimizers.SGD(0.1), run_eagerly=True)
    whole.set_weights(start)
    model.fit(X[:16], Y[:16], batch_size=4, verbose=0, shuffle=False)
    whole.train_on_batch(X[:16], Y[:16])
    np.testing.assert_allclose(
        weights_of(model), weights_of(whole), rtol=0, atol=FLOAT32
    )


# --- loops that train one part of a model in one microbatch, another in the next ---


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
    optimizer = unscaled(keras.optimizers.SGD(1.0), 2)
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
    optimizer = unscaled(inner, 2)
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
    optimizer = unscaled(keras.optimizers.SGD(1.0, weight_decay=0.5), 4)
    first, second, _ = steps_of(optimizer, variables, decorate)
    first(tf.constant(2.0))
    second(tf.constant(6.0))
    decorate(optimizer.flush)()
    # Each is half of the window, and half of each weight decays.
    assert [float(v) for v in variables] == [-0.5, -2.5, 1.0]


@pytest.mark.quick("eager")
@pytest.mark.parametrize("jit", [None, tf.function], ids=["eager", "graph"])
def test_parts_that_alternate_on_two_replicas(jit):
    strategy = two_replicas()
    with strategy.scope():
        variables = [keras.Variable(0.0) for _ in range(3)]
        optimizer = unscaled(keras.optimizers.SGD(1.0, momentum=0.5), 2)
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
