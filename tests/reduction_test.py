"""Replicas send gradients in half precision, and stay equal."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tests.replicas import check_replicas_agree, on_both, two_replicas
from tfamp.loss_scale import step as steps

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = X.sum(-1, keepdims=True)
# Three updates of weights near 1; the sum of two parts is rounded once in each.
SUM_TOLERANCE = {"float16": 6 * 2.0**-11, "bfloat16": 6 * 2.0**-8}

pytestmark = pytest.mark.filterwarnings("ignore:'.*float16' ")


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """The dtypes of the gradients that a replica sent last."""
    found, original = [], steps.summed

    def summed(context, values):
        found[:] = [v.dtype.name for v in values[:-2]]
        return original(context, values)

    monkeypatch.setattr(steps, "summed", summed)
    return found


def trained(strategy, policy="mixed_float16", **options):
    keras.utils.set_random_seed(0)
    with tfamp.scope(policy, loss_scale_options=options), strategy.scope():
        hidden = keras.layers.Dense(8, activation="tanh")
        model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.125), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


CASES = [
    ("mixed_float16", {"reduce_dtype": "float16", "initial_scale": 1024.0}),
    ("mixed_float16", {"reduce_dtype": "bfloat16", "accumulation_steps": 2}),
    ("mixed_bfloat16", {"reduce_dtype": "bfloat16"}),
    ("float32", {"reduce_dtype": "float16"}),
]


@pytest.mark.quick("case0", "case2")
@pytest.mark.parametrize("case", CASES, ids=["case0", "case1", "case2", "case3"])
def test_gradients_are_sent_as_asked_and_train_as_in_float32(strategy, sent, case):
    policy, options = case
    model = trained(strategy, policy, **options)
    dtype = options.pop("reduce_dtype")
    assert set(sent) == {dtype}
    assert model.optimizer.dynamic == ("float16" in (policy[6:], dtype))
    variables = [*model.trainable_variables, *model.optimizer.variables]
    check_replicas_agree(strategy, variables)
    if policy == "mixed_float16":
        exact = trained(strategy, policy, **options)
        assert set(sent) == {"float32"}
        assert_close(model, exact, rtol=0, atol=SUM_TOLERANCE[dtype])


class Steps:
    """Two replicas with a weight, of which each is given its gradient."""

    def __init__(self, strategy, start, **options):
        self.strategy = strategy
        with strategy.scope():
            self.weight = keras.Variable(start)
            sgd = keras.optimizers.SGD(1.0)
            self.optimizer = tfamp.LossScaleOptimizer(sgd, **options)

    def take(self, *parts):
        """Takes a step; a part is a gradient, or (rows, indices) of a sparse one."""

        def part_of(context):
            return parts[context.replica_id_in_sync_group]

        def on_replica(part):
            value = self.weight.value
            with tf.GradientTape() as tape:
                if isinstance(part, tuple):
                    rows, indices = part
                    value = tf.gather(value, indices)
                else:
                    rows = part
                loss = tf.reduce_sum(value * rows)
            gradient = tape.gradient(loss, self.weight.value)
            self.optimizer.apply([gradient], [self.weight])

        given = self.strategy.experimental_distribute_values_from_function(part_of)
        self.strategy.run(on_replica, args=(given,))
        return on_both(self.strategy, self.weight)


def test_a_sum_that_overflows_in_float16_is_a_skipped_step(strategy):
    steps = Steps(strategy, [0.0], initial_scale=1024.0, reduce_dtype="float16")
    # At the scale 40960 on each: the sum is beyond 65504.
    part = np.array([40.0], "float32")
    assert steps.take(part, part) == [0.0]
    assert (steps.optimizer.skipped_steps, steps.optimizer.scale) == (1, 512.0)
    assert steps.take(part, part) == [-80.0]
    assert steps.optimizer.applied_steps == 1


def test_float16_is_sent_at_the_loss_scale(strategy):
    # 2**-26 is below the smallest number of float16, and so is a sum of two.
    part = np.array([2.0**-26], "float32")
    steps = Steps(strategy, [0.0], initial_scale=2.0**15, reduce_dtype="float16")
    assert steps.take(part, part) == [-(2.0**-25)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sparse_gradients_of_replicas_add_up(strategy, sent, dtype):
    steps = Steps(
        strategy, np.zeros((4, 1), "float32"), initial_scale=8.0, reduce_dtype=dtype
    )
    rows = np.array([[1.0], [2.0], [0.5]], "float32")
    weight = steps.take((rows, np.array([0, 0, 3])), (rows, np.array([3, 1, 0])))
    assert sent == [dtype]
    assert weight.ravel().tolist() == [-3.5, -2.0, 0.0, -1.5]


def test_settings_out_of_range_are_told():
    options = {"reduce_dtype": "fp16"}
    for make in (
        lambda: tfamp.LossScaleOptimizer("sgd", **options),
        lambda: tfamp.enable("mixed_float16", loss_scale_options=options),
    ):
        with pytest.raises(ValueError, match="Unknown `reduce_dtype` 'fp16'; expected"):
            make()
    message = re.escape("`loss_scale` 'dynamic' has no effect under policy")
    options = {"reduce_dtype": "bfloat16", "initial_scale": 8.0}
    with pytest.raises(ValueError, match=message):
        tfamp.enable("mixed_bfloat16", loss_scale_options=options)
