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


def classifier(
    policy="float32", seed=0, strategy=tf.distribute.get_strategy, **options
):
    """On a CPU its ReLU makes 0 of NaN, so that the loss stays finite."""
    keras.utils.set_random_seed(seed)
    with tfamp.scope(policy), strategy().scope():
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


def as_arrays(x, y):
    return {"x": x, "y": y, "batch_size": 16}


def of_unknown_length(x, y):
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    return {"x": batches.filter(lambda *_: True)}


def as_pipeline(x, y):
    return {"x": tfamp.data.Pipeline.from_arrays(x, y).batch(16).build()}


def as_generator(x, y):
    rows = [slice(i, i + 16) for _ in range(9) for i in range(0, ROWS, 16)]
    return {"x": ((x[each], y[each]) for each in rows), "steps_per_epoch": ROWS // 16}


# How the data comes, seconds between snapshots, and how the model is made.
HOW = {
    "in a graph": (as_arrays, None, {}),
    "in float16": (as_arrays, None, {"policy": "mixed_float16"}),
    "many snapshots, compiled": (
        *(as_arrays, 0),
        {"policy": "mixed_bfloat16", "jit_compile": True},
    ),
    "four steps a call": (as_arrays, None, {"steps_per_execution": 4}),
    "unknown length": (of_unknown_length, None, {}),
    "pipeline": (as_pipeline, None, {}),
    "generator": (as_generator, None, {}),
    "two replicas": (as_pipeline, None, {"strategy": two_replicas}),
}


@pytest.mark.quick("pipeline")
@pytest.mark.parametrize("source, seconds, options", HOW.values(), ids=HOW)
def test_one_missing_number_is_the_datas_fault_and_cuts_no_rate(
    source, seconds, options, tmp_path
):
    model = classifier(**options)
    recovery = tfamp.callbacks.NanRecovery(tmp_path, every_seconds=seconds)
    given = source(*flowers())
    model.fit(**given, epochs=2, verbose=0, callbacks=[recovery])
    found = [(each.cause, each.remedy) for each in recovery.recoveries]
    assert set(found) <= {("data", "drop batch")}
    assert len(found) == 2 or source is as_arrays
    assert rate_of(model) == pytest.approx(1e-2)
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


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
