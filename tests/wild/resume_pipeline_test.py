"""`Resume` beside every stage of a `Pipeline` that draws at random or counts epochs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import tfamp
from tests.halting import Halt
from tests.replicas import two_replicas

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(72, 8)).astype("float32")
Y = X[:, :1].copy()
EPOCHS, STOP_AT = 5, 31


def rows():
    return tfamp.data.Pipeline.from_arrays(X, Y)


def stream():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    return tfamp.data.Pipeline.from_dataset(dataset)


def noisy(x, strength, seed):
    return x + strength * tf.random.stateless_normal(tf.shape(x), seed)


def is_above_one(x, y):
    return y[0] > 1


PIPELINES = {
    "noise": lambda: rows().augment(noisy, ramp_epochs=8, seed=4),
    "balance on a stream": lambda: (
        stream().balance(is_above_one, seed=2).shuffle(seed=3)
    ),
    "weights": lambda: rows().weights(np.arange(1.0, 73.0), seed=5),
    "filter, shuffle": lambda: stream().filter(lambda x, y: y[0] < 2).shuffle(seed=7),
    "everything": lambda: (
        rows()
        .subset(0.9, seed=1)
        .balance(is_above_one, seed=2)
        .cache("memory")
        .shuffle(seed=3)
        .augment(noisy, ramp_epochs=8, seed=4)
    ),
}


def everything():
    return PIPELINES["everything"]().batch(8).build()


def trained(make, folder=None, *others, **options):
    keras.utils.set_random_seed(0)
    data = make()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    callbacks = list(others)
    if folder is not None:
        callbacks.append(tfamp.callbacks.Resume(folder, every_steps=4))
    fit = {"epochs": EPOCHS, "verbose": 0, **options}
    history = model.fit(data, callbacks=callbacks, **fit).history["loss"]
    return history, [w.tolist() for w in model.get_weights()]


def halted_and_resumed(make, folder, stop_at, **options):
    with pytest.raises(KeyboardInterrupt):
        trained(make, folder, Halt(stop_at), **options)
    return trained(make, folder, **options)


@pytest.mark.quick("noise")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_training_that_goes_on_is_as_one_that_was_never_stopped(name, tmp_path):
    def make():
        return PIPELINES[name]().batch(8).build()

    assert halted_and_resumed(make, tmp_path, STOP_AT) == trained(make)


@pytest.mark.quick("9")
@pytest.mark.parametrize("stop_at", [2, 9, 10, 44])
def test_it_is_so_wherever_it_was_stopped(stop_at, tmp_path):
    resumed = halted_and_resumed(everything, tmp_path, stop_at)
    assert resumed == trained(everything)


def test_it_is_so_on_two_replicas_and_several_steps_a_call(tmp_path):
    def fit(*callbacks):
        keras.utils.set_random_seed(0)
        with two_replicas().scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", steps_per_execution=3)
        data = PIPELINES["everything"]().batch(8).build()
        run = model.fit(data, epochs=4, verbose=0, callbacks=list(callbacks))
        return run.history["loss"], [w.tolist() for w in model.get_weights()]

    whole = fit()
    with pytest.raises(KeyboardInterrupt):
        fit(tfamp.callbacks.Resume(tmp_path, every_steps=3), Halt(8))
    assert fit(tfamp.callbacks.Resume(tmp_path, every_steps=3)) == whole


UNSEEDED = {
    "shuffle": lambda: rows().shuffle(),
    "balance": lambda: rows().balance(is_above_one),
    "weights": lambda: rows().weights(np.arange(72.0)),
    "augment": lambda: rows().augment(noisy),
}


@pytest.mark.quick("shuffle")
@pytest.mark.parametrize("name", UNSEEDED)
def test_a_stage_without_a_seed_is_said_not_to_be_to_the_bit(name, tmp_path, caplog):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    logging.use_absl_handler()
    resume = tfamp.callbacks.Resume(tmp_path)
    model.fit(UNSEEDED[name]().batch(8).build(), verbose=0, callbacks=[resume])
    assert any("to the bit" in note for note in resume.notes)
