"""Bundles: packed batches, files that are whole, damage, a full disk, random states."""

import dataclasses
import os
import random
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfamp.machine.speeds import Device
from tfamp.stepping import bundles, snapshot_files, snapshots
from tfamp.stepping.bundle_records import (
    Batch,
    Bundle,
    Call,
    Surroundings,
    hexed,
    same_bits,
)
from tfamp.stepping.bundles import iterator_of, leaves, pack, part_of, unpack
from tfamp.stepping.snapshots import digest
from tfamp.stepping.unchanged import put_random, take_random

RAGGED = tf.ragged.constant([[1.0, 2.0], [], [3.0]])
NESTED = tf.ragged.constant([[[1], [2, 3]], [[4, 5]]])
SPARSE = tf.SparseTensor([[0, 1], [2, 0]], [5.0, 6.0], [3, 2])
TEXTS = tf.constant([["a", ""], ["été", "x\0y"]])
PARTS = {
    "a tensor": tf.constant([[1.5, np.nan], [-0.0, np.inf]]),
    "a pair": (tf.constant([1, 2]), tf.constant([True, False])),
    "None in a tuple": (tf.constant([1.0]), None, tf.constant([2.0])),
    "a dict in a list": [{"b": tf.constant([1]), "a": (tf.constant([2]),)}],
    "strings": (TEXTS, tf.constant(3)),
    "no strings": tf.constant([], tf.string),
    "bfloat16 and int8": (
        tf.constant(np.array([1.5, np.nan], ml_dtypes.bfloat16)),
        tf.constant([-3], tf.int8),
    ),
    "an empty batch": tf.zeros((0, 3)),
    "ragged": {"x": RAGGED, "y": NESTED},
    "sparse": (SPARSE, tf.constant([0.0])),
}


def dense(data):
    """The dense tensors of a nested structure, as bytes with dtype and shape."""
    flat = [t for t in tf.nest.flatten(data, expand_composites=True) if t is not None]
    return [
        (
            t.dtype,
            tuple(t.shape),
            t.numpy().tolist() if t.dtype == tf.string else (np.asarray(t).tobytes()),
        )
        for t in flat
    ]


def packed(data):
    arrays = {}
    return pack(data, "0", arrays, {}), arrays


def record(**changes):
    around = Surroundings(
        policy="float32",
        is_managed=False,
        assignment={"layers": []},
        strategy="S",
        replicas=(),
        steps_per_execution=1,
        jit_compile=False,
        run_eagerly=False,
        versions={"keras": "3.10.0"},
        devices=(Device("cpu", "C"),),
        environment={},
        threads=(0, 0),
    )
    fields = {
        "cause": "loss",
        "message": "The loss is nan.",
        "error": None,
        "epoch": 0,
        "step": 2,
        "calls": (),
        "batches": (),
        "state_step": 0,
        "leads": True,
        "digest": None,
        "counters": {"iterations": 2, "loss_scale": 8.0},
        "learning_rate": 0.1,
        "state_learning_rate": None,
        "model_class": "keras.Sequential",
        "classes": {"Noisy": "nets:Noisy"},
        "has_model": False,
        "needs_build": "",
        "surroundings": around,
    }
    return Bundle(**(fields | changes))


def contents(**changes):
    state = snapshots.State({"weights/0/kernel": np.arange(6.0)}, {"iterations": 2})
    return bundles.Contents(record(**changes), state, {"0/0": np.ones(3)}, {})


def save(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "model")
    return ""


@pytest.fixture
def bundle(tmp_path):
    return bundles.write(tmp_path, contents(), save)


@pytest.mark.parametrize("data", PARTS.values(), ids=PARTS)
def test_a_packed_batch_comes_back_bit_by_bit(data):
    description, arrays = packed(data)
    again = unpack(description, arrays)
    tf.nest.assert_same_structure(data, again, expand_composites=True)
    assert dense(again) == dense(data)
    flat = [unpack(leaf, arrays) for leaf in leaves(description)]
    assert dense(unpack(description, {}, lambda leaf: flat.pop(0))) == dense(data)
    assert flat == []


def test_a_missing_array_is_named():
    description, arrays = packed(TEXTS)
    arrays.clear()
    with pytest.raises(ValueError, match=re.escape("array '0' of a batch is missing")):
        unpack(description, arrays)


def test_an_unknown_kind_of_part_is_refused():
    with pytest.raises(ValueError, match="of kind 'tree'; expected a kind that"):
        unpack({"kind": "tree"}, {})


def test_a_bundle_is_read_as_it_was_written(bundle):
    found, written = bundles.read(bundle), contents()
    assert bundle.name == "failure-00000002-loss"
    assert sorted(os.listdir(bundle)) == [
        "batches.npz",
        "bundle.json",
        "model.keras",
        "random.npz",
        "state.npz",
    ]
    assert found.record.has_model
    plain = {"has_model": False, "checksum": ""}
    assert dataclasses.replace(found.record, **plain) == written.record
    assert type(found.record.counters["iterations"]) is int
    assert found.state.arrays["weights/0/kernel"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.batches["0/0"].tolist() == [1, 1, 1]


def test_bundles_of_the_same_step_stand_side_by_side(tmp_path):
    paths = [bundles.write(tmp_path, contents(), save) for _ in range(3)]
    names = ["failure-00000002-loss" + end for end in ("", "-2", "-3")]
    assert [path.name for path in paths] == names
    assert bundles.read(paths[2]).record.step == 2


def test_a_model_that_cannot_be_saved_is_left_out_and_told(tmp_path):
    def refuse(path):
        path.write_bytes(b"half")
        raise NotImplementedError("no get_config\nmore")

    path = bundles.write(tmp_path, contents(), refuse)
    found = bundles.read(path).record
    assert not found.has_model and not (path / "model.keras").exists()
    why = "it cannot be saved (NotImplementedError: no get_config)"
    assert found.needs_build == why


NAMES = ("batches.npz", "random.npz", "state.npz", "model.keras")


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_found_and_named(bundle, name):
    whole = (bundle / name).read_bytes()
    with zipfile.ZipFile(bundle / name) as archive:
        info = archive.infolist()[0]
    start = info.header_offset + 30 + len(info.filename) + len(info.extra)
    changed = bytearray(whole)
    changed[start + info.file_size - 1] ^= 1
    for data in (bytes(changed), whole[:-1]):
        (bundle / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"The bundle .* is damaged: .*{name}"):
            bundles.read(bundle)
    (bundle / name).unlink()
    with pytest.raises(ValueError, match=f"its file '{name}' is missing"):
        bundles.read(bundle)


def test_a_bundle_of_an_old_form_is_refused(bundle):
    (bundle / "state.tfamp").write_bytes(b"")
    with pytest.raises(ValueError, match="a version before the first release wrote it"):
        bundles.read(bundle)


def test_a_changed_record_is_found(bundle):
    path = bundle / "bundle.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(ValueError, match="its file 'bundle.json' was changed"):
        bundles.read(bundle)


def test_half_a_record_is_found(bundle):
    path = bundle / "bundle.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(ValueError, match="is not JSON"):
        bundles.read(bundle)


def test_a_bundle_of_a_later_version_is_refused(bundle):
    path = bundle / "bundle.json"
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 99', 1))
    with pytest.raises(ValueError, match=re.escape("Found schema 99 of Bundle")):
        bundles.read(bundle)


def test_a_folder_that_is_no_bundle_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match="Found no bundle in"):
        bundles.read(tmp_path)


PLACES = {
    "the state": (snapshot_files, "write"),
    "the record": (Bundle, "to_json"),
    "the rename": (os, "rename"),
}


@pytest.mark.parametrize("owner, name", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left"), KeyboardInterrupt()],
    ids=["a full disk", "an interrupt"],
)
def test_an_error_while_writing_leaves_nothing(
    tmp_path, monkeypatch, owner, name, error
):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(type(error)):
        bundles.write(tmp_path, contents(), save)
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 90, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    # Six float64 twice, in the state and in the model's file, and three.
    text = re.escape(f"A bundle of 120 bytes does not fit in '{tmp_path}', where 10")
    with pytest.raises(OSError, match=text):
        bundles.write(tmp_path, contents(), save)
    assert os.listdir(tmp_path) == []


def test_only_what_dead_processes_of_this_machine_left_is_removed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    child = process.pid
    name = bundles._writing_name(record())
    dead = name.replace(f"-{os.getpid()}-", f"-{child}-")
    foreign = dead.replace(bundles._host(), "elsewhere")
    for folder in (name, dead, foreign, "failure-00000001-loss"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "state.npz").write_bytes(b"half")
    assert bundles.remove_leftovers(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == sorted(
        [name, foreign, "failure-00000001-loss"]
    )


def test_no_process_gets_a_signal_on_windows(tmp_path, monkeypatch):
    # There `os.kill(pid, 0)` presses Ctrl-C in every process of the console.
    monkeypatch.setattr(bundles.sys, "platform", "win32")
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal was sent"))
    (tmp_path / bundles._writing_name(record())).mkdir()
    assert bundles.remove_leftovers(tmp_path) == 0


def state(**arrays):
    return snapshots.State(
        {k: np.asarray(v, np.float32) for k, v in arrays.items()}, {}
    )


CHANGES = {
    "a sign of zero": {"w": [-0.0, 1.0]},
    "one number": {"w": [0.0, np.nextafter(np.float32(1), np.float32(2))]},
    "a NaN": {"w": [0.0, np.nan]},
    "the shape": {"w": [[0.0, 1.0]]},
    "the name": {"v": [0.0, 1.0]},
    "one array more": {"w": [0.0, 1.0], "v": [0.0]},
}


@pytest.mark.parametrize("other", CHANGES.values(), ids=CHANGES)
def test_a_digest_tells_states_apart_by(other):
    assert digest(state(w=[0.0, 1.0])) != digest(state(**other))


def test_a_digest_knows_one_nan_only_and_leaves_metrics_out():
    one, other = state(w=[np.nan]), state(w=[np.nan])
    other.arrays["w"].view(np.uint32)[0] ^= 0x80000001  # another sign, another payload
    assert np.isnan(other.arrays["w"][0])
    other.arrays["metrics/0/total"] = np.ones(1)
    other.arrays["record/0/LossScaleOptimizer/1"] = np.ones(1)
    assert digest(one) == digest(other)


def test_random_generators_go_on_where_they_were():
    random.gauss(0, 1)  # leaves a second one in store
    np.random.normal()
    generator = tf.random.get_global_generator()

    def draw():
        drawn = [random.gauss(0, 1), random.random(), np.random.normal()]
        return [*drawn, float(generator.normal(())), float(generator.uniform(()))]

    states = take_random()
    first = draw()
    assert draw() != first
    put_random(states)
    assert draw() == first


def test_logs_keep_every_bit():
    logs = hexed({"a": np.float32(0.1), "b": -np.inf, "c": tf.constant(2.0), "d": "x"})
    assert {k: float.fromhex(v) for k, v in logs.items()} == {
        "a": 0.10000000149011612,
        "b": -np.inf,
        "c": 2.0,
    }
    assert not same_bits((0.1).hex(), (0.1 + 2**-57).hex()) or 0.1 + 2**-57 == 0.1
    assert same_bits("nan", "nan")


@pytest.mark.parametrize("known", [None, 3], ids=["batches vary", "batch of 3"])
def test_batches_come_back_in_the_shapes_that_the_graph_knew(known):
    arrays, batches = {}, []
    for number in (4, 5):
        x = tf.fill((3, 2), float(number))
        part = pack((x, None), f"{number}/0", arrays, {id(x): [known, 2]})
        batches.append(Batch(number, 24, (part,)))
    calls = [Call(0, n, n, 1, {}) for n in (4, 5)]
    held = contents(batches=tuple(batches), calls=tuple(calls))._replace(batches=arrays)
    iterator = iterator_of(held, calls, tf.distribute.get_strategy())
    assert iterator.element_spec[0].shape.as_list() == [known, 2]
    drawn = list(iterator)
    assert [float(x[0, 0]) for x, _ in drawn] == [4.0, 5.0]
    assert drawn[0][1] is None
    assert float(part_of(held, 5)[0][2, 1]) == 5.0


def test_a_batch_that_is_not_kept_is_named():
    with pytest.raises(ValueError, match=re.escape("Batch 7 is not in the bundle")):
        part_of(contents(), 7)


def test_the_files_of_a_bundle_are_documented():
    text = (Path(__file__).parents[1] / "docs" / "bundles.md").read_text()
    names = [
        bundles.RECORD,
        bundles.STATE,
        bundles.BATCHES,
        bundles.RANDOM,
        bundles.MODEL,
    ]
    names += [field.name for field in dataclasses.fields(Bundle)]
    names += [field.name for field in dataclasses.fields(Surroundings)]
    assert [name for name in names if f"`{name}`" not in text] == []
