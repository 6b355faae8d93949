"""Callbacks in a `fit` that ends in one way or another, and the same model after it."""

import functools
import os
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.arrays import assert_close
from tfamp import callbacks

STEPS, BATCH = 3, 4
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class Stop(Exception):
    """What ends a `fit` in these tests."""


class Ends(keras.callbacks.Callback):
    """Raises at one of the places where Keras asks a callback: at batch 1, epoch 0."""

    def __init__(self, place, error=Stop):
        super().__init__()

        def end(*args, **kwargs):
            if "batch" not in place or args[0] == 1:
                raise error("as told")

        setattr(self, place, end)


class Pairs(keras.utils.PyDataset):
    """Batches, of which one cannot be read."""

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        if index == 2:
            raise Stop("no such image")
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return X[rows], Y[rows]


def ended(place, error=Stop, **settings):
    """The settings of a `fit` that a callback ends."""
    return lambda: {"callbacks": [Ends(place, error)], **settings}


ENDINGS = {
    "train begin": ended("on_train_begin"),
    "batch end": ended("on_train_batch_end"),
    "epoch end": ended("on_epoch_end"),
    "train end": ended("on_train_end"),
    "validation": ended("on_test_batch_end", validation_data=(X, Y), batch_size=BATCH),
    "validation data": lambda: {"validation_data": Pairs()},
    "Ctrl-C": ended("on_train_batch_end", KeyboardInterrupt),
    "data": lambda: {"x": Pairs(), "y": None},
}

CALLBACKS = {
    "NanRecovery": lambda folder: callbacks.NanRecovery(folder, every_seconds=0),
    "PrecisionMonitor": lambda folder: callbacks.PrecisionMonitor(
        folder / "logs", folder / "steps.csv"
    ),
    "Throughput": lambda folder: callbacks.Throughput(),
    "DeviceStats": lambda folder: callbacks.DeviceStats(),
}


def compiled(**settings):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(2)(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.5)(x)))
    momentum = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = tfamp.LossScaleOptimizer(momentum, 1.0, dynamic=False)
    model.compile(optimizer, "mse", **settings)
    return model


def fit(model, x=X, y=Y, **settings):
    settings = {"batch_size": BATCH, "verbose": 0, **settings}
    if y is None:
        del settings["batch_size"]
    return model.fit(x, y, shuffle=False, **settings)


def fit_to_its_end(model, ending, *others, is_first=True):
    settings = ending()
    ends = settings.pop("callbacks", [])
    order = [*others, *ends] if is_first else [*ends, *others]
    with pytest.raises((Stop, KeyboardInterrupt, tf.errors.OpError)) as caught:
        fit(model, callbacks=order, **settings)
    return caught


def open_files(folder):
    """The files of a folder that this process holds open."""
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    paths = [os.readlink(link) for link in links if os.path.islink(link)]
    return [path for path in paths if path.startswith(str(folder))]


def state(model):
    return [v.numpy() for v in [*model.variables, *model.optimizer.variables]]


def outcome(model):
    """What a plain `fit` on a bad batch makes of a model."""
    x = X.copy()
    x[BATCH] = np.nan
    model.reset_metrics()
    history = fit(model, x).history
    return [*state(model), *(np.asarray(values) for values in history.values())]


def left(model):
    """What stands on a model and its optimizer beside what is in every one."""
    return set(vars(model)), set(vars(model.optimizer))


@functools.cache
def without_callback(ending):
    """What a model is like after a `fit` that ended, and after another one."""
    model = compiled(run_eagerly=True)
    fit(model)
    fit_to_its_end(model, ENDINGS[ending])
    return state(model), left(model), outcome(model)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("make", CALLBACKS.values(), ids=CALLBACKS)
@pytest.mark.quick("NanRecovery-validation")
def test_nothing_of_a_callback_outlives_its_fit(make, ending, tmp_path):
    is_first = ending != "epoch end"
    model = compiled(run_eagerly=True)
    fit(model)
    function, threads = model.train_function, threading.enumerate()
    fit_to_its_end(model, ENDINGS[ending], make(tmp_path), is_first=is_first)
    assert model.train_function is function
    assert set(threading.enumerate()) <= set(threads)
    assert open_files(tmp_path) == []
    expected, names, later = without_callback(ending)
    assert left(model) == names
    assert_close(state(model), expected)
    assert_close(outcome(model), later)
    assert model.train_function is function


class Surrounds(keras.callbacks.Callback):
    """Puts a function of its own around the training function, and leaves it there."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def on_epoch_begin(self, epoch, logs=None):
        inner = self.model.train_function

        def outer(iterator):
            self.calls += 1
            logs = dict(inner(iterator))
            return {**logs, "loss": np.nan} if self.calls == 2 else logs

        if epoch == 0:
            self.model.train_function = outer


@pytest.mark.quick("last")
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_functions_of_other_callbacks_run_once_and_stay(is_first, tmp_path):
    recovery = callbacks.NanRecovery(tmp_path / "good", every_seconds=0)
    other, ours = Surrounds(), [callbacks.Throughput(), recovery]
    model = compiled(run_eagerly=True)
    order = [other, *ours] if is_first else [*ours, other]
    fit(model, callbacks=order, epochs=2)
    assert other.calls == 2 * STEPS
    assert model.train_function.__name__ == "outer"
    fit(model)
    assert other.calls == 3 * STEPS
