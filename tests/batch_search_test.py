"""`tfamp.find_batch_size`: the search, limits, outcomes, arithmetic and record."""

import contextlib
import dataclasses
import errno
import re
import signal
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from tests.limits_test import system
from tests.replicas import two_replicas
from tfamp.machine import limits
from tfamp.machine.limits import MemoryLimit
from tfamp.memory import batch_search
from tfamp.memory.batch_search import find_batch_size, memory_limit
from tfamp.memory.batch_search import processes as trial_process
from tfamp.memory.batch_search.processes import Settings
from tfamp.memory.batch_search.records import BatchSearch, Trial, allowed_bytes
from tfamp.memory.batch_search.search import Split, search, splits
from tfamp.trials import parcel, processes, worker
from tfamp.trials.batches import batch_of
from tfamp.trials.run_records import Run, Spread
from tfamp.trials.tasks import SETTINGS, Facts, Task
from tfamp.trials.training import train_steps

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.filterwarnings("ignore:'mixed_float16' will be slow")
GIB = 2**30
X = np.arange(40.0, dtype="float32").reshape(20, 2)
Y = X.sum(axis=1, keepdims=True)


def build_nothing():
    """Stands for a building function where trials are made up."""


def linear():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Machine:
    """Tries sizes on a made-up machine: steps of a fixed and a growing part.

    With `fixed` at 64, a batch of 64 runs at half of the highest speed, 1.
    """

    def __init__(
        self, most=10**9, *, fixed=64, speeds=(), outcome="killed", facts=None
    ):
        self.most, self.fixed, self.failed = most, fixed, Trial(0, outcome)
        self.speeds = {size: list(values) for size, values in dict(speeds).items()}
        self.known = facts or Facts()
        self.tried = []

    def __call__(self, size):
        if not self.tried:
            size = self.known.possible(size)
        self.tried.append(size)
        if size > self.most:
            return dataclasses.replace(self.failed, batch_size=size)
        speed = size / (self.fixed + size)
        if self.speeds.get(size):
            speed = self.speeds[size].pop(0)
        return Trial(size, "fits", speed, size / speed, peak_bytes=size)

    def search(self, start=8, min_gain=0.05, **caps):
        return search(
            self,
            start=start,
            caps=caps or {"max_batch_size": 2**20},
            min_gain=min_gain,
            facts=lambda: self.known,
        )


# The search


def test_it_ends_at_the_knee_and_takes_the_smaller_size():
    # Speeds 1/9, 1/5, 1/3, 1/2, 2/3, 4/5, 8/9, 16/17 (gain .059), 32/33 (gain .030).
    machine = Machine()
    found = machine.search()
    assert found.stopped_by == "knee"
    # Two doublings in a row gain too little: to 2048, and to 4096.
    assert machine.tried == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert found.chosen.batch_size == 1024
    assert found.largest_that_fits is None


def test_memory_ends_it_between_multiples_of_8_and_one_slow_process_does_not():
    machine = Machine(most=203, fixed=10**6, speeds={32: [1e-9]})
    found = machine.search()
    assert machine.tried == [8, 16, 32, 64, 128, 256, 192, 224, 208]
    assert found.chosen.batch_size == found.largest_that_fits == 192
    assert found.stopped_by == "memory"


def test_the_fastest_is_not_the_largest_that_fits():
    # From 64 to 128 it gains .06; the sizes up to 192 lie within .05 of each other.
    speeds = {8: [1], 16: [2], 32: [4], 64: [7], 128: [7.42], 192: [7.43], 160: [7.4]}
    found = Machine(most=200, speeds=speeds).search()
    assert found.largest_that_fits == 192
    assert found.chosen.batch_size == 128
    found = Machine(most=200, speeds=speeds).search(min_gain=0.0)
    assert found.chosen.batch_size == 192


def test_where_speed_does_not_matter_the_largest_is_taken():
    machine = Machine(most=200, fixed=0)  # all sizes are equally fast
    found = machine.search(min_gain=None)
    assert machine.tried == [8, 16, 32, 64, 128, 256, 192, 224, 208]
    assert (found.stopped_by, found.chosen.batch_size) == ("memory", 192)


HALVED = {
    40: [64, 32, 48, 40],
    5: [64, 32, 16, 8, 4, 6, 5],
    1: [64, 32, 16, 8, 4, 2, 1],
    0: [64, 32, 16, 8, 4, 2, 1],
}


@pytest.mark.parametrize(("most", "tried"), HALVED.items(), ids=HALVED)
def test_a_start_that_does_not_fit_is_halved(most, tried):
    machine = Machine(most=most, fixed=10**6)
    found = machine.search(start=64)
    assert machine.tried == tried
    assert found.largest_that_fits == (most or None)
    assert (found.chosen.batch_size if found.chosen else None) == (most or None)


def test_a_model_that_does_not_even_build_is_tried_once():
    tried = []

    def never(size):
        tried.append(size)
        return Trial(size, "over the limit", began_training=False)

    found = search(never, start=64, caps={"max_batch_size": 99}, min_gain=0.05)
    assert (tried, found.chosen) == ([64], None)


def test_a_trial_that_takes_too_long_ends_the_growth():
    found = Machine(most=64, fixed=10**6, outcome="too slow").search()
    assert (found.stopped_by, found.chosen.batch_size) == ("time", 64)


CAPS = {
    "a power": ({"max_batch_size": 64}, None, [8, 16, 32, 64], "max_batch_size"),
    "none": ({"max_batch_size": 100}, None, [8, 16, 32, 64, 96], "max_batch_size"),
    "near": ({"max_batch_size": 67}, None, [8, 16, 32, 64, 67], "max_batch_size"),
    "an update": (
        {"max_batch_size": 999, "target_batch_size": 50},
        None,
        [8, 16, 32, 50],
        "target_batch_size",
    ),
    "data": ({"max_batch_size": 999}, 122, [8, 16, 32, 56], "data"),
    "little data": ({"max_batch_size": 999}, 9, [8], "data"),
}


@pytest.mark.parametrize(
    ("caps", "examples", "tried", "reason"), CAPS.values(), ids=CAPS
)
def test_nothing_above_a_cap_is_tried(caps, examples, tried, reason):
    machine = Machine(fixed=10**6, facts=Facts(1, examples))
    found = machine.search(min_gain=0.0, **caps)
    assert machine.tried == tried
    assert found.stopped_by == reason
    assert found.chosen.batch_size == tried[-1]


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("most", [4, 30, 50, 203])
def test_sizes_are_multiples_of_the_replicas(replicas, most):
    machine = Machine(most=most, fixed=10**6, facts=Facts(replicas, 1000))
    found = machine.search(start=8)
    assert all(size % replicas == 0 for size in machine.tried)
    assert found.chosen.batch_size in machine.tried
    assert found.chosen.batch_size <= most


# Updates of a size that is wanted

SPLITS = {
    "itself": (512, 512, 1, Split(512, 1)),
    "less": (512, 100, 1, Split(100, 1)),
    "evenly": (100, 512, 1, Split(64, 8)),
    "not by 8": (100, 300, 1, Split(100, 3)),
    "by 8 rather": (110, 216, 1, Split(72, 3)),
    "two replicas": (10, 30, 2, Split(10, 3)),
    "two replicas, unevenly": (8, 15, 2, Split(8, 2)),
    "a prime": (96, 509, 1, Split(85, 6)),
}


@pytest.mark.parametrize(
    ("largest", "target", "replicas", "best"), SPLITS.values(), ids=SPLITS
)
def test_batches_add_up_to_an_update(largest, target, replicas, best):
    found = splits(largest, target, replicas=replicas)
    assert found[0] == best
    assert found[-1].batch_size == largest or found[0].batch_size == target


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_split_fits_and_comes_close(replicas):
    for largest in range(replicas, 60, replicas):
        for target in range(replicas, 200):
            found = splits(largest, target, replicas=replicas)
            assert all(0 < s.batch_size <= largest for s in found)
            assert all(s.batch_size % replicas == 0 for s in found)
            product = found[0].batch_size * found[0].steps
            # Each step is off by half a multiple of the replicas, or by a whole one.
            assert abs(product - target) <= replicas * found[0].steps


# Limits


CGROUP = {
    "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
}
LIMITS = {
    "what is free": (None, {}, None, MemoryLimit(8 * GIB, "physical memory", 6 * GIB)),
    "a container": (None, CGROUP, None, MemoryLimit(2 * GIB, "cgroup v2", GIB)),
    "a larger one, fuller": (
        None,
        {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n"},
        None,
        MemoryLimit(8 * GIB, "physical memory", 6 * GIB),
    ),
    "the caller's": (GIB // 2, CGROUP, None, MemoryLimit(GIB // 2, "max_memory_bytes")),
    "too much asked": (9 * GIB, CGROUP, None, MemoryLimit(2 * GIB, "cgroup v2", GIB)),
    "addresses": (
        None,
        {"proc/self/status": "VmSize: 1048576 kB\n"},
        GIB,
        MemoryLimit(GIB, "RLIMIT_AS"),
    ),
}


@pytest.mark.parametrize(
    ("asked", "files", "space", "expected"), LIMITS.values(), ids=LIMITS
)
def test_the_least_room_decides(tmp_path, monkeypatch, asked, files, space, expected):
    root = system(tmp_path, files)
    monkeypatch.setattr(limits, "_address_space", lambda: space)
    found = limits.memory_limits(root)
    monkeypatch.setattr(limits, "memory_limits", lambda: found)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: [])
    assert memory_limit(asked) == expected


class Gpus(contextlib.nullcontext):
    """Stands for NVML on a machine with two GPUs, one of which is fuller."""

    def read(self):
        return [
            types.SimpleNamespace(memory_total_bytes=total, memory_used_bytes=4 * GIB)
            for total in (20 * GIB, 16 * GIB, None)
        ]


def test_on_a_gpu_its_own_memory_decides(monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind])
    monkeypatch.setattr(batch_search.Nvml, "open", Gpus)
    assert memory_limit() == MemoryLimit(16 * GIB, "GPU memory", 4 * GIB)
    assert memory_limit(8 * GIB) == MemoryLimit(8 * GIB, "max_memory_bytes")
    monkeypatch.setattr(batch_search.Nvml, "open", lambda: None)
    assert memory_limit() is None


def test_a_margin_of_what_is_free_stays_free():
    assert allowed_bytes(MemoryLimit(1000, "cgroup v2", 200), 0.1) == 720
    assert allowed_bytes(None, 0.1) is None


# How trials end


def exhausted(text):
    return tf.errors.ResourceExhaustedError(None, None, text)


def caused_by(cause):
    error = ValueError("a layer failed")
    error.__cause__ = cause
    return error


ERRORS = {
    "allocator": (exhausted("OOM when allocating tensor"), "ResourceExhaustedError"),
    "XLA": (
        exhausted("Out of memory while trying to allocate 3 bytes"),
        "XLA out of memory",
    ),
    "XLA, internal": (
        tf.errors.InternalError(None, None, "RESOURCE_EXHAUSTED: HLO ran out"),
        "XLA out of memory",
    ),
    "cuDNN": (
        tf.errors.InternalError(None, None, "CUDNN_STATUS_ALLOC_FAILED"),
        "out of memory",
    ),
    "NumPy": (np._core._exceptions._ArrayMemoryError((9,), np.dtype("f4")),)
    + ("MemoryError",),
    "system": (OSError(errno.ENOMEM, "Cannot allocate memory"), "MemoryError"),
    "cause": (caused_by(MemoryError()), "MemoryError"),
    "disk": (exhausted("No space left on device"), None),
    "in lines": (exhausted("Graph error:\n\tOOM when allocating\nstack"),)
    + ("ResourceExhaustedError",),
    "access": (tf.errors.InternalError(None, None, "illegal memory access"), None),
    "shape": (tf.errors.InvalidArgumentError(None, None, "shapes differ"), None),
    "user": (ValueError("out of memory of names"), None),
    "file": (OSError(errno.ENOENT, "no such file"), None),
}


@pytest.mark.parametrize(("error", "outcome"), ERRORS.values(), ids=ERRORS)
def test_errors_of_memory_are_told_from_others(error, outcome):
    assert worker.outcome_of(error) == outcome


STATUSES = {
    "killed": (-signal.SIGKILL, "", "killed"),
    "bad_alloc": (-signal.SIGABRT, "terminate called\n  std::bad_alloc\n", "killed"),
    "abort": (-signal.SIGABRT, "Check failed: a == b", None),
    "no stack": (-signal.SIGABRT, "LLVM ERROR: pthread_create failed: Res", "killed"),
    "harmless": (
        -signal.SIGABRT,
        "ran out of memory trying to allocate 2 GiB. This is not a failure\nCheck\n",
        None,
    ),
    "segfault": (-signal.SIGSEGV, "", None),
    "in Python": (1, "MemoryError\n", "out of memory"),
    "status": (1, "ImportError\n", None),
}


@pytest.mark.parametrize(("status", "log", "outcome"), STATUSES.values(), ids=STATUSES)
def test_ends_for_memory_are_told_from_others(status, log, outcome):
    assert trial_process.of_status(status, log) == outcome


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Runs a trial whose process runs other Python code; `told` leaves its facts."""

    def run(code, *, noted=True, timeout_seconds=60.0):
        task = Task("float32", steps=3, batch_size=64)
        facts = Facts(3, None, batch_size=66).to_json()
        file = tmp_path / f"{task.name}.facts"
        whole = "import os, sys, time\n"
        whole += f"open({str(file)!r}, 'w').write({facts!r})\n" if noted else ""
        words = [sys.executable, "-c", whole + code]
        monkeypatch.setattr(processes, "command", lambda _, more: [*words, *more])
        return trial_process.try_size(tmp_path, task, timeout_seconds=timeout_seconds)

    return run


def answered(tmp_path, **given):
    """Code that leaves a record of these fields."""
    path = tmp_path / f"{Task('float32', steps=3, batch_size=64).name}.json"
    return f"open({str(path)!r}, 'w').write({Run('float32', 0, **given).to_json()!r})"


def test_an_answer_becomes_a_trial_of_the_size_that_was_tried(process, tmp_path):
    step = Spread(13.2, 13.2, 13.2, 3)
    given = {"outcome": "fits", "examples_per_second": 5.0, "step": step}
    assert process(answered(tmp_path, **given)) == Trial(66, "fits", 5.0, 13.2)


ENDS = {
    "killed": ("os.kill(os.getpid(), 9)", "killed", "SIGKILL ended the process"),
    "a traceback": ("raise MemoryError()", "out of memory", "the process ended with"),
    "time": ("time.sleep(60)", "too slow", "It was ended after 3 s."),
}


@pytest.mark.quick("killed", "a traceback")
@pytest.mark.parametrize("code, outcome, detail", ENDS.values(), ids=ENDS)
def test_a_process_without_an_answer_did_not_fit(process, code, outcome, detail):
    found = process(code, timeout_seconds=3 if outcome == "too slow" else 60)
    assert (found.outcome, found.began_training) == (outcome, True)
    assert found.detail.startswith(detail)


def test_a_process_that_ends_before_its_model_is_built_is_of_the_size_asked(process):
    found = process("os.kill(os.getpid(), 9)", noted=False)
    assert (found.batch_size, found.began_training) == (64, False)


def test_a_fault_of_the_model_is_raised_with_its_log(process, tmp_path):
    message = (
        "The trial of batch size 66 failed, and not for want of memory: the process "
        "ended with status 3 and left no record. Expected `build_model` and its data "
        "to train; mend what the log ends with:\nno such layer"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        process("print('no such layer', flush=True); sys.exit(3)")
    failed = {"status": "failed", "error": "shapes differ"}
    with pytest.raises(RuntimeError, match="not for want of memory: shapes differ. Ex"):
        process(answered(tmp_path, **failed))


# The steps that are timed


def ticking(seconds):
    """Returns a clock that goes on by so much at each look."""
    now = [0.0]

    def clock():
        now[0] += seconds
        return now[0]

    return clock


def noting(sizes, **options):
    class Noting(keras.layers.Layer):
        def call(self, inputs):
            sizes.append(inputs.shape[0])
            return inputs

    model = keras.Sequential([keras.Input((2,)), Noting(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


STEPS = {
    "graph": {},
    "several steps a call": {"steps_per_execution": 2},
    "eager": {"run_eagerly": True},
    "XLA": {"jit_compile": True},
}


def timed(model, size, steps, seconds):
    run = Run("float32", 0)
    clock = ticking(seconds)
    return train_steps(model, (X, Y), run=run, size=size, steps=steps, clock=clock)


@pytest.mark.quick("eager")
@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_steps_are_timed_at_the_size(options):
    model = noting(sizes := [], **options)
    per_call = options.get("steps_per_execution", 1)
    # From one window to the next the clock is looked at three times.
    found = timed(model, 50, 3, 0.25)
    assert found.step.median == pytest.approx(0.5 / per_call)
    assert found.examples_per_second == pytest.approx(50 / found.step.median)
    assert sizes[-1] in (50, None)
    # The first call and those that were asked for: they are long enough.
    assert int(model.optimizer.iterations) <= 4 * per_call


def test_short_steps_are_timed_more_often():
    assert timed(linear(), 4, 3, 0.02).num_steps > 10
    assert timed(linear(), 4, 3, 0.00001).num_steps == 101


def test_two_replicas_share_a_batch():
    with two_replicas().scope():
        model = noting(sizes := [], run_eagerly=True)
    timed(model, 12, 1, 1.0)
    assert sizes[-1] == 6


# Data


def slices():
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA = {
    "inputs by name": (lambda: ({"a": X, "b": X}, Y, None), 20, 20),
    "endless": (lambda: slices().batch(8).repeat(), 8, None),
    "ragged": (
        lambda: tf.data.Dataset.from_tensors(
            (tf.ragged.constant([[1], [2, 3]]), [1, 2])
        ),
        2,
        2,
    ),
}


@pytest.mark.parametrize(("make", "size", "number"), DATA.values(), ids=DATA)
def test_a_batch_of_the_data_is_taken(make, size, number):
    found = batch_of(make())
    assert (found.size, found.num_examples) == (size, number)


def test_only_some_rows_of_arrays_are_taken():
    found = batch_of((np.zeros((5000, 1)), np.zeros(5000)))
    assert [len(part) for part in found.parts] == [1024, 1024]
    assert (found.size, found.num_examples) == (32, 5000)


# The whole, with trials made up


@pytest.fixture
def machine(monkeypatch):
    """Replaces trials by those of a made-up machine, which may be exchanged."""
    box = {"machine": Machine(fixed=10**6), "plans": []}

    def try_size(folder, task, *, timeout_seconds):
        trial = box["machine"](task.batch_size)
        box["plans"].append(task)
        told = {"model": "mlp", "data_batch_size": 32}
        facts = dataclasses.replace(box["machine"].known, **told)
        facts.to_json(folder / f"{task.name}.facts")
        return trial

    monkeypatch.setattr(trial_process, "try_size", try_size)
    return box


def found_with(machine, **options):
    return find_batch_size(build_nothing, (X, Y), verbose=False, **options)


def test_a_target_is_kept_by_steps_of_a_tried_size(machine):
    machine["machine"] = Machine(most=100, fixed=10**6)
    told = []
    found = found_with(machine, target_batch_size=480, on_trial=told.append)
    # 96 fits; 480 is five times that.
    assert (found.batch_size, found.accumulation_steps) == (96, 5)
    assert found.effective_batch_size == 480
    machine["machine"] = Machine(most=100, fixed=10**6)
    found = found_with(machine, target_batch_size=512)
    assert (found.batch_size, found.accumulation_steps) == (64, 8)
    machine["machine"] = Machine(most=100, fixed=10**6)
    found = found_with(machine, target_batch_size=509)
    # 85 was tried last, for this.
    assert (found.batch_size, found.accumulation_steps) == (85, 6)
    assert machine["machine"].tried[-1] == 85
    assert found.chosen == found.trials[-1]
    assert "An update then has 510 examples, not 509" in found.advice[2]
    assert [trial.batch_size for trial in told] == [8, 16, 32, 64, 128, 96, 112, 104]


def test_a_size_for_a_target_that_does_not_fit_is_not_taken(machine):
    class Odd(Machine):
        def __call__(self, size):
            trial = super().__call__(size)
            return Trial(size, "killed") if size == 85 else trial

    machine["machine"] = Odd(most=100, fixed=10**6)
    found = found_with(machine, target_batch_size=509)
    assert (found.batch_size, found.accumulation_steps) == (96, 6)
    assert [t.outcome for t in found.trials if t.batch_size == 85] == ["killed"]


def test_a_target_that_fits_needs_one_step(machine):
    found = found_with(machine, target_batch_size=50, policy="float32+xla")
    assert found.policy == "float32+xla"
    assert (found.batch_size, found.accumulation_steps) == (50, 1)
    assert found.stopped_by == "target_batch_size"
    assert machine["machine"].tried == [8, 16, 32, 50]


def test_trials_are_told_what_they_need(machine):
    found_with(
        machine, max_memory_bytes=1000, margin=0.25, steps=7, target_batch_size=16
    )
    asked = {"allowed_bytes": 750, "target_batch_size": 16, "data_batch_size": 20}
    assert machine["plans"][0] == Task(
        "float32", steps=7, batch_size=8, num_examples=20, **asked
    )


def test_where_nothing_fits_it_says_what_to_do(machine):
    failed = Trial(1, "over the limit", peak_bytes=3 * GIB, detail="held too much")
    machine["machine"] = Machine(most=0)
    machine["machine"].failed = failed
    with pytest.raises(MemoryError) as caught:
        found_with(machine, max_memory_bytes=GIB)
    assert str(caught.value) == (
        "Not even batch size 1 of 'build_nothing' fits: the trial ended by 'over the "
        "limit' at 3.0 GiB (held too much); expected it to stay within 922 MiB "
        "(max_memory_bytes, less the margin). Compute activations again by "
        "`tfamp.remat(model)`, pass a `policy` of half precision such as "
        "'mixed_bfloat16', shorten or shrink the inputs, or allow "
        "more memory."
    )


def test_where_nothing_ends_in_time_it_says_what_to_do(machine):
    machine["machine"] = Machine(most=0, outcome="too slow")
    message = "Not even batch size 1 of 'build_nothing' was trained in time:"
    with pytest.raises(TimeoutError, match=re.escape(message)):
        found_with(machine)


def test_nothing_is_left_behind(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(batch_search.tempfile, "tempdir", str(tmp_path))
    before = keras.config.dtype_policy(), tfamp.status().policy
    found_with(machine, max_batch_size=16)
    assert list(tmp_path.iterdir()) == []

    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(trial_process, "try_size", fail)
    with pytest.raises(KeyboardInterrupt):
        found_with(machine)
    assert list(tmp_path.iterdir()) == []
    assert (keras.config.dtype_policy(), tfamp.status().policy) == before
    assert not tf.distribute.has_strategy()


REFUSED = {
    "start": ({"start": 0}, "`start` is 0; expected"),
    "start above": (
        {"start": 64, "max_batch_size": 32},
        "`start` is 64, but `max_batch_size` is 32; expected at most that. Pass a "
        "smaller `start`.",
    ),
    "most": ({"max_batch_size": 0}, "`max_batch_size` is 0; expected"),
    "target": ({"target_batch_size": 0}, "`target_batch_size` is 0; expected"),
    "margin": ({"margin": 1.0}, "`margin` is 1.0; expected a number above 0 and below"),
    "gain": ({"min_gain": -0.1}, "`min_gain` is -0.1; expected a number in [0, 1]"),
    "steps": ({"steps": 0}, "`steps` is 0; expected"),
    "time": ({"timeout_seconds": 0}, "`timeout_seconds` is 0.0; expected"),
    "memory": ({"max_memory_bytes": 0}, "`max_memory_bytes` is 0; expected"),
    "policy": ({"policy": "fp16"}, "Unknown `policy` 'fp16'; expected 'auto'"),
    "no rows": ({"data": (X[:0], Y[:0])}, "The arrays of `data` have (0,) rows;"),
    "rows differ": ({"data": (X, Y[:3])}, "The arrays of `data` have (3, 20) rows;"),
    "empty": (
        {"data": tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(2)},
        "`dataset` holds no batches; expected at least one.",
    ),
    "examples": (
        {"data": tf.data.Dataset.range(5)},
        "hold a scalar, so they are single examples; expected batches",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_are_checked_before_any_trial(machine, options, message):
    options = {"data": (X, Y), **options}
    with pytest.raises(ValueError, match=re.escape(message)):
        find_batch_size(build_nothing, verbose=False, **options)
    assert machine["machine"].tried == []


def test_what_cannot_go_to_a_trial_is_refused(machine):
    model = linear()
    dataset = tf.data.Dataset.range(3)
    for wrong in (5, model):
        with pytest.raises(TypeError, match="expected a function that returns a comp"):
            find_batch_size(wrong, (X, Y))
    with pytest.raises(TypeError, match="it holds something that cannot be pickled"):
        find_batch_size(lambda: dataset, (X, Y), verbose=False)
    with pytest.raises(TypeError, match="is of type list_iterator; expected what"):
        find_batch_size(build_nothing, iter([X]))
    assert machine["machine"].tried == []


# What is in force goes to the trials


def test_a_policy_with_its_rules_goes_to_the_trials(tmp_path):
    class Mine(keras.layers.Layer):
        pass

    kept = ["default", Mine, "head", lambda layer: "tail" in layer.name]
    with tfamp.scope(
        "mixed_float16", keep_float32=kept, loss_scale_options={"initial_scale": 8.0}
    ):
        Settings.present(None).write(tmp_path)
    with parcel.read(tmp_path / SETTINGS).in_force():
        assert tfamp.status().loss_scale == "dynamic"
        layers = [
            keras.layers.Dense(2),
            Mine(),
            keras.layers.Dense(2, name="head"),
            keras.layers.Dense(2, name="tail"),
            keras.layers.UnitNormalization(),
        ]
        dtypes = [layer.compute_dtype for layer in layers]
        assert dtypes == ["float16"] + 4 * ["float32"]
        model = keras.Sequential([keras.Input((2,)), *layers])
        model.compile("sgd", "mse")
        assert float(model.optimizer.scale) == 8
    assert not tfamp.status().enabled
    assert keras.config.dtype_policy().name == "float32"


def test_a_plan_in_force_goes_to_the_trials(tmp_path):
    def made():
        dense = [keras.layers.Dense(2, name=name) for name in ("first", "last")]
        model = keras.Sequential([keras.Input((2,)), *dense])
        model.compile("sgd", "mse")
        return model

    with tfamp.scope("mixed_bfloat16", keep_float32=["default", "first"]):
        plan = tfamp.PrecisionPlan.from_model(made())
    with tfamp.scope(dataclasses.replace(plan, jit_compile=True)):
        Settings.present(None).write(tmp_path)
    with parcel.read(tmp_path / SETTINGS).in_force():
        model = made()
    assert model.layers[0].compute_dtype == "float32"
    assert model.jit_compile is True


def test_a_policy_of_stock_keras_goes_to_the_trials(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    Settings.present(None).write(tmp_path)
    keras.config.set_dtype_policy("float32")
    with parcel.read(tmp_path / SETTINGS).in_force():
        assert keras.layers.Dense(1).compute_dtype == "bfloat16"
        assert not tfamp.status().enabled
    assert keras.config.dtype_policy().name == "float32"


def test_a_named_policy_replaces_what_is_in_force(tmp_path):
    with tfamp.scope("mixed_bfloat16"):
        Settings.present("float32+xla").write(tmp_path)
    settings = parcel.read(tmp_path / SETTINGS)
    assert settings.variant.jit_compile
    with settings.in_force():
        assert tfamp.status().policy == "float32"


def test_devices_and_an_open_strategy_go_to_the_trials():
    assert Settings.present(None).replicas == ()
    with two_replicas().scope():
        settings = Settings.present(None)
    assert (settings.replicas, settings.num_cpus) == (("CPU:0", "CPU:1"), 2)
    one = tf.distribute.OneDeviceStrategy("CPU:0")
    with (
        one.scope(),
        pytest.raises(ValueError, match="A scope of OneDeviceStrategy is"),
    ):
        Settings.present(None)


def test_rules_that_cannot_go_along_are_refused(tmp_path):
    dataset = tf.data.Dataset.range(3)
    with tfamp.scope("mixed_float16", keep_float32=[lambda layer: dataset is None]):
        settings = Settings.present(None)
    with pytest.raises(TypeError, match="`keep_float32`, as it is in force, cannot be"):
        settings.write(tmp_path)


# The record


def record(**changed):
    trials = (
        Trial(8, "fits", 80.0, 0.1, 2.0, 4 * GIB),
        Trial(16, "fits", 150.0, 0.107, 2.5, 6 * GIB),
        Trial(32, "over the limit", peak_bytes=9 * GIB, detail="d"),
        Trial(24, "killed", began_training=False, detail="e"),
    )
    given = BatchSearch(
        model="mlp",
        policy="mixed_bfloat16",
        batch_size=16,
        accumulation_steps=4,
        trials=trials,
        stopped_by="memory",
        largest_that_fits=16,
        limit=MemoryLimit(12 * GIB, "cgroup v2", 2 * GIB),
        margin=0.2,
        min_gain=0.1,
        replicas=2,
        data_batch_size=32,
        target_batch_size=64,
    )
    return dataclasses.replace(given, **changed)


def test_a_search_comes_back_from_json(tmp_path):
    found = record()
    # Every field differs from its default.
    for field in dataclasses.fields(found):
        assert getattr(found, field.name) != field.default, field.name
    found.to_json(tmp_path / "found.json")
    assert BatchSearch.from_json(tmp_path / "found.json") == found


def test_a_search_tells_what_follows_from_it():
    found = record()
    assert found.per_replica_batch_size == 8
    assert found.effective_batch_size == 64
    assert found.allowed_bytes == 8 * GIB
    assert found.chosen.examples_per_second == 150.0
    assert found.advice == (
        "Make batches of 16 (8 on each of 2 replicas), as by `.batch(16)`.",
        "Add up 4 of them to one update of 64 examples: "
        "`tfamp.LossScaleOptimizer(optimizer, gradient_accumulation_steps=4)`.",
        "The learning rate belongs to updates of 32 examples. Take "
        "`tfamp.training.scale_learning_rate(learning_rate, batch_size=64, "
        'base_batch_size=32)`, with `rule="sqrt"` for Adam.',
    )


def test_advice_names_only_what_there_is_to_do():
    found = record(accumulation_steps=2, replicas=1, data_batch_size=32)
    assert "or Keras's own `gradient_accumulation_steps=2`" in found.advice[1]
    assert len(record(accumulation_steps=2, target_batch_size=None).advice) == 2
    plain = record(accumulation_steps=1, target_batch_size=None, data_batch_size=16)
    assert len(plain.advice) == 1


def test_a_search_prints_as_a_table():
    text = str(record())
    assert text.splitlines()[0] == (
        "Batch size 16 (8 on each of 2 replicas) in 4 steps an update: 150 examples/s, "
        "peak 6.0 GiB; a larger one does"
    )
    assert "limit 8.0 GiB: cgroup v2, 10.0 GiB less 20.0 %" in text
    rows = [
        re.split(r"\s*│\s*", line)[1:-1] for line in text.splitlines() if "│" in line
    ]
    assert rows == [
        ["8", "80.0", "100 ms", "4.0 GiB", "fits"],
        ["16", "150", "107 ms", "6.0 GiB", "fits, chosen"],
        ["24", "", "", "", "killed"],
        ["32", "", "", "9.0 GiB", "over the limit"],
    ]
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"stopped_by": "knee"}, "; doubling it twice gains less than 10.0 % each."),
        ({"min_gain": None, "stopped_by": "memory"}, "; a larger one does not fit."),
        ({"stopped_by": "data"}, "; a larger one would be more than half of the data."),
        (
            {"batch_size": 8, "target_batch_size": None},
            "; of those up to 16 none is more than 10.0 % faster.",
        ),
    ],
)
def test_it_says_why_it_ended(changed, why):
    text = str(record(**changed)).split("\nmlp,")[0]
    assert why in text.replace("\n", " ")
