"""`tfamp.data.bottleneck`: verdicts on known truths, and a model left as it was."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.clocks import Ticks
from tests.refusals import refusals
from tfamp.stepping import input_waits, snapshots
from tfamp.stepping.input_waits import bottleneck, judge

# Seconds of real steps, of the model and of the input alone; what they come to.
JUDGED = {
    "a small gain that may be a large one": (
        ([1.0] * 7, [0.95, 0.98, 0.60, 0.96, 0.55, 0.97, 0.58], [0.1] * 7),
        ("unclear", 0.05),
    ),
    "faster with the pipeline": (([9.0] * 5, [10.0] * 5, [1.0] * 5), ("compute", 0)),
    "shared cores": (([20.0] * 7, [10.0] * 7, [10.0] * 7), ("contention", 0.5)),
    "a slow input": (([10.0] * 5, [2.0] * 5, [9.0] * 5), ("input", 0.8)),
    "load that comes and goes": (
        tuple([one * load for load in (1.0, 3.0, 3.0, 1.0)] for one in (10, 9.5, 1)),
        ("compute", 0.05),
    ),
}


@pytest.mark.parametrize("times, expected", JUDGED.values(), ids=JUDGED)
def test_times_come_to_a_judgement(times, expected):
    verdict, (gain, low, high), _ = judge(*times)
    assert (verdict, gain) == (expected[0], pytest.approx(expected[1]))
    assert 0 <= low <= gain <= high


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def pairs(n=40, batch=4):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def plainly(data, read):
    """`pairs` told to a function, batch by batch: nothing parallel, nothing ahead."""

    def told(x):
        read(x)
        return x

    data = data.map(lambda x, y: (tf.numpy_function(told, [x], x.dtype), y))
    data = data.map(lambda x, y: (tf.ensure_shape(x, (None, 3)), y))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return data.with_options(options)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_model(make_optimizer=momentum, *, policy="float32", **options):
    """Few weights, and every kind of state: statistics, a seed, slots, metrics."""
    with tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
    model.compile(make_optimizer(), "mse", metrics=["mae"], **options)
    return model


def measured(model, data):
    """What two rounds of turns give, the first of which is not counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_waits, "_ROUNDS", 2)
        return bottleneck(model, data, seconds=0.3, clock=Ticks(0.01))


def bits(model):
    arrays = snapshots.take(model).arrays
    return {name: array.tobytes() for name, array in arrays.items()}


WAYS = {
    "three steps a call": (momentum, {"steps_per_execution": 3}),
    "scale, xla": (lambda: tfamp.LossScaleOptimizer(momentum()), {"jit_compile": True}),
    "mixed_bfloat16": (momentum, {"policy": "mixed_bfloat16"}),
}


@pytest.mark.quick("mixed_bfloat16")
@pytest.mark.parametrize("make_optimizer, options", WAYS.values(), ids=WAYS)
def test_a_trained_model_is_left_as_it_was_bit_by_bit(make_optimizer, options):
    model = make_model(make_optimizer, **options)
    model.fit(pairs(), verbose=0)
    before = bits(model)
    result = measured(model, pairs())
    assert bits(model) == before
    assert 0 <= result.possible_gain < 1
    assert [len(times) for times in result.times.values()] == [1, 1, 1]


class Working(keras.layers.Layer):
    """Takes some time of a clock that only goes on when it is told to."""

    def __init__(self, clock, seconds):
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def call(self, x):
        def work(x):
            self.clock.now += self.seconds
            return x

        return tf.ensure_shape(tf.numpy_function(work, [x], x.dtype), x.shape)


WHOLE = {
    "slow map": (0.020, 0.004, "input", 20 / 24),
    "slow step": (0.0002, 0.010, "compute", 0.2 / 10.2),
}


@pytest.mark.quick("slow map")
@pytest.mark.parametrize("load, work, verdict, gain", WHOLE.values(), ids=WHOLE)
def test_steps_and_batches_are_timed_in_their_places(load, work, verdict, gain):
    clock = Clock()
    model = keras.Sequential([Working(clock, work), keras.layers.Dense(1)])
    model.compile("sgd", "mse")

    def read(x):
        clock.now += load

    result = bottleneck(model, plainly(pairs(80), read), seconds=0.2, clock=clock)
    assert result.verdict == verdict
    assert result.possible_gain == pytest.approx(gain, abs=1e-6)
    assert result.compute_seconds == pytest.approx(work)
    assert result.times["input"][0] == pytest.approx(load)


test_errors = refusals(
    {
        "no model": (
            lambda: bottleneck(pairs(), make_model()),
            "expected a compiled `keras.Model`. Pass the model first, then the",
            TypeError,
        ),
        "not compiled": (
            lambda: bottleneck(keras.Sequential(name="plain"), pairs()),
            "Model 'plain' is not compiled; expected one that `fit` takes.",
        ),
        "lengths": (
            lambda: bottleneck(make_model(), (np.zeros(3), np.zeros(2))),
            "`dataset` holds arrays of shapes ((3,), (2,)); expected the same number",
        ),
        "seconds": (
            lambda: bottleneck(make_model(), pairs(), seconds=0),
            "`seconds` is 0.0; expected a finite number above 0.",
        ),
    }
)


def test_an_iterator_is_not_drawn_from():
    iterator = iter(pairs(8))
    message = "would be used up: pass what it iterates"
    with pytest.raises(TypeError, match=re.escape(message)):
        bottleneck(make_model(), iterator)
    assert len(list(iterator)) == 2
