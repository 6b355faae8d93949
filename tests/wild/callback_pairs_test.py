"""Recovery and Resume beside every callback, on bad data and through Ctrl-C."""

import itertools

import keras
import numpy as np
import pytest

import tfamp
from tests.halting import Halt

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
ROWS, BAD_ROW, BATCH = 64, 37, 8
MAKERS = {
    "NanRecovery": lambda folder: tfamp.callbacks.NanRecovery(
        folder / "good", every_seconds=0
    ),
    "Resume": lambda folder: tfamp.callbacks.Resume(folder / "run", every_steps=3),
    "Throughput": lambda folder: tfamp.callbacks.Throughput(),
    "PrecisionMonitor": lambda folder: tfamp.callbacks.PrecisionMonitor(
        csv_path=folder / "steps.csv"
    ),
    "DeviceStats": lambda folder: tfamp.callbacks.DeviceStats(),
    "ModelCheckpoint": lambda folder: keras.callbacks.ModelCheckpoint(
        folder / "best.keras", monitor="loss", save_best_only=True
    ),
    "EarlyStopping": lambda folder: keras.callbacks.EarlyStopping(
        monitor="loss", patience=4, restore_best_weights=True
    ),
    "ReduceLROnPlateau": lambda folder: keras.callbacks.ReduceLROnPlateau(
        monitor="loss", patience=4
    ),
    "BackupAndRestore": lambda folder: keras.callbacks.BackupAndRestore(
        folder / "backup"
    ),
}
# Two that both say where `fit` begins; refused, in words.
REFUSED = {"Resume", "BackupAndRestore"}


def table(*, spoilt):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    if spoilt:
        x[BAD_ROW, 1] = np.nan
    return x, y


def made():
    """Without a scale, and with what the monitor reads."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    inner = keras.optimizers.SGD(0.01)
    optimizer = tfamp.LossScaleOptimizer(inner, initial_scale=1, dynamic=False)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def fit(model, callbacks, *, spoilt, epochs=3):
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    x, y = table(spoilt=spoilt)
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **options).history


@pytest.fixture(scope="module")
def plain():
    model = made()
    history = fit(model, [], spoilt=False)
    return history["loss"], model.get_weights()


WITH_RECOVERY = [p for p in itertools.permutations(MAKERS, 2) if "NanRecovery" in p]


@pytest.mark.quick("NanRecovery beside Resume")
@pytest.mark.parametrize(
    "pair", WITH_RECOVERY, ids=[" beside ".join(p) for p in WITH_RECOVERY]
)
def test_recovery_goes_through_a_bad_batch_beside_each(pair, tmp_path):
    model, callbacks = made(), [MAKERS[name](tmp_path) for name in pair]
    history = fit(model, callbacks, spoilt=True)
    assert len(history["loss"]) == 3
    for name in ("loss", "mae"):
        assert np.isfinite(history[name]).all()
        assert 0.0 not in history[name]
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    best = [c for c in callbacks if getattr(c, "monitor", None) == "loss"]
    for each in best:
        assert each.best == pytest.approx(min(history["loss"]))


OTHERS = [name for name in MAKERS if name not in REFUSED]


@pytest.mark.quick("NanRecovery")
@pytest.mark.parametrize("other", OTHERS)
def test_resume_goes_on_to_the_bit_beside_each(other, plain, tmp_path):
    def callbacks():
        return [MAKERS["Resume"](tmp_path), MAKERS[other](tmp_path)]

    with pytest.raises(KeyboardInterrupt):
        fit(made(), [*callbacks(), Halt(13)], spoilt=False)
    model = made()
    history = fit(model, callbacks(), spoilt=False)
    assert history["loss"] == plain[0]
    for ours, theirs in zip(model.get_weights(), plain[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
