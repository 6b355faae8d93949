"""Epochs of which no step is applied: what callbacks that compare epochs get to see."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_.*float16' will be slow")
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = X.sum(axis=1)
BAD = np.full_like(X, np.nan)


def model_of(policy, *, num_replicas=1, **arguments):
    """Returns a small regression that is compiled under a policy of tfamp's."""
    devices = [f"CPU:{i}" for i in range(num_replicas)]
    strategy = tf.distribute.MirroredStrategy(devices) if num_replicas > 1 else None
    scope = strategy.scope() if strategy else tfamp.scope(policy)
    with tfamp.scope(policy), scope:
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse", metrics=["mae"], **arguments)
    return model


WAYS = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "several steps a call": {"steps_per_execution": 4},
    "XLA": {"jit_compile": True},
    "two replicas": {"num_replicas": 2},
}


@pytest.mark.quick("graph")
@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_an_epoch_without_an_applied_step_reports_nan(arguments):
    model = model_of("mixed_float16", **arguments)
    history = model.fit(BAD, Y, batch_size=16, epochs=2, verbose=0).history
    assert np.isnan(history["loss"]).all() and np.isnan(history["mae"]).all()
    good = model.fit(X, Y, batch_size=16, epochs=1, verbose=0).history
    assert np.isfinite(good["loss"]).all() and good["loss"][0] > 0


@pytest.mark.slow
def test_callbacks_take_no_such_epoch_for_the_best(tmp_path):
    x, y = np.concatenate([X, BAD, X]), np.concatenate([Y, Y, Y])
    stop = keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="loss", save_best_only=True
    )
    model = model_of("mixed_float16")
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((x, y)).batch(16),
        steps_per_epoch=4,
        epochs=3,
        verbose=0,
        callbacks=[stop, best],
    ).history["loss"]
    assert [bool(np.isnan(loss)) for loss in history] == [False, True, False]
    assert stop.best == min(history[0], history[2]) > 0
    assert best.best == stop.best


@pytest.mark.slow
def test_it_is_said_once_with_a_remedy(caplog):
    model = model_of("mixed_float16")
    with caplog.at_level(logging.WARNING, "absl"):
        model.fit(BAD, Y, batch_size=16, epochs=3, verbose=0)
    told = [r.getMessage() for r in caplog.records if "No step of" in r.getMessage()]
    assert len(told) == 1 and "tfamp.triage" in told[0]
