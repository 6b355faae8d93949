"""The file cache: whose it is, what changes it, killed writers, full disks, damage."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data_pipeline_test import double, numbers, rows
from tfamp.data import Pipeline
from tfamp.data.stages import cache as caching

ROOT = Path(__file__).parents[1]


def caches(folder):
    """Returns the folders of the caches in a folder."""
    return sorted(path for path in folder.iterdir() if path.is_dir())


def left_in(folder):
    """Returns what is there beside the empty files that are locked."""
    return [
        path
        for path in folder.iterdir()
        if path.suffix != ".lock" or path.stat().st_size > 0
    ]


def only(folder):
    """Returns the only cache in a folder."""
    (found,) = caches(folder)
    return found


def remove_data(folder):
    for path in folder.glob("elements*"):
        path.unlink()


@pytest.mark.quick("missing/train-lies in a folder that does not exist")
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
    tmp_path,
):
    plain = tf.data.Dataset.range(3)
    list(plain.map(lambda x: x + 1).cache(str(tmp_path / "plain")))
    stale = plain.map(lambda x: x + 2).cache(str(tmp_path / "plain"))
    assert [int(x) for x in stale] == [1, 2, 3]

    first = numbers(3).map(double).cache(tmp_path / "train").build()
    fresh = numbers(3).map(lambda x, y: (x + 1, y)).cache(tmp_path / "train").build()
    assert rows(fresh) == [(1, 0), (2, 10), (3, 20)]
    assert len(caches(tmp_path)) == 2
    assert rows(first) == rows(numbers(3).map(double).build()), "it stays"


def test_a_step_after_the_cache_changes_nothing(tmp_path):
    numbers().cache(tmp_path / "train").batch(2).build()
    numbers().cache(tmp_path / "train").shuffle(seed=1).batch(5).build()
    assert only(tmp_path)


def test_another_source_under_the_same_path_has_a_cache_of_its_own(tmp_path):
    train = numbers(10).cache(tmp_path / "train").build()
    validation = numbers(4).cache(tmp_path / "train").build()
    assert (len(rows(train)), len(rows(validation))) == (10, 4)
    assert len(caches(tmp_path)) == 2


def test_another_version_is_another_cache(tmp_path):
    for version in (1, 2, 1):
        numbers().cache(tmp_path / "train", version=version).build()
    assert len(caches(tmp_path)) == 2
    with pytest.raises(ValueError, match="`version` is 3 with a cache in 'memory'"):
        numbers().cache("memory", version=3)


def test_a_half_written_cache_is_built_again(tmp_path, caplog):
    pytest.importorskip("filelock", reason="what is left is removed under a lock")
    rows(numbers().cache(tmp_path / "train").build())
    folder = only(tmp_path)
    remove_data(folder)
    left = tmp_path / f"{folder.name}.0123abcd.unfinished"
    left.mkdir()
    (left / "elements_0.lockfile").write_text("Created at: 1")
    (tmp_path / "train_of_another.txt").write_text("mine")
    dataset = numbers().cache(tmp_path / "train").build()
    assert "which a process that has ended left unfinished" in caplog.text
    assert rows(dataset) == rows(numbers().build())
    assert caches(tmp_path) == [folder]
    assert (tmp_path / "train_of_another.txt").read_text() == "mine"


def deadly(path):
    """Returns a pipeline that ends a process at its 600th element, if told to."""
    dies = f"{path}.dies"

    def stop(x):
        if x == 600 and os.path.exists(dies):
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    def look(x):
        return tf.ensure_shape(tf.py_function(stop, [x], tf.int64), ())

    return Pipeline.from_arrays(np.arange(1000)).map(look).cache(path)


def test_a_writer_that_was_killed_does_not_stop_the_next_one(tmp_path):
    path, dies = tmp_path / "train", tmp_path / "train.dies"
    dies.touch()
    program = "from tests.data_cache_test import deadly as d; import sys; "
    killed = subprocess.run(
        [sys.executable, "-c", program + "d(sys.argv[1]).build()", str(path)],
        cwd=ROOT,
        capture_output=True,
    )
    dies.unlink()
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    left = only(tmp_path)
    assert left.name.endswith(".unfinished")
    assert [int(x) for x in deadly(path).build()] == list(range(1000))
    # The same pipeline has the same name in every process.
    assert only_whole(tmp_path).name == left.name.split(".")[0]


def test_one_waits_for_the_process_that_fills_the_cache(tmp_path, monkeypatch):
    filelock = pytest.importorskip("filelock")
    pipeline = numbers().cache(tmp_path / "train")
    pipeline.build()
    folder = only(tmp_path)
    shutil.rmtree(folder)
    taken, waiting, waited = (threading.Event() for _ in range(3))

    def hold():
        with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
            taken.set()
            waiting.wait()
            waited.set()

    told = []

    def tell(text, *values):
        told.append(text % values)
        waiting.set()

    monkeypatch.setattr(caching.logging, "info", tell)
    other = threading.Thread(target=hold)
    other.start()
    taken.wait()
    assert rows(pipeline.build()) == rows(numbers().build())
    other.join()
    assert waited.is_set() and told == [
        f"Waiting for the process that fills {folder.name}."
    ]


CODES = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)


@pytest.mark.quick("ENOTSUP0")
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_where_locks_are_missing_a_cache_is_filled_and_read(
    tmp_path, monkeypatch, code
):
    filelock = pytest.importorskip("filelock")

    def refuse(self, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", refuse)
    for _ in range(2):
        dataset = numbers().cache(tmp_path / "train").build()
        assert rows(dataset) == rows(numbers().build())
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(code)):
        numbers().cache(tmp_path / "other").build()


def test_without_filelock_a_cache_is_filled_and_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    for _ in range(2):
        dataset = numbers().cache(tmp_path / "train").build()
        assert rows(dataset) == rows(numbers().build())


def test_of_two_that_fill_at_once_without_locks_the_first_ones_folder_stays(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "filelock", None)
    pipeline = numbers().cache(tmp_path / "train")
    write, inner = caching._write, []

    def write_and_lose(*given):
        count = write(*given)
        if not inner:
            inner.append(None)
            inner.append(rows(pipeline.build()))  # as another process does meanwhile
            inner.append(only_whole(tmp_path).stat().st_ino)
        return count

    monkeypatch.setattr(caching, "_write", write_and_lose)
    assert rows(pipeline.build()) == inner[1] == rows(numbers().build())
    assert only(tmp_path).stat().st_ino == inner[2]


def only_whole(folder):
    (found,) = (one for one in caches(folder) if not one.suffix)
    return found


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
    message = "was full before the cache was whole; expected room for all of it."
    with pytest.raises(OSError, match=re.escape(message)):
        pipeline.build()
    assert left_in(tmp_path) == []


def test_an_error_while_filling_leaves_nothing_but_what_others_wait_for(tmp_path):
    def fail(x, y):
        tf.debugging.assert_less(x, tf.constant(7, x.dtype), message="seven")
        return x, y

    pipeline = numbers().map(fail).cache(tmp_path / "train")
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="seven"):
            pipeline.build()
        assert left_in(tmp_path) == []


def test_the_length_is_known_once_the_files_are_filled(tmp_path):
    filtered = tf.data.Dataset.range(10).filter(lambda x: x > 6)
    dataset = Pipeline.from_dataset(filtered).cache(tmp_path / "train").build()
    assert int(dataset.cardinality()) == 3


def test_describing_touches_no_file_and_shows_the_size(tmp_path):
    pipeline = numbers().cache(tmp_path / "train")
    assert "filled once by `build`, then read" in pipeline.describe()
    assert list(tmp_path.iterdir()) == []
    pipeline.build()
    size = sum(path.stat().st_size for path in only(tmp_path).glob("elements*"))
    assert size > 160  # 10 pairs of int64
    text = " ".join(pipeline.describe().split())
    assert f"10 elements, {size} bytes, filled already" in text


def test_parts_of_a_stream_keep_their_caches_beside_each_other(tmp_path):
    stream = Pipeline.from_dataset(tf.data.Dataset.range(20).filter(lambda x: x > 1))
    found = []
    for fraction, seed in ((0.5, 1), (0.5, 2), (0.5, 1)):
        part = stream.subset(fraction, seed=seed).cache(tmp_path / "train")
        found.append([int(x) for x in part.build()])
    assert found[0] == found[2]
    assert len(caches(tmp_path)) == 2


ENDLESS = {
    "repeated": lambda: Pipeline.from_dataset(tf.data.Dataset.range(3).repeat()),
    "filtered behind it": lambda: Pipeline.from_dataset(
        tf.data.Dataset.range(3).repeat()
    ).filter(lambda x: x > 0),
}


@pytest.mark.quick("filtered behind it")
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
    name = "files and states that Python code in the dataset uses"
    described = " ".join(pipeline.cache(folder / "train").describe().split())
    assert "does not notice" in described
    assert name in described
    message = f"would not notice changes in: {name}; with `unseen='error'` expected"
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.cache(folder / "train", unseen="error").build()
    assert list(folder.iterdir()) == []
    pipeline.cache(folder / "train").build()
    assert f"does not notice changes in: {name}. Pass `.cache` another" in caplog.text
    seen = numbers().map(double).cache(folder / "train", unseen="error")
    assert len(rows(seen.build())) == 10


def test_a_data_file_that_was_cut_short_is_no_cache(tmp_path):
    pipeline = numbers().cache(tmp_path / "train")
    pipeline.build()
    files = only(tmp_path).glob("elements*")
    largest = max(files, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    assert rows(pipeline.build()) == rows(numbers().build())
