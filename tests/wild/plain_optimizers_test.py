"""Loops with optimizers of Keras that nobody wrapped: the one line is enough there."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.loops import DECORATORS, in_each_way
from tests.replicas import two_replicas
from tests.wild.tiny_losses import (
    TINY,
    TOLERANCE,
    error_of,
    gradients_of,
    network,
    nothing_of_other_tests,  # noqa: F401 - a fixture of every test
    replica_trainer,
    sgd,
    trainer,
    x,
    y,
)
from tfamp.loss_scale import loops, tape

layers = keras.layers
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")


def losses(policy, make=sgd, decorate=DECORATORS["eager"]):
    step = trainer(network(policy), make(), decorate)
    return [step() for _ in range(5)]


def companion_of(optimizer):
    found = tape.judge_of(optimizer)
    return found if isinstance(found, loops.Companion) else None


def everything(model, optimizer):
    return [v.numpy() for v in (*model.variables, *optimizer.variables)]


@pytest.mark.quick("eager")
@in_each_way
def test_tiny_losses_train_as_in_float32(decorate):
    exact = losses("float32", decorate=decorate)
    half = losses("mixed_float16", decorate=decorate)
    assert half == pytest.approx(exact, rel=TOLERANCE)
    assert exact[-1] < exact[0] / 5


@pytest.mark.quick("schedule")
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.01),
        # Its epsilon is below the squares of the true gradients.
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, epsilon=1e-12),
        lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-16),
        lambda: sgd(momentum=0.9, clipnorm=1e-7),
        lambda: sgd(global_clipnorm=1e-7),
        lambda: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        lambda: keras.optimizers.SGD(
            keras.optimizers.schedules.ExponentialDecay(0.1 / TINY, 2, 0.5)
        ),
    ],
    ids=["adam", "adamw", "rmsprop", "clipnorm", "global", "ema", "schedule"],
)
def test_what_an_optimizer_does_stays_as_it_is(make):
    exact = losses("float32", make, tf.function)
    half = losses("mixed_float16", make, tf.function)
    assert half == pytest.approx(exact, rel=TOLERANCE)


@pytest.mark.quick("eager")
@in_each_way
def test_an_overflow_skips_its_step_and_leaves_all_as_it_was(decorate):
    model, optimizer = network(), keras.optimizers.Adam(0.01)
    step = trainer(model, optimizer, decorate)
    step(1.0)
    before = everything(model, optimizer)
    scale = companion_of(optimizer).scale
    step(1e30)
    assert_close(before, everything(model, optimizer))
    assert int(optimizer.iterations) == 1
    assert companion_of(optimizer).scale == scale / 2
    step(1.0)
    assert int(optimizer.iterations) == 2
    assert companion_of(optimizer).skipped_steps == 1


def test_a_static_scale_and_no_scale_are_obeyed():
    model, optimizer = network(loss_scale=128), sgd()
    trainer(model, optimizer)()
    assert companion_of(optimizer).scale == 128.0
    assert not companion_of(optimizer).dynamic
    model, optimizer = network(loss_scale=None), sgd()
    before = model.get_weights()[0]
    trainer(model, optimizer)()
    assert companion_of(optimizer) is None
    np.testing.assert_array_equal(before, model.get_weights()[0])  # gradients are 0


def test_gradients_added_up_by_hand():
    def train(policy):
        model, optimizer = network(policy), sgd()
        for _ in range(3):
            total = [tf.zeros(v.shape) for v in model.trainable_variables]
            for part in (slice(0, 32), slice(32, 64)):
                _, gradients = gradients_of(model, x[part], y[part])
                total = [a + g / 2 for a, g in zip(total, gradients, strict=True)]
            optimizer.apply(total, model.trainable_variables)
        assert int(optimizer.iterations) == 3
        return error_of(model)

    assert train("mixed_float16") == pytest.approx(train("float32"), rel=TOLERANCE)


@pytest.mark.quick("eager")
@in_each_way
def test_two_models_with_an_optimizer_each(decorate):
    def train(policy):
        first, second = network(policy), network(policy, seed=3)
        with tfamp.scope(policy):
            front = layers.Dense(4, "tanh")
        one, other = sgd(), keras.optimizers.SGD(0.05 / TINY)
        front.build((None, 4))
        weights = [front.trainable_variables, second.trainable_variables]

        @decorate
        def step():
            with tf.GradientTape(persistent=True) as tape:
                # The model that is called last is not the only one that is asked for.
                loss = TINY * tf.reduce_mean(tf.square(y - second(front(x))))
                apart = TINY * tf.reduce_mean(tf.square(y - first(x)))
            one.apply(tape.gradient(loss, weights[0]), weights[0])
            other.apply(tape.gradient(loss, weights[1]), weights[1])
            return loss / TINY, apart

        values = [float(step()[0]) for _ in range(5)]
        return values, one, other

    exact, *_ = train("float32")
    half, one, other = train("mixed_float16")
    assert half == pytest.approx(exact, rel=TOLERANCE)
    assert companion_of(one).applied_steps == 5
    assert companion_of(other).applied_steps == 5


def test_one_made_ahead_of_the_line_is_known_from_its_first_step_on():
    optimizer = sgd()
    model = network()
    tape._KNOWN.clear()
    start = model.get_weights()[0]
    step = trainer(model, optimizer)
    step()
    np.testing.assert_array_equal(start, model.get_weights()[0])
    step()
    assert companion_of(optimizer).applied_steps == 2
    assert not np.array_equal(start, model.get_weights()[0])


@pytest.mark.quick("eager")
@in_each_way
def test_an_optimizer_that_goes_into_compile(decorate):
    model = network(loss_scale_options={"initial_scale": 64.0})
    optimizer = keras.optimizers.SGD(0.01)
    step = trainer(model, optimizer, decorate)
    step(1.0)
    model.compile(optimizer, "mse")
    assert model.optimizer.inner_optimizer is optimizer
    assert companion_of(optimizer) is None
    model.fit(x, y, batch_size=32, verbose=0)
    assert model.optimizer.applied_steps == 2
    assert int(optimizer.iterations) == 3
    step(1.0)  # as it was traced, or with the scale of the model's optimizer
    assert int(optimizer.iterations) == 4


def test_a_model_compiled_without_a_scale_has_none():
    model = network()
    optimizer = keras.optimizers.SGD(0.01)
    model.compile(optimizer, "mse", auto_scale_loss=False, run_eagerly=True)
    waiting = sgd()
    model.fit(x, y, batch_size=32, verbose=0)
    assert model.optimizer is optimizer
    assert companion_of(optimizer) is companion_of(waiting) is None


def test_the_optimizer_is_the_one_it_was(tmp_path):
    made = {}
    for policy in ("float32", "mixed_float16"):
        keras.backend.clear_session()
        model, optimizer = network(policy), keras.optimizers.Adam(0.01)
        trainer(model, optimizer)(1.0)
        made[policy] = optimizer
    exact, half = made["float32"], made["mixed_float16"]
    assert type(half) is keras.optimizers.Adam
    assert half.get_config() == exact.get_config()
    assert [v.path for v in half.variables] == [v.path for v in exact.variables]
    stores = {}, {}
    for optimizer, store in zip((exact, half), stores, strict=True):
        optimizer.save_own_variables(store)
    assert stores[0].keys() == stores[1].keys()
    names, others = (
        {name for name, _ in tf.train.list_variables(checkpoint.save(tmp_path / "c"))}
        for checkpoint in (tf.train.Checkpoint(optimizer=o) for o in (half, exact))
    )
    assert names == others


@pytest.mark.slow
@pytest.mark.parametrize("decorate", [DECORATORS["eager"], DECORATORS["graph"]])
def test_on_replicas(decorate):
    exact = network("float32")
    alone = trainer(exact, sgd())
    strategy = two_replicas()
    with strategy.scope():
        model, optimizer = network(), sgd()
    step = replica_trainer(strategy, model, optimizer, decorate)
    for number in range(6):
        before = everything(model, optimizer)
        if number == 2:
            step(1e30)
            assert_close(before, everything(model, optimizer))
        else:
            alone()
            step()
    assert error_of(model) == pytest.approx(error_of(exact), rel=TOLERANCE)
    judge = companion_of(optimizer)
    assert (judge.applied_steps, judge.skipped_steps) == (5, 1)
    assert optimizer.iterations.numpy() == 5


class Whole(keras.optimizers.Optimizer):
    """An optimizer that makes the whole step itself."""

    def apply(self, grads, trainable_variables=None):
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.assign(variable - 0.01 * tf.cast(gradient, variable.dtype))


def test_an_optimizer_whose_step_nobody_can_judge_trains_as_in_stock():
    def train(policy):
        model = network(policy)
        optimizer = Whole(learning_rate=0.01)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = 1000 * tf.reduce_mean((model(x) - 1) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
        return float(loss)

    with pytest.warns(UserWarning, match="no loss scale"):
        found = train("mixed_float16")
    assert found == pytest.approx(train("float32"), rel=0.02)


def test_a_model_of_heads_alone_needs_none():
    with tfamp.scope("mixed_float16"):
        model = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(1)])
    optimizer = sgd()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - 1) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    assert companion_of(optimizer) is None
