"""The file cache: whose it is, what changes it, killed writers, full disks, damage."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data_pipeline_test import double, numbers, rows
from tfamp.data import Pipeline

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


def test_a_half_written_cache_is_built_again(tmp_path, caplog):
    pytest.importorskip("filelock", reason="what is left is removed under a lock")
    rows(numbers().cache(tmp_path / "train").build())
    folder = only(tmp_path)
    largest = max(folder.glob("elements*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
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
    assert left.name.split(".")[0] in [path.name for path in caches(tmp_path)]


def test_where_locks_are_missing_a_cache_is_filled_and_read(tmp_path, monkeypatch):
    filelock = pytest.importorskip("filelock")

    def refuse(self, *args, **kwargs):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", refuse)
    dataset = numbers().cache(tmp_path / "train").build()
    assert rows(dataset) == rows(numbers().build())


def test_elements_without_end_are_no_cache(tmp_path):
    endless = Pipeline.from_dataset(tf.data.Dataset.range(3).repeat())
    pipeline = endless.filter(lambda x: x > 0).cache(tmp_path / "train")
    message = "would never be full: the elements before it repeat without end."
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_in_a_clear_error_and_leaves_nothing(tmp_path):
    pipeline = Pipeline.from_arrays(np.zeros((100, 1000))).cache(tmp_path / "train")
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="was full before the cache was whole"):
            pipeline.build()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
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
