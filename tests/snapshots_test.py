"""Snapshots: states taken and put bit by bit, whole files, the last few."""

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
from tfamp.stepping.snapshots import State

DATA = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
# A NaN with bits of its own, which a copy through arithmetic would lose.
ODD_NAN = np.array(0x7FC0_1234, np.uint32).view(np.float32)


def compiled(optimizer=None, dtype=None):
    """Weights, moving statistics, a seed generator and metrics, in one model."""
    layers = [
        keras.layers.Dense(3, dtype=dtype),
        keras.layers.BatchNormalization(dtype=dtype),
        keras.layers.Dropout(0.5, seed=3, dtype=dtype),
        keras.layers.Dense(1, dtype=dtype),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=True)
    return model


def train(model):
    model.fit(DATA, DATA[:, :1], batch_size=4, shuffle=False, verbose=0)


def guarded():
    inner = keras.optimizers.Adam(0.01)
    return tfamp.LossScaleOptimizer(inner, 8.0, accumulation_steps=2)


def test_what_is_trained_after_a_put_is_what_was_trained_after_the_take():
    model = compiled(guarded())
    train(model)
    state = snapshots.take(model)
    assert list(snapshots.nonfinite(state)) == []
    train(model)
    wanted = snapshots.take(model)
    assert not same_bits(state, wanted)
    for each in (model, compiled(guarded())):
        snapshots.put(each, state)
        train(each)
        assert same_bits(snapshots.take(each), wanted)


def test_variables_of_tensorflow_come_back_where_a_model_has_them():
    model = compiled()
    train(model)
    model.layers[0].counts = {"seen": tf.Variable([1.0, 2.0])}
    model.noise = tf.random.Generator.from_seed(3)
    state = snapshots.take(model)
    drawn = model.noise.normal([3]).numpy()
    model.layers[0].counts["seen"].assign([5.0, 5.0])
    snapshots.put(model, state)
    assert model.layers[0].counts["seen"].numpy().tolist() == [1.0, 2.0]
    np.testing.assert_array_equal(model.noise.normal([3]), drawn)
    fresh = compiled()
    snapshots.put(fresh, state)  # a step of its own may make them later
    np.testing.assert_array_equal(fresh.get_weights()[0], model.get_weights()[0])


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
    assert [count for _, count in snapshots.nonfinite(state)] == [1, 1]


def test_replicas_get_back_what_each_of_them_held():
    with two_replicas().scope():
        model = compiled()
        model.optimizer.build(model.trainable_variables)
    local = model.distribute_strategy.experimental_local_results
    parts = local(model.layers[1].moving_mean.value)
    parts[0].assign([1.0, 2.0, 3.0])
    parts[1].assign([4.0, 5.0, 6.0])
    kernels = local(model.layers[0].kernel.value)
    state = snapshots.take(model)
    for part in (*parts, *kernels):
        part.assign(part + 1)
    assert not same_bits(snapshots.take(model), state)
    snapshots.put(model, state)
    assert [part.numpy().tolist() for part in parts] == [[1, 2, 3], [4, 5, 6]]
    assert same_bits(snapshots.take(model), state)


def test_metrics_that_a_state_lacks_and_that_nobody_asks_for_start_anew():
    model = compiled()
    train(model)
    state = snapshots.take(model)
    model.compile(model.optimizer, "mse", metrics=["mae", "mse"], run_eagerly=True)
    train(model)
    for metrics in (True, False):
        snapshots.put(model, state, metrics=metrics)
        assert model.metrics[1].metrics[1].result() == 0
        assert (model.metrics[0].result() != 0) == metrics


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model = compiled()
    train(model)
    state = snapshots.take(model)
    less = {k: v for k, v in state.arrays.items() if k != "weights/0/kernel"}
    turned = {**less, "weights/0/kernel": np.zeros((3, 4), np.float32)}
    cases = {
        "has nothing, in the model": less,
        "kernel of shape (3, 4) in float32, in the model": turned,
    }
    for text, arrays in cases.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            snapshots.put(model, State(arrays, {}, state.paths))
    assert same_bits(snapshots.take(model), state)


EXAMPLE = State(
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
    snapshot_files.write(EXAMPLE, tmp_path / "a.npz")
    return tmp_path / "a.npz"


def is_example(found):
    same = (found.counters, found.paths) == (EXAMPLE.counters, EXAMPLE.paths)
    return same and same_bits(found, EXAMPLE)


def test_a_file_gives_every_bit_back_and_is_refused_wherever_it_ends(path):
    assert is_example(snapshot_files.read(path))
    whole = path.read_bytes()
    for end in range(0, len(whole), 7):
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


def numbered(step):
    return State({"weights/0/kernel": np.full(4, step, np.float32)}, {"step": step})


def newest(folder):
    return folder.newest()[1].counters["step"]


def test_the_last_states_are_kept_and_a_damaged_one_gives_way(tmp_path, caplog):
    (tmp_path / "step-000000.worker-0-of-1.npz.writing").write_bytes(b"half")
    kept = Folder(tmp_path)
    assert list(tmp_path.iterdir()) == [] and kept.newest() is None
    for step in range(4):
        kept.write(numbered(step), step)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"step-00000000{i}.worker-0-of-1.npz" for i in (2, 3)]
    assert newest(kept) == 3
    path = tmp_path / kept.newest()[0].name
    bent = bytearray(path.read_bytes())
    bent[60] ^= 1
    path.write_bytes(bent)
    assert newest(Folder(tmp_path)) == 2
    assert "Passed over" in caplog.text


def test_a_damaged_state_of_several_workers_is_refused(tmp_path):
    folders = [Folder(tmp_path, place=place, num_workers=2) for place in (0, 1)]
    for folder in folders:
        folder.write(numbered(1), 1)
    path = tmp_path / "step-000000001.worker-1-of-2.npz"
    path.write_bytes(path.read_bytes()[:-1])
    assert newest(folders[0]) == 1
    with pytest.raises(ValueError, match="holds no whole state"):
        folders[1].newest()


def test_a_folder_that_is_a_file_is_refused():
    with pytest.raises(ValueError, match="cannot be made:"):
        Folder(__file__)
