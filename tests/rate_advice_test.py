"""The advice where the batch of a `fit` changed and the learning rate did not."""

import logging as python_logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.loss_scale.fit.learning_rate_advice import (
    Terms,
    advice,
    batch_size_of,
    update_size_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
X, Y = np.ones((256, 2), "float32"), np.ones((256, 1), "float32")
DATA = tf.data.Dataset.from_tensor_slices((X, Y))

# Before, now, what the advice must hold; None for no advice.
CHANGES = {
    "SGD": (Terms(64, 0.1, "SGD"), Terms(256, 0.1, "SGD"), "rule='linear'"),
    "Adam": (Terms(64, 0.1, "Adam"), Terms(128, 0.1, "Adam"), "rule='sqrt'"),
    "smaller": (Terms(64, 0.1, "Lion"), Terms(32, 0.1, "Lion"), "batch_size=32,"),
    "schedule": (
        Terms(64, "CosineDecay {}", "SGD"),
        Terms(256, "CosineDecay {}", "SGD"),
        "scale_learning_rate(schedule, batch_size=256, base_batch_size=64",
    ),
    "a little more": (Terms(64, 0.1, "SGD"), Terms(127, 0.1, "SGD"), None),
    "the rate too": (Terms(64, 0.1, "SGD"), Terms(128, 0.2, "SGD"), None),
    "another optimizer": (Terms(64, 0.1, "SGD"), Terms(128, 0.1, "Adam"), None),
}


@pytest.mark.parametrize("before, now, part", CHANGES.values(), ids=CHANGES)
def test_advice_is_given_where_only_the_batch_changed(before, now, part):
    text = advice(before, now)
    assert text is None if part is None else part in text


SIZES = {
    "arrays": ({"x": X}, 32),
    "arrays and a size": ({"x": X, "batch_size": 100}, 100),
    "less than a batch": ({"x": X[:5], "batch_size": 100}, 5),
    "several inputs": ({"x": {"a": X, "b": X}, "batch_size": 8}, 8),
    "dataset": ({"x": DATA.batch(16)}, 16),
    "whole batches": ({"x": DATA.batch(16, drop_remainder=True)}, 16),
    "stages after it": (
        {"x": DATA.batch(16).map(lambda x, y: (x, y)).repeat(2).prefetch(1)},
        16,
    ),
    "parallel": ({"x": DATA.batch(16, num_parallel_calls=2)}, 16),
    "batched anew": ({"x": DATA.batch(16).unbatch().batch(4)}, 4),
    "taken apart": ({"x": DATA.batch(16).unbatch()}, 2),
    "of unknown stages": (
        {"x": DATA.batch(16).interleave(lambda x, y: DATA.batch(x.shape[1]))},
        None,
    ),
    "generator": ({"x": iter([(X, Y)])}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("arguments, size", SIZES.values(), ids=SIZES)
def test_the_batch_is_read_from_the_arguments(arguments, size):
    assert batch_size_of(arguments) == size


def test_a_keras_dataset_is_not_read():
    class Reads(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            raise AssertionError("reading may be slow")

    assert batch_size_of({"x": Reads()}) is None


@pytest.mark.parametrize(
    "optimizer, size",
    [
        (keras.optimizers.SGD(), 8),
        (keras.optimizers.SGD(gradient_accumulation_steps=4), 32),
        (tfamp.LossScaleOptimizer(keras.optimizers.SGD(), accumulation_steps=2), 16),
    ],
    ids=["plain", "accumulation", "accumulation of tfamp"],
)
def test_an_update_takes_all_its_micro_batches(optimizer, size):
    assert update_size_of({"x": X, "batch_size": 8}, optimizer) == size


def compiled(optimizer, policy="float32"):
    layers = keras.layers
    with tfamp.scope(policy):
        # The last one is kept in float32; the first needs a loss scale in float16.
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2), layers.Dense(1)])
        model.compile(optimizer, "mse", run_eagerly=True)
    return model


def lines(caplog, model, *args, **kwargs):
    """What is logged of the rate in a `fit`."""
    caplog.clear()
    with caplog.at_level(python_logging.WARNING, "absl"):
        model.fit(*args, **{"verbose": 0, "steps_per_epoch": 1, **kwargs})
    return [each for each in caplog.messages if "examples an update" in each]


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_fit_advises_once_a_change(caplog, policy):
    model = compiled(keras.optimizers.SGD(0.5), policy)
    assert lines(caplog, model, X, Y, batch_size=8) == []
    assert lines(caplog, model, X, Y, batch_size=8) == []
    (line,) = lines(caplog, model, X, Y, batch_size=64)
    assert line == (
        f"`fit` of {model.name!r} takes 64 examples an update, 8 in its last `fit`, at "
        'the same learning rate 0.5. The usual rule for SGD is "linear": compile with '
        "`tfamp.training.scale_learning_rate(0.5, batch_size=64, base_batch_size=8, "
        "rule='linear')`."
    )
    assert lines(caplog, model, X, Y, batch_size=64) == []


def test_a_rate_that_was_changed_needs_no_advice(caplog):
    model = compiled(keras.optimizers.SGD(0.5))
    lines(caplog, model, X, Y, batch_size=8)
    model.optimizer.learning_rate = 1.0
    assert lines(caplog, model, X, Y, batch_size=64) == []


def test_a_rate_that_a_callback_lowered_counts_as_it_ended(caplog):
    class Lowers(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.25

    model = compiled(keras.optimizers.SGD(0.5))
    lines(caplog, model, X, Y, batch_size=8, callbacks=[Lowers()])
    (line,) = lines(caplog, model, X, Y, batch_size=64)
    assert "at the same learning rate 0.25." in line


def test_schedules_are_the_same_where_their_configurations_are(caplog):
    def cosine(steps):
        return keras.optimizers.schedules.CosineDecay(0.5, steps)

    model = compiled(keras.optimizers.Adam(cosine(10)))
    lines(caplog, model, X, Y, batch_size=8)
    model.compile(keras.optimizers.Adam(cosine(10)), "mse")
    (line,) = lines(caplog, model, X, Y, batch_size=64)
    assert "at the same schedule. The usual rule for Adam" in line
    model.compile(keras.optimizers.Adam(cosine(20)), "mse")
    assert lines(caplog, model, X, Y, batch_size=8) == []


def test_a_schedule_that_cannot_be_saved_is_known_by_itself(caplog):
    class Own(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5

    schedule = Own()
    model = compiled(keras.optimizers.SGD(schedule))
    lines(caplog, model, X, Y, batch_size=8)
    assert len(lines(caplog, model, X, Y, batch_size=64)) == 1
    model.compile(keras.optimizers.SGD(Own()), "mse")
    assert lines(caplog, model, X, Y, batch_size=8) == []


def test_plain_models_are_let_be(caplog):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    managed = compiled("sgd")
    assert lines(caplog, model, X, Y, batch_size=8) == []
    assert lines(caplog, model, X, Y, batch_size=64) == []
    assert managed.built
