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


@pytest.mark.parametrize("where", ["missing/train", "."])
def test_a_path_that_cannot_begin_names_of_files_is_refused(tmp_path, where):
    with pytest.raises(ValueError, match="expected the path that the name of the c"):
        numbers().cache(tmp_path / where)


def test_where_locks_are_missing_a_cache_is_filled_and_read(tmp_path, monkeypatch):
    filelock = pytest.importorskip("filelock")
    codes = [errno.ENOLCK, errno.EIO]

    def refuse(self, *args, **kwargs):
        raise OSError(codes[0], os.strerror(codes[0]))

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", refuse)
    dataset = numbers().cache(tmp_path / "train").build()
    assert rows(dataset) == rows(numbers().build())
    del codes[0]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        numbers().cache(tmp_path / "other").build()


def test_elements_without_end_are_no_cache(tmp_path):
    endless = Pipeline.from_dataset(tf.data.Dataset.range(3).repeat())
    pipeline = endless.filter(lambda x: x > 0).cache(tmp_path / "train")
    message = "would never be full: the elements before it repeat without end."
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline.build()
    assert list(tmp_path.iterdir()) == []


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
