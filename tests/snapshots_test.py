"""Snapshots: states taken and put bit by bit, whole files, the last few, kill -9."""

import os
import re

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.loops import same_bits
from tests.replicas import two_replicas
from tfamp.stepping import snapshot_files, snapshots
from tfamp.stepping.snapshot_files import Folder
from tfamp.stepping.snapshots import State, named_variables

DATA = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
# A NaN with bits of its own, which a copy through arithmetic would lose.
ODD_NAN = np.array(0x7FC0_1234, np.uint32).view(np.float32)


def small(dtype=None):
    """Weights, moving statistics, a seed generator, in one model."""
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, dtype=dtype),
            keras.layers.BatchNormalization(dtype=dtype),
            keras.layers.Dropout(0.5, seed=3, dtype=dtype),
            keras.layers.Dense(1, dtype=dtype),
        ]
    )


def compiled(optimizer=None, dtype=None, *, run_eagerly=True):
    """Eager unless it matters: three steps are over before a trace would be."""
    model = small(dtype)
    model.compile(
        optimizer or keras.optimizers.Adam(0.01),
        "mse",
        metrics=["mae"],
        run_eagerly=run_eagerly,
    )
    return model


def train(model, data=DATA):
    model.fit(data, data[:, :1], batch_size=4, shuffle=False, verbose=0)


def adam_with_average():
    return keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=100)


def guarded(**options):
    return tfamp.LossScaleOptimizer(keras.optimizers.Adam(0.01), 8.0, **options)


OPTIMIZERS = {
    "adam": keras.optimizers.Adam,
    "averages": adam_with_average,
    "stock accumulation": lambda: keras.optimizers.SGD(
        0.1, gradient_accumulation_steps=2
    ),
    "loss scale, accumulation": lambda: guarded(accumulation_steps=2),
}


@pytest.mark.quick("loss scale, accumulation")
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_trained_after_a_put_is_what_was_trained_after_the_take(make):
    model = compiled(make(), run_eagerly=make is not keras.optimizers.Adam)
    train(model)
    state = snapshots.take(model)
    train(model)
    wanted = snapshots.take(model)
    assert not same_bits(state, wanted)
    snapshots.put(model, state)
    assert same_bits(snapshots.take(model), state)
    train(model)
    assert same_bits(snapshots.take(model), wanted)
    another = compiled(make(), run_eagerly=make is not keras.optimizers.Adam)
    snapshots.put(another, state)
    train(another)
    assert same_bits(snapshots.take(another), wanted)


def test_bfloat16_weights_and_odd_nans_keep_every_bit():
    model = compiled(dtype="bfloat16")
    train(model)
    odd = np.array([0x7FC1, 0x8000, 0x0001], np.uint16).view(ml_dtypes.bfloat16)
    model.layers[0].bias.assign(odd)
    model.optimizer.learning_rate.assign(ODD_NAN)
    state = snapshots.take(model)
    model.layers[0].bias.assign([0, 0, 0])
    snapshots.put(model, state)
    bits = model.layers[0].bias.numpy().view(np.uint16)
    assert bits.tolist() == [0x7FC1, 0x8000, 0x0001]
    rate = model.optimizer.learning_rate.numpy()
    assert rate.view(np.uint32) == ODD_NAN.view(np.uint32)


def on_two_replicas():
    strategy = two_replicas()
    with strategy.scope():
        return compiled(run_eagerly=False)


def test_replicas_get_back_what_each_of_them_held():
    model = on_two_replicas()
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    statistic = model.layers[1].moving_mean.value
    parts = model.distribute_strategy.experimental_local_results(statistic)
    parts[0].assign([1.0, 2.0, 3.0])
    parts[1].assign([4.0, 5.0, 6.0])
    kernel = model.layers[0].kernel
    kernels = model.distribute_strategy.experimental_local_results(kernel.value)
    before = kernel.numpy()
    state = snapshots.take(model)
    for part in (*parts, *kernels):
        part.assign(part + 1)
    assert not same_bits(snapshots.take(model), state)
    snapshots.put(model, state)
    assert [part.numpy().tolist() for part in parts] == [[1, 2, 3], [4, 5, 6]]
    assert [np.array_equal(each, before) for each in kernels] == [True, True]
    assert same_bits(snapshots.take(model), state)


def test_names_are_the_same_in_the_next_model_and_say_what_is_held():
    first, second = compiled(), compiled()
    train(first)
    train(second)
    names = [each.name for each in named_variables(first)]
    assert names == [each.name for each in named_variables(second)]
    assert names[:3] == ["weights/0/kernel", "weights/1/bias", "weights/2/gamma"]
    assert "optimizer/0/Adam/0" in names
    assert "metrics/0/total" in names
    assert snapshots.take(second).paths["weights/0/kernel"] == (
        second.layers[0].kernel.path
    )


def test_metrics_get_their_values_only_where_asked():
    model = compiled()
    train(model)
    state = snapshots.take(model)
    measured = float(model.get_metrics_result()["mae"])
    snapshots.put(model, state, metrics=False)
    assert float(model.get_metrics_result()["mae"]) == 0
    snapshots.put(model, state)
    assert float(model.get_metrics_result()["mae"]) == measured > 0


def test_numbers_that_are_not_finite_are_counted_in_weights_and_slots():
    model = compiled(guarded())
    train(model)
    assert list(snapshots.nonfinite(snapshots.take(model))) == []
    kernel = model.layers[3].kernel
    kernel.assign([[np.inf], [1.0], [np.nan]])
    slot = model.optimizer.inner_optimizer.variables[-1]
    slot.assign(tf.fill(slot.shape, -np.inf))
    state = snapshots.take(model)
    assert list(snapshots.nonfinite(state)) == [(kernel.path, 2), (slot.path, 1)]


def changed(state, **arrays):
    return State({**state.arrays, **arrays}, state.counters, state.paths)


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model = compiled()
    train(model)
    state = snapshots.take(model)
    before = snapshots.take(model)
    cases = {
        "has nothing, in the model": State(
            {k: v for k, v in state.arrays.items() if k != "weights/0/kernel"}, {}
        ),
        "of shape (2,) in float32, in the model nothing": changed(
            state, **{"weights/99/kernel": np.zeros(2, np.float32)}
        ),
        "kernel of shape (3, 4) in float32, in the model": changed(
            state, **{"weights/0/kernel": np.zeros((3, 4), np.float32)}
        ),
        "of shape (4, 3) in float64": changed(
            state, **{"weights/0/kernel": np.zeros((4, 3), np.float64)}
        ),
    }
    for text, other in cases.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            snapshots.put(model, other)
    assert same_bits(snapshots.take(model), before)


# Files.


def example():
    return State(
        {
            "weights/0/kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
            "weights/1/half": np.array([1.5, -2.0], ml_dtypes.bfloat16),
            "weights/2/scalar": np.array(7, np.int64),
            "weights/3/none": np.zeros((0, 2), ml_dtypes.bfloat16),
            "optimizer/0/SGD/0": np.array([True, False]),
        },
        {"iterations": 5, "loss_scale": 0.5, "names": ["a"]},
        {"weights/0/kernel": "dense/kernel"},
    )


@pytest.fixture
def path(tmp_path):
    snapshot_files.write(example(), tmp_path / "a.npz")
    return tmp_path / "a.npz"


def is_example(found):
    state = example()
    same = (found.counters, found.paths) == (state.counters, state.paths)
    return same and same_bits(found, state)


def test_a_file_gives_every_bit_back(path):
    assert is_example(snapshot_files.read(path))
    assert [each.name for each in path.parent.iterdir()] == ["a.npz"]


def test_a_file_that_ends_early_is_refused_wherever_it_ends(path):
    whole = path.read_bytes()
    for end in range(0, len(whole), 3):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="holds no whole state"):
            snapshot_files.read(path)


def test_a_failed_write_leaves_what_was_there(path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        snapshot_files.write(State({}, {}), path)
    assert is_example(snapshot_files.read(path))
    assert [each.name for each in path.parent.iterdir()] == ["a.npz"]


# The last few of a run.


def numbered(step):
    return State({"weights/0/kernel": np.full(4, step, np.float32)}, {"step": step})


def folder(path, **options):
    return Folder(path, **options)


def newest(kept):
    return kept.newest()[1].counters["step"]


def test_the_last_states_are_kept_and_the_newest_is_read(tmp_path):
    kept = folder(tmp_path / "new" / "folder")
    assert kept.newest() is None
    for step in range(4):
        kept.write(numbered(step), step)
    names = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert names == [f"step-00000000{i}.worker-0-of-1.npz" for i in (2, 3)]
    assert newest(kept) == 3


def test_a_damaged_newest_state_gives_way_to_the_one_before(tmp_path, caplog):
    kept = folder(tmp_path)
    for step in (1, 2):
        kept.write(numbered(step), step)
    path = tmp_path / kept.newest()[0].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert newest(folder(tmp_path)) == 1
    assert "Passed over" in caplog.text
    bent = bytearray(whole)
    bent[60] ^= 1
    path.write_bytes(bent)
    assert newest(folder(tmp_path)) == 1
    kept.write(numbered(3), 3)
    assert newest(kept) == 3


def test_a_damaged_state_of_several_workers_is_refused(tmp_path):
    for place in (0, 1):
        folder(tmp_path, place=place, num_workers=2).write(numbered(1), 1)
    path = tmp_path / "step-000000001.worker-1-of-2.npz"
    bent = bytearray(path.read_bytes())
    bent[60] ^= 1
    path.write_bytes(bent)
    assert newest(folder(tmp_path, place=0, num_workers=2)) == 1
    with pytest.raises(ValueError, match="holds no whole state"):
        folder(tmp_path, place=1, num_workers=2).newest()


FOLDERS = {
    "a number": (3, TypeError, "`directory` is 3, of type int;"),
    "a file": (__file__, ValueError, "cannot be made:"),
}


@pytest.mark.parametrize("given, error, text", FOLDERS.values(), ids=FOLDERS)
def test_folders_are_checked(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        folder(given)
