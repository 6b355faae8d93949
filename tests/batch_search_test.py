"""`tfamp.find_batch_size`: sizes it tries and takes, limits, what it says, by trials.

Most trials are made up, as of a machine whose steps have a fixed and a growing part;
some are real processes.
"""

import os
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tfamp.machine.limits import MemoryLimit
from tfamp.memory import batch_search
from tfamp.memory.batch_search import BatchSearch
from tfamp.trials.run_records import Memory, Run, possible_size

pytest.importorskip("cloudpickle", reason="needs the extra `report`")
pytest.importorskip("psutil", reason="needs the extra `report`")
MIB = 2**20
X = np.arange(320.0, dtype="float32").reshape(160, 2)
Y = X.sum(axis=1, keepdims=True)


def linear():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture
def machine(monkeypatch):
    """Stands for trials: a batch of 64 runs at half of the highest speed, 1."""

    class Machine:
        most, fixed, outcome, model = 10**9, 64, "killed", "linear"
        replicas, examples = 1, 0
        speeds: dict[int, float] = {}
        tried: list[int] = []
        tasks: list = []

        def __call__(self, folder, task):
            self.tasks.append(task)
            size = possible_size(task.batch_size, self.replicas, self.examples)
            self.tried.append(size)
            speed = self.speeds.get(size, size / (self.fixed + size))
            figures = {"examples_per_second": speed, "step_seconds": size / speed}
            sizes = {"batch_size": size, "data_batch_size": 32}
            fits = {"outcome": "fits" if size <= self.most else self.outcome}
            known = {"model": self.model, "replicas": self.replicas}
            known |= {"num_examples": self.examples, "memory": Memory(0, size)}
            return Run(task.policy, 0, **figures, **sizes, **fits, **known)

    made = Machine()
    made.tried, made.tasks = [], []
    monkeypatch.setattr(batch_search, "try_size", made)
    limit = MemoryLimit(2**30, "physical memory", 2**29)
    monkeypatch.setattr(batch_search, "memory_limit", lambda most: limit)
    return made


def test_it_ends_at_the_knee_and_takes_the_smaller_size(machine):
    # Speeds 1/9, 1/5, 1/3, 1/2, 2/3, 4/5, 8/9, 16/17 (gain .059), 32/33 (gain .030).
    found = tfamp.find_batch_size(linear, lambda: (X, Y))
    assert found.stopped_by == "knee"
    # Two doublings in a row gain too little: to 2048, and to 4096.
    assert machine.tried == [8 * 2**power for power in range(10)]
    assert found.batch_size == 1024
    assert "doubling it twice gains too little" in str(found)


def test_memory_ends_it_between_multiples_of_8_and_one_slow_process_does_not(machine):
    machine.most, machine.fixed, machine.speeds = 203, 10**6, {32: 1e-9}
    found = tfamp.find_batch_size(linear, lambda: (X, Y))
    assert (found.stopped_by, found.batch_size % 8) == ("memory", 0)
    assert 203 * 7 / 8 - 8 <= found.batch_size <= 203


@pytest.mark.parametrize("most", [1, 3, 5])
def test_a_start_that_does_not_fit_is_halved(machine, most):
    machine.most = most
    found = tfamp.find_batch_size(linear, lambda: (X, Y), start=64, min_gain=None)
    assert found.batch_size == most


def test_where_nothing_fits_it_says_what_to_do(machine):
    machine.most = 0
    with pytest.raises(MemoryError, match="Not even batch size 1 .*tfamp.remat"):
        tfamp.find_batch_size(linear, lambda: (X, Y))
    machine.outcome = "too slow"
    with pytest.raises(TimeoutError, match="expected a few steps to end within 600 s"):
        tfamp.find_batch_size(linear, lambda: (X, Y))
    machine.outcome, machine.model = "killed", ""
    machine.tried.clear()
    with pytest.raises(MemoryError, match="is not even built"):
        tfamp.find_batch_size(linear, lambda: (X, Y))
    assert machine.tried == [8]


@pytest.mark.parametrize("stop", ["max_batch_size", "target_batch_size", "data"])
def test_nothing_above_a_cap_is_tried(machine, stop):
    machine.fixed, machine.examples = 10**6, 200 * (stop == "data")
    options = {stop: 100} if stop != "data" else {}
    found = tfamp.find_batch_size(linear, lambda: (X, Y), **options)
    most = 100 if stop == "target_batch_size" else 96
    assert (max(machine.tried), found.batch_size) == (most, most)
    assert found.stopped_by in stop


@pytest.mark.parametrize("most", [4, 203])
def test_sizes_are_multiples_of_the_replicas(machine, most, replicas=3):
    machine.most, machine.fixed = most, 10**6
    machine.replicas = replicas
    found = tfamp.find_batch_size(linear, lambda: (X, Y))
    assert not any(size % replicas for size in machine.tried)
    assert f"on each of {replicas} replicas" in str(found)


@pytest.mark.parametrize("most, target, size", [(100, 256, 64), (1000, 256, 256)])
def test_a_target_is_kept_by_steps_of_a_tried_size(machine, most, target, size):
    machine.most, machine.fixed = most, 10**6
    found = tfamp.find_batch_size(linear, lambda: (X, Y), target_batch_size=target)
    assert (found.batch_size, found.effective_batch_size) == (size, target)
    assert found.gradient_accumulation_steps == target // size
    assert size in machine.tried
    told = "gradient_accumulation_steps=" in " ".join(found.advice)
    assert told == (target > size)
    assert all(task.target_batch_size == target for task in machine.tasks)


def test_trials_are_told_what_they_need(machine):
    with tfamp.scope("mixed_bfloat16"):
        found = tfamp.find_batch_size(linear, (X, Y))
    (task, *_) = machine.tasks
    assert task.policy == "mixed_bfloat16"
    assert (task.data_batch_size, task.num_examples) == (32, 160)
    # Half of the limit is in use, and a tenth of the rest stays free.
    assert task.allowed_bytes == found.allowed_bytes == int(0.9 * 2**29)
    tfamp.find_batch_size(linear, (X, Y), policy="float32+xla")
    assert machine.tasks[-1].policy == "float32+xla"
    tfamp.find_batch_size(linear, (X, Y))
    assert machine.tasks[-1].policy == "keras:float32"


def test_a_search_prints_and_comes_back_from_json(machine, tmp_path):
    found = tfamp.find_batch_size(linear, (X, Y))
    assert BatchSearch.from_json(found.to_json()) == found
    text = str(found)
    assert max(map(len, text.splitlines())) <= 110
    assert "fits, chosen" in text and "physical memory" in text
    told = f"batch_size={found.batch_size}, base_batch_size=32"
    assert told in " ".join(text.split())


REFUSED = {
    "model": ({"build_model": linear()}, TypeError, "Pass the function"),
    "start": ({"start": 0}, ValueError, "start"),
    "policy": ({"policy": "fp16"}, ValueError, "mixed_float16"),
    "target": ({"target_batch_size": 0}, ValueError, "target_batch_size"),
    "read once": ({"data": iter([(X, Y)])}, TypeError, "expected"),
}


@pytest.mark.parametrize("options, kind, message", REFUSED.values(), ids=REFUSED)
def test_arguments_are_checked_before_any_trial(machine, options, kind, message):
    with pytest.raises(kind, match=message):
        tfamp.find_batch_size(**{"build_model": linear, "data": (X, Y), **options})
    assert machine.tried == []


# Real processes: some 700 MiB before they train, and 200 for each example of `wide`.
WIDTH = 32 * MIB
LIMIT = 2778 * MIB


def wide():
    """Takes much memory for the activations of an example, and little arithmetic."""
    inputs = keras.Input((2,))
    spread = keras.layers.UpSampling1D(WIDTH // 2)(keras.layers.Reshape((2, 1))(inputs))
    mean = keras.layers.GlobalAveragePooling1D()(keras.layers.ReLU()(spread))
    model = keras.Model(inputs, keras.layers.Dense(1)(mean))
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_the_answer_fits_and_the_next_size_does_not():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    limit = {"max_memory_bytes": LIMIT, "min_gain": None, "start": 4}
    found = tfamp.find_batch_size(wide, data, **limit)
    assert found.stopped_by == "memory" and found.data_batch_size == 20
    by_size = {trial.batch_size: trial for trial in found.trials}
    assert by_size[found.batch_size].peak_bytes <= int(LIMIT * 0.9)
    larger = min(size for size in by_size if size > found.batch_size)
    assert by_size[larger].outcome in ("over the limit", "killed")


@pytest.mark.slow
def test_a_process_that_the_system_kills_did_not_fit():
    def killed_above_16():
        def end(size):
            if size > 16:
                os.kill(os.getpid(), signal.SIGKILL)
            return size

        class Deadly(keras.layers.Layer):
            def call(self, inputs):
                tf.py_function(end, [tf.shape(inputs)[0]], tf.int32)
                return inputs

        layers = [keras.Input((2,)), Deadly(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
        return model

    found = tfamp.find_batch_size(killed_above_16, (X, Y), start=16, min_gain=None)
    assert found.batch_size == 16
    assert {t.outcome for t in found.trials if t.batch_size > 16} == {"killed"}
