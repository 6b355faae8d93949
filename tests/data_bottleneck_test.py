"""`tfamp.data.bottleneck`: verdicts on known truths, and a model left as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.clocks import Ticks
from tests.refusals import refusals
from tfamp.data import bottleneck
from tfamp.stepping import input_waits, snapshots

# Seconds of real steps and of the model; what they come to.
JUDGED = {
    "a small gain that may be a large one": (
        ([1.0] * 7, [0.95, 0.98, 0.60, 0.96, 0.55, 0.97, 0.58]),
        ("unclear", 0.05),
    ),
    "faster with the pipeline": (([9.0] * 5, [10.0] * 5), ("compute", 0)),
    "a slow input": (([10.0] * 5, [2.0] * 5), ("input", 0.8)),
    "load that comes and goes": (
        tuple([one * load for load in (1.0, 3.0, 3.0, 1.0)] for one in (10, 9.5)),
        ("compute", 0.05),
    ),
}


@pytest.mark.parametrize("times, expected", JUDGED.values(), ids=JUDGED)
def test_times_come_to_a_judgement(times, expected):
    verdict, (gain, low, high), _ = input_waits.judge(*times)
    assert (verdict, gain) == (expected[0], pytest.approx(expected[1]))
    assert 0 <= low <= gain <= high


def pairs(n=40, batch=4):
    x = np.random.default_rng(0).normal(size=(n, 3)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


def momentum():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def make_model(make_optimizer=momentum, *, policy="float32", **options):
    """Few weights, and every kind of state: statistics, a seed, slots, metrics."""
    layers = keras.layers
    with tfamp.scope(policy):
        parts = [layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1)]
        model = keras.Sequential(parts)
    model.compile(make_optimizer(), "mse", metrics=["mae"], **options)
    return model


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
    result = bottleneck(model, pairs(), seconds=0.3, clock=Ticks(0.01))
    assert bits(model) == before
    assert 0 <= result.possible_gain < 1


class Clock(Ticks):
    """A clock that goes on only when work is done, `seconds` for each piece."""

    def working(self, seconds):
        def work(x):
            self.now += seconds
            return x

        return lambda x: tf.ensure_shape(
            tf.numpy_function(work, [x], x.dtype), (None, 3)
        )


def test_steps_and_batches_are_timed_in_their_places():
    clock = Clock(0.0)
    layer = keras.layers.Lambda(clock.working(0.004), output_shape=(3,))
    model = keras.Sequential([layer, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    read = clock.working(0.020)
    data = pairs(80).map(lambda x, y: (read(x), y))  # nothing parallel, nothing ahead
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    result = bottleneck(model, data.with_options(options), seconds=0.2, clock=clock)
    assert result.verdict == "input"
    assert result.possible_gain == pytest.approx(20 / 24, abs=1e-6)
    assert result.compute_seconds == pytest.approx(0.004)
    assert result.times["input"][0] == pytest.approx(0.020)


test_errors = refusals(
    {
        "not compiled": (
            lambda: bottleneck(keras.Sequential(name="plain"), pairs()),
            "Model 'plain' is not compiled; expected one that `fit` takes.",
        ),
        "seconds": (
            lambda: bottleneck(make_model(), pairs(), seconds=0),
            "`seconds` is 0.0; expected a finite number above 0.",
        ),
    }
)


def test_an_iterator_is_not_drawn_from():
    iterator = iter(pairs(8))
    with pytest.raises(TypeError, match="would be used up: pass what it iterates"):
        bottleneck(make_model(), iterator)
    assert len(list(iterator)) == 2
