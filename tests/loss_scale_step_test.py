"""One step on one device: applied exactly, or skipped without a changed bit."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close

optimizers = keras.optimizers
INF, NAN = float("inf"), float("nan")


def traced(mode):
    """Returns the decorator of a way to run a step."""
    if mode == "eager":
        return lambda step: step
    return tf.function(jit_compile=mode == "xla", autograph=False)


def steps_of(optimizer, variables, mode="graph"):
    """Builds an optimizer; returns a step that applies gradients, run in some way."""
    optimizer.build(variables)
    return traced(mode)(lambda *gradients: optimizer.apply(gradients, variables))


def make(inner, *args, **kwargs):
    """Returns an optimizer whose loss counts as scaled: gradients are made by hand."""
    optimizer = tfamp.LossScaleOptimizer(inner, *args, **kwargs)
    optimizer.has_scaled_loss = True
    return optimizer


def bits(variables):
    """Returns the very bytes of variables, which tell -0.0 from 0.0."""
    return [np.asarray(v.value).tobytes() for v in variables]


MODES = ["eager", "graph", "xla"]
COMMON = {"weight_decay": 0.01, "use_ema": True, "ema_overwrite_frequency": 2}
INNER = {
    "SGD": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True, **COMMON),
    "Adam": lambda: optimizers.Adam(0.1, amsgrad=True, **COMMON),
    "AdamW": lambda: optimizers.AdamW(0.1, use_ema=True, ema_overwrite_frequency=2),
    "RMSprop": lambda: optimizers.RMSprop(0.1, momentum=0.9, centered=True, **COMMON),
    "Adagrad": lambda: optimizers.Adagrad(0.1, **COMMON),
    "Adadelta": lambda: optimizers.Adadelta(0.1, **COMMON),
    "Adamax": lambda: optimizers.Adamax(0.1, **COMMON),
    "Nadam": lambda: optimizers.Nadam(0.1, **COMMON),
    "Ftrl": lambda: optimizers.Ftrl(0.1, **COMMON),
    "Lion": lambda: optimizers.Lion(0.1, **COMMON),
    "Adafactor": lambda: optimizers.Adafactor(0.1, **COMMON),
    "Lamb": lambda: optimizers.Lamb(0.1, **COMMON),
}


def constrained_variables():
    """Two variables with a -0.0, one of them under a constraint."""
    first = keras.Variable([[1.0, -0.0], [0.5, -3.0]])
    second = keras.Variable([0.25, -0.0, 2.0])
    second.constraint = keras.constraints.NonNeg()
    return [first, second]


GRADIENTS = [tf.constant([[8.0, -4.0], [2.0, 1.0]]), tf.constant([4.0, 8.0, -2.0])]


@pytest.mark.quick("Adam-*")
@pytest.mark.parametrize("mode", ["graph", "xla"])
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_a_skipped_step_changes_no_bit(inner, mode):
    optimizer, variables = make(inner(), 8.0), constrained_variables()
    step = steps_of(optimizer, variables, mode)
    for _ in range(3):
        step(*GRADIENTS)
    state = [*variables, *optimizer.inner_optimizer.variables]
    for variable in state:  # adding 0.0 to -0.0 would make it 0.0
        if "float" in variable.dtype and variable.shape.rank:
            value = variable.numpy()
            value.flat[0] = -0.0
            variable.assign(value)
    before = bits(state)
    for bad in (INF, -INF, NAN):
        step(GRADIENTS[0], tf.constant([bad, 0.0, 0.0]))
        step(tf.constant([[0.0, 0.0], [0.0, bad]]), GRADIENTS[1])
    assert bits(state) == before
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 6)
    step(*GRADIENTS)
    assert int(optimizer.iterations) == 4
    assert bits(state) != before


@pytest.mark.quick("Adam-graph")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_an_applied_step_is_the_inner_optimizers(inner, mode):
    optimizer, variables = make(inner(), 8.0), constrained_variables()
    plain, expected = inner(), constrained_variables()

    step = steps_of(optimizer, variables, mode)
    plain_step = steps_of(plain, expected, mode)
    for _ in range(4):
        step(*GRADIENTS)
        plain_step(*[g / 8 for g in GRADIENTS])
    for ours, theirs in zip(variables, expected, strict=True):
        # Dividing by 8 is exact; XLA may contract a product and a sum.
        np.testing.assert_allclose(ours, theirs, rtol=4 * 2**-23, atol=1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_what_it_counts(mode):
    weight = keras.Variable([3.0, 4.0])
    optimizer = make(optimizers.SGD(1.0), 8.0)
    step = steps_of(optimizer, [weight], mode)
    step(tf.constant([24.0, 32.0]))
    np.testing.assert_array_equal(weight, [0.0, 0.0])
    assert optimizer.gradient_norm == 5.0
    assert not optimizer.last_step_skipped
    step(tf.constant([INF, 1.0]))
    step(tf.constant([NAN, 1.0]))
    assert optimizer.last_step_skipped
    assert (optimizer.scale, optimizer.consecutive_skips) == (2.0, 2)
    assert optimizer.nonfinite_variables == (weight.path,)
    step(tf.constant([2.0, 0.0]))
    assert optimizer.consecutive_skips == 0
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (2, 2)


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), (3, 1))


@pytest.mark.parametrize("mode", MODES)
def test_slices_are_judged_by_the_sums_of_their_rows(mode):
    weight = keras.Variable([[1.0], [2.0], [3.0]])
    optimizer = make(optimizers.SGD(1.0), 2.0)
    optimizer.build([weight])
    step = lambda rows: traced(mode)(lambda: optimizer.apply([rows], [weight]))()  # noqa: E731
    step(slices([[2.0], [4.0], [8.0]], [1, 1, 2]))
    np.testing.assert_array_equal(weight, [[1.0], [-1.0], [-1.0]])
    assert optimizer.gradient_norm == 5.0  # of (3, 4)
    step(slices([[3e38], [3e38], [1.0]], [1, 1, 2]))  # each of them is finite
    np.testing.assert_array_equal(weight, [[1.0], [-1.0], [-1.0]])


@pytest.mark.quick(
    "clipnorm-eager", "global_clipnorm-eager", "clipvalue-eager", "below-graph"
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "clipping, expected",
    {
        "clipnorm": ({"clipnorm": 5.0}, [[-3.0, -4.0], [-4.0, 0.0]]),
        "global_clipnorm": (
            {"global_clipnorm": 5.0},
            # The norm is sqrt(36 + 64 + 16) of gradients (6, 8) and (4, 0).
            [np.array([-6, -8]) * 5 / 116**0.5, np.array([-4, 0]) * 5 / 116**0.5],
        ),
        "clipvalue": ({"clipvalue": 5.0}, [[-5.0, -5.0], [-4.0, 0.0]]),
        "a norm below the limit": (
            {"global_clipnorm": 50.0},
            [[-6.0, -8.0], [-4.0, 0.0]],
        ),
    }.values(),
    ids=["clipnorm", "global_clipnorm", "clipvalue", "below"],
)
def test_clipping_acts_on_unscaled_gradients(clipping, expected, mode):
    variables = [keras.Variable([0.0, 0.0]), keras.Variable([0.0, 0.0])]
    optimizer = make(optimizers.SGD(1.0, **clipping), 1024.0)
    step = steps_of(optimizer, variables, mode)
    step(tf.constant([6.0, 8.0]) * 1024, tf.constant([4.0, 0.0]) * 1024)
    assert_close(variables, expected, rtol=4 * 2**-23)


def test_a_variable_that_takes_its_gradient_as_its_value_takes_it_as_it_is():
    scaled, overwritten = keras.Variable([1.0]), keras.Variable([1.0])
    overwritten.overwrite_with_gradient = True
    step = steps_of(make(optimizers.SGD(1.0), 8.0), [scaled, overwritten], "eager")
    step(tf.constant([8.0]), tf.constant([5.0]))
    assert (float(scaled[0]), float(overwritten[0])) == (0.0, 5.0)


@pytest.mark.parametrize("mode", MODES)
def test_freezing_reaches_functions_that_are_traced_already(mode):
    weight = keras.Variable(4.0)
    optimizer = make(optimizers.SGD(1.0), 8.0, dynamic_growth_steps=1)
    step = steps_of(optimizer, [weight], mode)
    step(tf.constant(0.0))
    assert optimizer.scale == 16
    optimizer.freeze()
    step(tf.constant(0.0))
    step(tf.constant(INF))
    assert (optimizer.scale, optimizer.is_frozen) == (16, True)
    optimizer.freeze(4.0)
    step(tf.constant(4.0))
    assert (optimizer.scale, float(weight)) == (4, 3)
    optimizer.unfreeze()
    step(tf.constant(0.0))
    assert (optimizer.scale, optimizer.is_frozen) == (8, False)


MESSAGE = (
    "Skipped 3 updates in a row, because their gradients were not finite, up to step "
    "4: loss scale 8"
)


def test_too_many_skips_end_an_eager_loop():
    weight = keras.Variable(4.0)
    optimizer = make(optimizers.SGD(1.0), 8.0, max_consecutive_skips=3)
    optimizer.apply([tf.constant(8.0)], [weight])
    optimizer.apply([tf.constant(NAN)], [weight])
    optimizer.apply([tf.constant(NAN)], [weight])
    with pytest.raises(tfamp.LossScaleError, match=re.escape(MESSAGE)) as caught:
        optimizer.apply([tf.constant(NAN)], [weight])
    assert "gradient norm nan, last finite norm 1.0" in str(caught.value)
    assert "Lower the learning rate" in str(caught.value)
    assert (optimizer.scale, float(weight)) == (8, 3)
    optimizer.apply([tf.constant(NAN)], [weight])  # the count begins again
    assert optimizer.consecutive_skips == 1


def test_too_many_skips_end_a_function_of_the_users():
    weight = keras.Variable(4.0)
    optimizer = make(optimizers.SGD(1.0), 8.0, max_consecutive_skips=3)
    step = steps_of(optimizer, [weight])
    step(tf.constant(8.0))
    step(tf.constant(NAN))
    step(tf.constant(NAN))
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(MESSAGE)):
        step(tf.constant(NAN))
    assert (optimizer.scale, float(weight)) == (8, 3)
    step(tf.constant(NAN))
    assert optimizer.consecutive_skips == 1


def test_under_xla_a_user_reads_the_stops():
    weight = keras.Variable(4.0)
    optimizer = make(optimizers.SGD(1.0), 8.0, max_consecutive_skips=3)
    step = steps_of(optimizer, [weight], "xla")
    for _ in range(3):
        step(tf.constant(NAN))
    assert optimizer.num_stops == 1
    with pytest.raises(tfamp.LossScaleError, match=re.escape("Skipped 3 updates")):
        optimizer.raise_if_due()


def test_a_float16_loss_is_scaled_in_float32_before_anything_is_built():
    loss = tf.constant(100.0, tf.float16)
    scaled = tfamp.LossScaleOptimizer(optimizers.SGD()).scale_loss(loss)
    assert (scaled.dtype, float(scaled)) == (tf.float32, 100 * 2.0**15)


def test_gradients_that_do_not_fit():
    weight = keras.Variable(4.0)
    optimizer = make(optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="the optimizer is not built"):
        optimizer.apply([tf.constant(1.0)])
    with pytest.raises(ValueError, match="`grads` has 2 entries for 1 variables"):
        optimizer.apply([tf.constant(1.0)] * 2, [weight])
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        optimizer.apply([None], [weight])
    optimizer.build([weight])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0)])
    assert optimizer.apply([], []) is None
