"""Every pair of callbacks and tools, on clean data and through a missing number."""

import contextlib
import itertools

import keras
import numpy as np
import pytest

import tfamp
from tests.halting import Halt
from tests.replicas import two_replicas

pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
ROWS, BAD_ROW, BATCH = 48, 21, 8
TOOLS = (
    *("NanRecovery", "Resume", "Throughput", "Pipeline"),
    *("export", "triage", "MirroredStrategy"),
)
PAIRS = list(itertools.combinations(TOOLS, 2))
# Sums of two replicas come in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def table(spoilt):
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    if spoilt:
        x[BAD_ROW, 1] = np.nan
    return x, y


def program(pair, spoilt, folder):
    """Trains as one would who uses both, and returns the model and the callbacks."""
    keras.utils.set_random_seed(3)
    strategy = two_replicas() if "MirroredStrategy" in pair else None
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        # It skips the bad batch by itself, without a recovery.
        optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.05), 1.0)
        model.compile(optimizer, "mse")
    callbacks = {}
    if "NanRecovery" in pair:
        recovery = tfamp.callbacks.NanRecovery(folder / "good", every_seconds=0)
        callbacks["NanRecovery"] = recovery
    if "Resume" in pair:
        callbacks["Resume"] = tfamp.callbacks.Resume(folder / "run", every_steps=2)
    if "Throughput" in pair:
        callbacks["Throughput"] = tfamp.callbacks.Throughput()
    x, y = table(spoilt)
    given = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if "Pipeline" in pair:
        given = {"x": tfamp.data.Pipeline.from_arrays(x, y).batch(BATCH)}
    return model, callbacks, {"epochs": 2, "verbose": 0, **given}


def trained(pair, spoilt, folder):
    model, callbacks, given = program(pair, spoilt, folder)
    if "Resume" in pair:
        with pytest.raises(KeyboardInterrupt):
            model.fit(callbacks=[*callbacks.values(), Halt(8)], **given)
        model, callbacks, given = program(pair, spoilt, folder)
    history = model.fit(callbacks=[*callbacks.values()], **given).history
    return model, callbacks, history


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Weights of programs without any of the tools, by whether their data is spoilt."""
    folder = tmp_path_factory.mktemp("plain")
    return {bad: trained((), bad, folder)[0].get_weights() for bad in (False, True)}


@pytest.mark.quick("clean-NanRecovery and Resume")
@pytest.mark.parametrize("pair", PAIRS, ids=map(" and ".join, PAIRS))
@pytest.mark.parametrize("spoilt", [False, True], ids=["clean", "spoilt"])
def test_a_pair_trains_as_neither_does(pair, spoilt, plain, tmp_path):
    model, callbacks, history = trained(pair, spoilt, tmp_path)
    # A state counts as good once the step behind it was: a good step goes as well.
    loses_a_step = spoilt and "NanRecovery" in pair
    for found, wanted in zip(model.get_weights(), plain[spoilt], strict=True):
        assert np.isfinite(found).all()
        if not loses_a_step:
            np.testing.assert_allclose(found, wanted, **CLOSE)
    if recovery := callbacks.get("NanRecovery"):
        assert {each.cause for each in recovery.recoveries} <= {"data"}
        assert bool(recovery.recoveries) == spoilt
        assert np.isfinite(history["loss"]).all() and 0.0 not in history["loss"]
    if resume := callbacks.get("Resume"):
        assert resume.resumed_at is not None
    if "Throughput" in pair:
        assert history["examples_per_second"][-1] > 0
    x, y = table(spoilt)
    if "triage" in pair:
        before = model.get_weights()
        cause = tfamp.triage(model, (x[16:24], y[16:24])).cause
        assert cause == ("data" if spoilt else "none")
        for now, then in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(now, then)
    if "export" in pair:
        tfamp.export(model, tmp_path / "exported", format="saved_model")
        found = tfamp.load_exported(tmp_path / "exported").predict(x[:BATCH])
        np.testing.assert_allclose(found, model.predict(x[:BATCH], verbose=0), **CLOSE)
