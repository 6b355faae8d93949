"""Locks between processes: files that change under them, and systems without locks."""

import contextlib
import errno
import functools
import json
import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tfamp.data import Pipeline
from tfamp.data.stages import cache_files as locks
from tfamp.data.stages.cache_files import _HELD, CacheFiles, fill_or_read

fcntl = pytest.importorskip("fcntl", reason="Windows locks no files this way")


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    monkeypatch.setattr(time, "sleep", no_sleep)
    yield
    for held in _HELD.values():
        os.close(held)
    _HELD.clear()


def no_sleep(seconds):
    raise AssertionError("waits for ever")


def pipeline(path):
    return Pipeline.from_arrays(np.arange(10)).map(lambda x: x * 2).cache(path)


def refusing(code):
    def flock(opened, kind):
        raise OSError(code, os.strerror(code))

    return flock


NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)


@pytest.mark.parametrize("code", NO_LOCKS, ids=errno.errorcode.get)
def test_where_locks_are_missing_a_cache_is_filled_and_read(
    tmp_path, monkeypatch, code
):
    monkeypatch.setattr(fcntl, "flock", refusing(code))
    files = CacheFiles(tmp_path / "train", "0123456789ab")
    filled = []

    def fill():
        data = files.new_data()
        data.with_name(f"{data.name}.index").write_text("all")
        files.publish(data, {"num_elements": 1})
        filled.append(data)

    assert fill_or_read(files, fill)
    assert not fill_or_read(files, fill)
    assert len(filled) == 1
    assert not list(tmp_path.glob("*.owner"))


def test_pipelines_are_cached_where_locks_are_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOTSUP))
    expected = list(range(0, 20, 2))
    for _ in range(2):
        dataset = pipeline(tmp_path / "train").build()
        assert [int(x) for x in dataset] == expected
    (record,) = tmp_path.glob("*.tfamp")
    assert json.loads(record.read_text())["hits"] == 1


def test_another_error_of_a_lock_is_raised_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        pipeline(tmp_path / "train").build()


def test_a_lock_on_a_file_that_lost_its_name_is_none(tmp_path, monkeypatch):
    path, flock, replaced = tmp_path / "lock", fcntl.flock, []

    def replacing(opened, kind):
        # What happens between opening and locking.
        if not replaced:
            replaced.append(os.fstat(opened).st_ino)
            path.rename(tmp_path / "other")
            path.touch()
        flock(opened, kind)

    monkeypatch.setattr(fcntl, "flock", replacing)
    locked = locks.try_lock(path, is_shared=False)
    assert os.fstat(locked).st_ino == path.stat().st_ino != replaced[0]
    assert locks.try_lock(path, is_shared=True) is None
    os.close(locked)
    os.close(locks.try_lock(path, is_shared=True))


def test_shared_locks_stand_beside_each_other(tmp_path):
    held = [locks.try_lock(tmp_path / "lock", is_shared=True) for _ in range(2)]
    assert None not in held
    assert locks.try_lock(tmp_path / "lock", is_shared=False) is None
    for one in held:
        os.close(one)


def other_lease(path, **changed):
    owner = {"host": "elsewhere", "pid": 1, "token": "other"} | changed
    path.write_text(json.dumps(owner))


def test_a_lease_is_taken_by_one(tmp_path):
    first, second = (locks.Lease(tmp_path / "owner") for _ in range(2))
    assert first.try_take()
    assert not second.try_take()
    with first.kept():
        assert not second.try_take()
    assert second.try_take()


def test_a_lease_that_nobody_touches_is_taken_after_a_minute(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path = tmp_path / "owner"
    other_lease(path)
    lease = locks.Lease(path)
    assert not lease.try_take()
    now[0] = 59.0
    assert not lease.try_take()
    os.utime(path, ns=(1, 1))  # its owner is alive
    now[0] = 61.0
    assert not lease.try_take()
    now[0] = 122.0
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert lease.try_take()


def test_a_lease_of_a_process_that_ended_here_is_taken_at_once(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "owner"
    other_lease(path, host=socket.gethostname(), pid=ended.pid)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert locks.Lease(path).try_take()
    other_lease(path, host=socket.gethostname(), pid=os.getpid())
    assert not locks.Lease(path).try_take()


def test_of_two_that_take_a_lease_at_once_the_last_one_has_it(tmp_path, monkeypatch):
    path = tmp_path / "owner"
    other_lease(path, host=socket.gethostname(), pid=2**22 + 1)
    lease = locks.Lease(path)
    third = functools.partial(other_lease, path, token="third")
    monkeypatch.setattr(time, "sleep", lambda seconds: third())
    assert not lease.try_take()


def test_a_lease_is_given_up_where_its_work_fails(tmp_path):
    lease = locks.Lease(tmp_path / "owner")
    assert lease.try_take()
    with contextlib.suppress(KeyError), lease.kept():
        raise KeyError
    assert not list(tmp_path.iterdir())
