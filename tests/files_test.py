"""A file appears whole or not at all, and nothing is left beside it."""

import os

import pytest

from tfamp.records import record


def test_a_file_takes_the_place_of_the_one_before(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("before")
    with record.whole(path) as beside:
        beside.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["record.json"]


def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "record.json"
    path.write_text("before")
    with pytest.raises(OSError, match="disk is full"):
        with record.whole(path) as beside:
            beside.write_text("half of it")
            raise OSError("the disk is full")
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["record.json"]
