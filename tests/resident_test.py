"""The resident size of a process: surroundings, replayed steps, and batches by it."""

import dataclasses
import re

import keras
import pytest
import tensorflow as tf

import tfamp
from tfamp.graph.liveness import Change, changes, find_peak
from tfamp.graph.schedules import read_schedule
from tfamp.machine import memory
from tfamp.machine import memory as process_memory
from tfamp.memory import resident
from tfamp.memory.heaps import BestFit, Glibc

KIB, MIB = 2**10, 2**20
UNTOLD = "none: what mimalloc keeps is not known"


def model_of(units=64):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(units, "relu")])
    model.compile("adam", "mse")
    return model


@pytest.fixture
def around(monkeypatch):
    """Sets what estimates start from; 100 MiB under TensorFlow's allocator."""

    def set_to(allocator=memory.TENSORFLOW, process_bytes=100 * MIB, **more):
        found = resident.Surroundings(allocator, process_bytes, **more)
        asking = "tfamp.memory.estimator.surroundings"
        monkeypatch.setattr(asking, lambda **_: found)

    set_to()
    return set_to


# The blocks of a step


def test_blocks_taken_and_freed_reach_the_peak_and_end_at_none():
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(tf.matmul(tf.tanh(x), x))
        return tape.gradient(y, x)

    spec = tf.TensorSpec((64, 64))
    plan = read_schedule(tf.function(gradient).get_concrete_function(spec))
    held, most = {}, 0
    for change in changes(plan):
        if change.num_bytes:
            held[change.block] = change.num_bytes
            most = max(most, sum(held.values()))
        else:
            del held[change.block]
    assert held == {}
    assert most == find_peak(plan).num_bytes


def test_blocks_of_a_loop_have_numbers_of_their_own():
    def loop(x):
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, tf.matmul(y, y)), (0, x)
        )[1]

    spec = tf.TensorSpec((64, 64))
    plan = read_schedule(tf.function(loop).get_concrete_function(spec))
    taken = [each.block for each in changes(plan) if each.num_bytes]
    freed = [each.block for each in changes(plan) if not each.num_bytes]
    assert len({*taken}) == len(taken)
    assert sorted(taken) == sorted(freed)


STEP = (
    # Two blocks at a time, three in all.
    Change(1, 2 * MIB, 0),
    Change(2, 2 * MIB, 1),
    Change(1, 0, 1),
    Change(3, 2 * MIB, 2),
    Change(2, 0, 2),
    Change(3, 0, 2),
)


@pytest.mark.parametrize(
    "heap, expected",
    [
        (BestFit, 4 * MIB),
        # Three mappings in turn; each page of headers.
        (Glibc, 4 * MIB + 8 * KIB),
    ],
    ids=["TensorFlow", "glibc"],
)
def test_growth_is_above_what_stands(heap, expected):
    assert resident.growth(heap(), [4 * MIB], [STEP]) == expected


def test_growth_is_the_largest_of_all_steps():
    first = (Change(1, 8 * MIB, 0), Change(1, 0, 0))
    assert resident.growth(BestFit(), [], [first, STEP]) >= 8 * MIB


# Surroundings


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, (128 * KIB, 128 * KIB, False)),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, (64 * KIB, 128 * KIB, True)),
        ({"MALLOC_TRIM_THRESHOLD_": "0x10000"}, (128 * KIB, 64 * KIB, True)),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4096:glibc.rtld.nns=2"},
            (4096, 128 * KIB, True),
        ),
        ({"MALLOC_MMAP_THRESHOLD_": "64KiB"}, (128 * KIB, 128 * KIB, False)),
    ],
    ids=["none", "mmap", "trim", "tunables", "no number"],
)
def test_the_environment_sets_thresholds(variables, expected):
    found = resident.glibc_settings(variables)
    given = found.mmap_threshold, found.trim_threshold, found.is_fixed
    assert given == expected


def test_this_process_tells_its_allocator_and_its_size():
    found = resident.surroundings()
    if found.process_bytes is None:
        assert found.allocator.startswith("none: ")
    else:
        assert found.allocator in (memory.TENSORFLOW, memory.GLIBC)
        assert found.process_bytes == pytest.approx(
            process_memory.process_bytes(), rel=0.1
        )


@pytest.mark.parametrize("in_xla", [False, True], ids=["graph", "XLA"])
def test_what_is_not_known_is_said(monkeypatch, in_xla):
    monkeypatch.setattr(resident, "host_allocator", lambda: "mimalloc")
    found = resident.surroundings(in_xla=in_xla)
    assert found.process_bytes is None
    if not in_xla and not tf.config.get_visible_devices("GPU"):
        assert found.allocator == UNTOLD


def test_without_psutil_a_process_of_another_system_tells_no_size(monkeypatch):
    def process_bytes():
        raise ImportError

    monkeypatch.setattr(resident, "host_allocator", lambda: "glibc")
    monkeypatch.setattr(process_memory, "process_bytes", process_bytes)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: [])
    found = resident.surroundings()
    assert found.process_bytes is None
    assert "psutil" in found.allocator


def test_an_allocator_that_is_loaded_stands_in_glibc_s_place(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_is_tensorflow", lambda: False)
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 fe:00 1 /usr/lib/libjemalloc.so.2\n")
    assert memory.host_allocator(maps) == "jemalloc"
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    assert memory.host_allocator(tmp_path / "none") == "glibc"
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    found = memory.host_allocator(tmp_path / "none")
    assert found == "the C library of Darwin"


# Estimates


def test_an_estimate_adds_tensors_and_the_runtime_to_what_is_there(around):
    estimate = tfamp.estimate_memory(model_of(), 2**14)
    # The step makes less than 20 MiB; the runtime is 60 MiB and 6 KiB an operation.
    low = 100 * MIB + estimate.step_bytes + 60 * MIB
    assert low <= estimate.resident_bytes <= low + 16 * MIB
    assert dict(estimate.resident_curve)[2**14] == estimate.resident_bytes
    assert estimate.allocator == memory.TENSORFLOW


def test_blocks_that_are_free_already_are_not_counted_twice(around):
    first = tfamp.estimate_memory(model_of(), 2**14).resident_bytes
    around(reusable_bytes=4 * MIB)
    assert tfamp.estimate_memory(model_of(), 2**14).resident_bytes == first - 4 * MIB


def test_small_batches_fit_into_what_is_free_and_large_ones_do_not(around):
    plain = tfamp.estimate_memory(model_of(), 64)
    free = 64 * MIB
    around(reusable_bytes=free)
    estimate = tfamp.estimate_memory(model_of(), 64)
    limit = 2**30
    # As though what is free came on top of the limit.
    expected = plain.largest_batch(limit + free)
    assert estimate.largest_batch(limit) == pytest.approx(expected, rel=0.02)
    sizes = [estimate.bytes_at(2**n, resident=True) for n in range(6, 18)]
    assert sizes == sorted(sizes)
    assert sizes[0] == estimate.resident_bytes


def test_a_model_that_was_trained_has_its_runtime(around):
    model = model_of()
    before = tfamp.estimate_memory(model, 2**14).resident_bytes
    model.fit(tf.zeros((2, 32)), tf.zeros((2, 64)), verbose=0)
    after = tfamp.estimate_memory(model, 2**14).resident_bytes
    assert before - after >= 60 * MIB


def test_convolutions_add_what_onednn_compiles():
    plans = [
        read_schedule(
            tf.function(function).get_concrete_function(tf.TensorSpec((1, 8, 8, 3)))
        )
        for function in (
            tf.tanh,
            lambda x: tf.nn.conv2d(x, tf.ones((1, 1, 3, 3)), 1, "SAME"),
        )
    ]
    small, large = map(resident.runtime_bytes, plans)
    assert large - small >= 1500 * KIB


def test_the_largest_batch_of_a_cpu_is_that_of_the_whole_process(around):
    estimate = tfamp.estimate_memory(model_of(), 2**14)
    limit = estimate.resident_bytes
    assert estimate.largest_batch(limit) == 2**14
    assert estimate.largest_batch(limit, resident=False) > 2 * 2**14
    size = estimate.largest_batch(2 * limit, multiple_of=8)
    assert estimate.bytes_at(size, resident=True) <= 2 * limit
    assert estimate.bytes_at(size + 8, resident=True) > 2 * limit


def test_a_limit_below_the_process_is_refused_and_says_what_a_gpu_needs(around):
    estimate = tfamp.estimate_memory(model_of(), 2**14)
    with pytest.raises(ValueError, match=r"in a process that shows all .*resident=Fal"):
        estimate.largest_batch(64 * MIB)
    assert estimate.largest_batch(64 * MIB, resident=False) > 0


def test_where_it_is_not_known_a_batch_is_that_of_a_step(around):
    around(UNTOLD, None)
    estimate = tfamp.estimate_memory(model_of(), 2**14)
    assert (estimate.resident_bytes, estimate.resident_curve) == (None, ())
    assert estimate.allocator == UNTOLD
    assert estimate.largest_batch(estimate.peak_bytes) == 2**14
    message = f"the resident size is not known ({UNTOLD})"
    with pytest.raises(ValueError, match=re.escape(message)):
        estimate.largest_batch(2**30, resident=True)


def test_records_and_tables_have_the_resident_size(around):
    estimate = tfamp.estimate_memory(model_of(), 2**14)
    assert tfamp.MemoryEstimate.from_json(estimate.to_json()) == estimate
    (line,) = (each for each in str(estimate).splitlines() if "resident" in each)
    assert line.split()[:5] == "resident size of the process".split()
    without = dataclasses.replace(estimate, resident_bytes=None)
    assert "resident" not in str(without)
