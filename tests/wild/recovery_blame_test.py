"""`NanRecovery` on faults that show late: what it blames, drops and never touches."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfamp
from tests.replicas import two_replicas

pytestmark = pytest.mark.filterwarnings(
    "ignore:'mixed_float16' will be slow", "ignore:Your input ran out of data"
)
ROWS, BAD_ROW = 320, 217


def flowers(seed=0):
    """A table with one number missing, which nobody has noticed."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 8)).astype("float32")
    y = x[:, :3].argmax(1)
    x[BAD_ROW, 6] = np.nan
    return x, y


def classifier(policy="float32", seed=0, **options):
    """On a CPU its ReLU makes 0 of NaN, so that the loss stays finite."""
    keras.utils.set_random_seed(seed)
    with tfamp.scope(policy):
        model = keras.Sequential(
            [
                keras.Input((8,)),
                layers.Dense(16, activation="relu"),
                layers.BatchNormalization(),
                layers.Dense(3, activation="softmax"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(1e-2),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            **options,
        )
    return model


def rate_of(model):
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return float(inner.learning_rate.numpy())


# Policy, seconds between snapshots, and how the model is compiled.
HOW = {
    "in a graph": ("float32", None, {}),
    "in float16": ("mixed_float16", None, {}),
    "many snapshots, compiled": ("mixed_bfloat16", 0, {"jit_compile": True}),
    "four steps a call": ("float32", None, {"steps_per_execution": 4}),
}


@pytest.mark.quick("in a graph")
@pytest.mark.parametrize("how", HOW)
def test_one_missing_number_is_the_datas_fault_and_cuts_no_rate(how, tmp_path):
    policy, seconds, options = HOW[how]
    x, y = flowers()
    model = classifier(policy, **options)
    recovery = tfamp.callbacks.NanRecovery(tmp_path, every_seconds=seconds)
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[recovery])
    assert {each.cause for each in recovery.recoveries} <= {"data"}
    assert {each.remedy for each in recovery.recoveries} <= {"drop batch"}
    assert rate_of(model) == pytest.approx(1e-2)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


def as_generator(x, y):
    return ((x[i : i + 16], y[i : i + 16]) for _ in range(9) for i in range(0, 320, 16))


SOURCES = {
    "unknown length": lambda x, y: (
        tf.data.Dataset.from_tensor_slices((x, y)).batch(16).filter(lambda *_: True)
    ),
    "pipeline": lambda x, y: tfamp.data.Pipeline.from_arrays(x, y).batch(16).build(),
    "generator": as_generator,
}


@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("source", SOURCES)
def test_the_batch_is_found_among_those_since_the_last_good_state(source, tmp_path):
    model = classifier()
    recovery = tfamp.callbacks.NanRecovery(tmp_path)
    data = SOURCES[source](*flowers())
    steps = {"steps_per_epoch": 20} if source == "generator" else {}
    model.fit(data, epochs=2, verbose=0, callbacks=[recovery], **steps)
    assert [each.cause for each in recovery.recoveries] == ["data"] * 2
    assert rate_of(model) == pytest.approx(1e-2)


def test_it_is_found_on_two_replicas(tmp_path):
    with two_replicas().scope():
        model = classifier()
    recovery = tfamp.callbacks.NanRecovery(tmp_path)
    data = SOURCES["pipeline"](*flowers())
    model.fit(data, epochs=2, verbose=0, callbacks=[recovery])
    assert {each.cause for each in recovery.recoveries} == {"data"}
    assert rate_of(model) == pytest.approx(1e-2)


@pytest.mark.quick("rare")
@pytest.mark.parametrize(
    ("seconds", "seed"), [(None, 0), (0, 2)], ids=["rare", "often"]
)
def test_an_epoch_that_is_taken_back_is_nobodys_best(seconds, seed, tmp_path):
    x, y = flowers(seed)
    model = classifier("mixed_bfloat16", seed)
    best = keras.callbacks.ModelCheckpoint(
        tmp_path / "best.keras", monitor="loss", save_best_only=True
    )
    patient = keras.callbacks.EarlyStopping(
        monitor="loss", patience=5, restore_best_weights=True
    )
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=5)
    recovery = tfamp.callbacks.NanRecovery(tmp_path / "good", every_seconds=seconds)
    fit = {"batch_size": 32, "epochs": 3, "verbose": 0}
    callbacks = [recovery, best, patient, plateau]
    history = model.fit(x, y, callbacks=callbacks, **fit).history
    assert 0.0 not in history["loss"]
    assert 0.0 not in history["accuracy"]
    clean = np.delete(x, BAD_ROW, 0), np.delete(y, BAD_ROW)
    # A loss of one epoch's mean, of these very weights after it, or of none at all.
    loss, _ = model.evaluate(*clean, verbose=0)
    assert best.best > 0.5 * loss and patient.best > 0.5 * loss
    assert plateau.best > 0.5 * loss


def test_a_rate_that_is_only_a_little_too_high_is_still_cut(tmp_path):
    """The loss grows by a tenth each step, until float32 cannot hold it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    highest = float(np.linalg.eigvalsh(2 * x.T @ x / 64).max())
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, use_bias=False)])
    model.compile(keras.optimizers.SGD(2.8 / highest), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64).repeat()
    recovery = tfamp.callbacks.NanRecovery(tmp_path, every_seconds=0)
    fit = {"steps_per_epoch": 200, "epochs": 2, "verbose": 0}
    history = model.fit(data, callbacks=[recovery], **fit).history
    assert [each.cause for each in recovery.recoveries] == ["learning rate"]
    assert rate_of(model) < 2 / highest
    assert history["loss"][-1] < 0.1
