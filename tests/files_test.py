"""A file appears whole or not at all, and nothing is left beside it."""

import os

import pytest

from tfamp.records import record

DURABLE = pytest.mark.parametrize("durable", [False, True])


@DURABLE
def test_a_file_takes_the_place_of_the_one_before(tmp_path, durable):
    path = tmp_path / "record.json"
    path.write_text("before")
    with record.whole(path, durable=durable) as beside:
        beside.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["record.json"]


@DURABLE
def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path, durable):
    path = tmp_path / "record.json"
    path.write_text("before")
    with pytest.raises(OSError, match="disk is full"):
        with record.whole(path, durable=durable) as beside:
            beside.write_text("half of it")
            raise OSError("the disk is full")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["record.json"]


def test_two_may_write_at_the_same_time(tmp_path):
    path = tmp_path / "record.json"
    with record.whole(path) as one, record.whole(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"  # the outer one ends last


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        with record.whole(tmp_path / "none" / "record.json") as beside:
            beside.write_text("text")


def test_a_durable_file_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    synced = []

    def fsync(handle):
        synced.append((os.fstat(handle).st_ino, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with record.whole(path, durable=True) as beside:
        beside.write_text("text")
        own = beside.stat().st_ino
    expected = [(own, False)]
    if hasattr(os, "O_DIRECTORY"):
        expected.append((tmp_path.stat().st_ino, True))
    assert synced == expected
