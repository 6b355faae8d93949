"""The file cache: whose it is, what changes it, killed writers, full disks, damage."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data_pipeline_test import double, numbers, rows
from tfamp.data import Pipeline
from tfamp.data.stages import cache as caching
from tfamp.data.stages.cache_files import (
    _HELD,
    CacheFiles,
    fill_or_read,
    kept_from_others,
)

ROOT = Path(__file__).parents[1]


def caches(folder):
    """Returns the records of the caches in a folder."""
    return sorted(path.name for path in folder.glob("*.tfamp"))


def let_go():
    """Gives up the caches this process holds, as its end would."""
    for held in _HELD.values():
        os.close(held)
    _HELD.clear()


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    let_go()


def remove_data(files):
    for path in files.parts():
        path.unlink()


def left_in(folder):
    """Returns what is there beside the empty files that are locked."""
    return [
        path
        for path in folder.iterdir()
        if path.suffix != ".lock" or path.stat().st_size > 0
    ]


def only(folder, name="train"):
    """Returns the files of the only cache in a folder."""
    (record,) = caches(folder)
    digest = re.fullmatch(rf"{name}-([0-9a-f]+).tfamp", record)[1]
    return CacheFiles(folder / name, digest)


@pytest.mark.parametrize(
    "where, told",
    [
        ("missing/train", "lies in a folder that does not exist"),
        (".", "is a folder; expected"),
    ],
)
def test_a_path_that_cannot_begin_names_of_files_is_refused(tmp_path, where, told):
    path = tmp_path / where
    with pytest.raises(ValueError, match=re.escape(f"Cache path {str(path)!r} {told}")):
        numbers().cache(path)
    with pytest.raises(ValueError, match="`unseen`"):
        numbers().cache(tmp_path / "train", unseen="raise")


def test_a_second_pipeline_reads_what_the_first_one_wrote(tmp_path):
    log = tmp_path / "calls"

    def note():
        with log.open("a") as file:
            file.write(".")

    def count(x, y):
        tf.py_function(note, [], [])
        return x, y

    first = numbers().map(count).cache(tmp_path / "train").build()
    assert log.read_text() == 10 * "."  # filled by `build`
    second = numbers().map(count).cache(tmp_path / "train").build()
    assert rows(second) == rows(first) == rows(numbers().build())
    assert log.read_text() == 10 * "."
    assert int(second.cardinality()) == 10


def test_a_changed_function_is_noticed_where_plain_tf_data_reads_stale_elements(
    tmp_path, caplog
):
    plain = tf.data.Dataset.range(3)
    list(plain.map(lambda x: x + 1).cache(str(tmp_path / "plain")))
    stale = plain.map(lambda x: x + 2).cache(str(tmp_path / "plain"))
    assert [int(x) for x in stale] == [1, 2, 3]

    rows(numbers(3).map(double).cache(tmp_path / "train").build())
    let_go()
    fresh = numbers(3).map(lambda x, y: (x + 1, y)).cache(tmp_path / "train").build()
    assert rows(fresh) == [(1, 0), (2, 10), (3, 20)]
    assert "changed since then: map." in caplog.text
    assert len(caches(tmp_path)) == 1


def test_a_step_after_the_cache_changes_nothing(tmp_path):
    numbers().cache(tmp_path / "train").batch(2).build()
    numbers().cache(tmp_path / "train").shuffle(seed=1).batch(5).build()
    assert only(tmp_path).read()["hits"] == 1


def test_another_source_under_the_same_path_has_a_cache_of_its_own(tmp_path):
    train = numbers(10).cache(tmp_path / "train").build()
    let_go()
    validation = numbers(4).cache(tmp_path / "train").build()
    assert (len(rows(train)), len(rows(validation))) == (10, 4)
    assert len(caches(tmp_path)) == 2


def test_an_older_version_that_is_read_stays(tmp_path):
    older = numbers(3).cache(tmp_path / "train").build()
    numbers(3).map(double).cache(tmp_path / "train").build()
    assert len(caches(tmp_path)) == 2
    assert rows(older) == [(0, 0), (1, 10), (2, 20)]


def test_a_half_written_cache_is_built_again(tmp_path, caplog):
    rows(numbers().cache(tmp_path / "train").build())
    files = only(tmp_path)
    let_go()
    # What a killed process leaves: no index, its lock and a part of the data.
    data = files.read()["data"]
    (tmp_path / f"{data}.index").unlink()
    (tmp_path / f"{data}_0.lockfile").write_text("Created at: 1")
    (tmp_path / "train_of_another.txt").write_text("mine")
    dataset = numbers().cache(tmp_path / "train").build()
    assert "was left unfinished by a process that has ended" in caplog.text
    assert rows(dataset) == rows(numbers().build())
    assert not list(tmp_path.glob("*.lockfile"))
    assert (tmp_path / "train_of_another.txt").read_text() == "mine"


def deadly(path):
    """Returns a pipeline that ends a process at its 600th element, if told to."""

    def stop(x):
        if x == 600 and "TFAMP_TEST_DIES" in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def look(x):
        return tf.ensure_shape(tf.py_function(stop, [x], tf.int64), ())

    return Pipeline.from_arrays(np.arange(1000)).map(look).cache(path)


def test_a_writer_that_was_killed_does_not_stop_the_next_one(tmp_path):
    path = tmp_path / "train"
    program = "from tests.data_cache_test import deadly as d; import sys; "
    killed = subprocess.run(
        [sys.executable, "-c", program + "d(sys.argv[1]).build()", str(path)],
        cwd=ROOT,
        env=os.environ | {"TFAMP_TEST_DIES": "1"},
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    (lock,) = tmp_path.glob("*.lock")
    left = CacheFiles(path, lock.stem.removeprefix("train-"))
    assert left.parts()
    assert not left.is_complete
    assert [int(x) for x in deadly(path).build()] == list(range(1000))
    # Its own place: the same pipeline has the same name in every process.
    assert caches(tmp_path) == [left.record.name]


def test_what_a_killed_writer_left_goes_with_the_next_version(tmp_path):
    left = tmp_path / "train-0123456789ab-01234567_0.data-00000-of-00001"
    kept = tmp_path / "train-0123456789ab_of_another.index"
    for path in (left, kept):
        path.write_text("half")
    numbers().cache(tmp_path / "train").build()
    assert (left.exists(), kept.exists()) == (False, True)


def test_one_waits_for_the_process_that_fills_the_cache(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    numbers().cache(tmp_path / "train").build()
    files = only(tmp_path)
    let_go()
    slept = []
    # flock sees another open file of this process as another owner.
    with files.lock.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(seconds):
            slept.append(seconds)
            fcntl.flock(other, fcntl.LOCK_SH)

        monkeypatch.setattr(time, "sleep", sleep)
        assert not fill_or_read(files, pytest.fail)
    assert len(slept) == 1


def test_a_cache_may_be_read_by_many_and_filled_by_none_of_them(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    numbers().cache(tmp_path / "train").build()
    with only(tmp_path).lock.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_files_that_go_while_others_read_them_are_an_error(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    pipeline = numbers().cache(tmp_path / "train")
    pipeline.build()
    files = only(tmp_path)
    let_go()
    remove_data(files)
    with files.lock.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        message = "is read by another process, and its files have gone; expected them"
        with pytest.raises(ValueError, match=re.escape(message)):
            pipeline.build()


def test_files_that_were_deleted_between_two_builds_are_written_again(tmp_path):
    pipeline = numbers().cache(tmp_path / "train")
    pipeline.build()
    remove_data(only(tmp_path))
    assert rows(pipeline.build()) == rows(numbers().build())


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path, monkeypatch
):
    pipeline = numbers(1000).cache(tmp_path / "train")
    usage = types.SimpleNamespace(free=15_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    message = "The cache needs about 15.6 KiB, and the disk of"
    with pytest.raises(OSError, match=re.escape(message)) as caught:
        pipeline.build()
    assert caught.value.errno == errno.ENOSPC
    assert left_in(tmp_path) == []


def test_the_size_of_varying_elements_is_estimated_from_the_first(tmp_path):
    texts = Pipeline.from_arrays(np.array(["a" * 100] * 50))
    assert caching.bytes_of_first(texts.build(), 64, beside=64) == 100 + 64


@pytest.fixture
def files_of_100_kb():
    """Limits each file that this process writes, as a full disk does."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_ends_in_a_clear_error_and_leaves_nothing(
    tmp_path, files_of_100_kb
):
    pipeline = Pipeline.from_arrays(np.zeros((100, 1000))).cache(tmp_path / "train")
    # Of 100 elements of 8,000 bytes 96 are counted, eight at a time, before tf.data
    # writes any: it keeps 8 MiB first.
    message = (
        "was full when 750 KiB of about 781 KiB of the cache were made; expected room "
        "for all of it. What was written is removed, and "
    )
    with pytest.raises(OSError, match=re.escape(message)):
        pipeline.build()
    assert left_in(tmp_path) == []


def test_an_error_while_filling_leaves_nothing_but_what_others_wait_for(tmp_path):
    def fail(x, y):
        tf.debugging.assert_less(x, tf.constant(7, x.dtype), message="seven")
        return x, y

    pipeline = numbers().map(fail).cache(tmp_path / "train")
    locks = set()
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="seven"):
            pipeline.build()
        assert left_in(tmp_path) == []
        locks |= {path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(locks) == len(list(tmp_path.glob("*.lock")))


def test_the_length_is_known_once_the_files_are_filled(tmp_path):
    filtered = tf.data.Dataset.range(10).filter(lambda x: x > 6)
    dataset = Pipeline.from_dataset(filtered).cache(tmp_path / "train").build()
    assert int(dataset.cardinality()) == 3


def test_describing_touches_no_file_and_shows_size_and_use(tmp_path):
    pipeline = numbers().cache(tmp_path / "train")
    assert "filled once by `build`, then read" in pipeline.describe()
    assert list(tmp_path.iterdir()) == []
    for _ in range(3):
        pipeline.build()
    size = only(tmp_path).num_bytes
    assert size > 160  # 10 pairs of int64
    text = " ".join(pipeline.describe().split())
    assert f"10 elements, {size} bytes" in text
    assert "used again 2 times" in text
    assert json.loads(only(tmp_path).record.read_text())["hits"] == 2


def test_a_cache_that_another_one_reads_is_in_use(tmp_path):
    fcntl = pytest.importorskip("fcntl", reason="Windows locks no files this way")
    files = CacheFiles(tmp_path / "train", "0123")
    # A file that was opened apart has a lock of its own, as another process's does.
    with files.lock.open("w") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with kept_from_others(files) as is_unused:
            assert not is_unused
    with kept_from_others(files) as is_unused:
        assert is_unused
        with files.lock.open() as reader, pytest.raises(BlockingIOError):
            fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_parts_of_a_stream_keep_their_caches_beside_each_other(tmp_path):
    stream = Pipeline.from_dataset(tf.data.Dataset.range(20).filter(lambda x: x > 1))
    found = []
    for fraction, seed in ((0.5, 1), (0.5, 2), (0.5, 1)):
        part = stream.subset(fraction, seed=seed).cache(tmp_path / "train")
        found.append([int(x) for x in part.build()])
        let_go()  # as a process ends
    assert found[0] == found[2]
    assert len(caches(tmp_path)) == 2
    counts = {json.loads(path.read_text())["hits"] for path in tmp_path.glob("*.tfamp")}
    assert counts == {0, 1}


ENDLESS = {
    "repeated": lambda: Pipeline.from_dataset(tf.data.Dataset.range(3).repeat()),
    "filtered behind it": lambda: Pipeline.from_dataset(
        tf.data.Dataset.range(3).repeat()
    ).filter(lambda x: x > 0),
}


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_elements_without_end_are_no_cache(tmp_path, make):
    pipeline = make().cache(tmp_path / "train")
    message = "would never be full: the elements before it repeat without end."
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


def reading(x):
    with open("factor.txt") as file:
        return x * int(file.read())


def test_what_is_not_seen_is_said_and_may_be_refused(tmp_path, monkeypatch, caplog):
    (tmp_path / "factor.txt").write_text("2")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "caches"
    folder.mkdir()

    def scaled(x, y):
        return tf.numpy_function(reading, [x], tf.int64), y

    pipeline = numbers().map(scaled)
    name = f"what `open` reads in {__name__}.reading"
    described = " ".join(pipeline.cache(folder / "train").describe().split())
    assert "does not notice" in described
    assert f"{__name__}.reading" in described
    message = f"would not notice changes in: {name}; with `unseen='error'` expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.cache(folder / "train", unseen="error").build()
    assert list(folder.iterdir()) == []
    pipeline.cache(folder / "train").build()
    assert f"does not notice changes in: {name}. Delete its files" in caplog.text
    seen = numbers().map(double).cache(folder / "train", unseen="error")
    assert len(rows(seen.build())) == 10


def test_a_record_is_never_half_written(tmp_path, monkeypatch):
    numbers().cache(tmp_path / "train").build()
    files = only(tmp_path)
    before = files.read()
    write = Path.write_text

    def broken_off(path, text):
        write(path, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(Path, "write_text", broken_off)
    with pytest.raises(OSError, match="no space"):
        files.write(before)
    assert files.read() == before


def test_a_data_file_that_was_cut_short_is_no_cache(tmp_path):
    pipeline = numbers().cache(tmp_path / "train")
    pipeline.build()
    let_go()
    files = only(tmp_path)
    largest = max(files.parts(), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert not files.is_complete
    assert rows(pipeline.build()) == rows(numbers().build())
