"""Finding the files of a source: patterns, links in a circle, names in no UTF-8."""

import os
import re

import pytest

from tfamp.data import Pipeline
from tfamp.data.sources._files import find_files
from tfamp.data.sources.images import folder_source


def write(folder, *names, data="x,y\n1,2\n"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(data)
    return folder


def below(folder, paths):
    return [os.path.relpath(path, folder) for path in paths]


@pytest.mark.parametrize("name", ["run[1]", "a*b", "what?"], ids=str)
def test_signs_of_patterns_in_an_existing_folder_are_its_name(tmp_path, name):
    folder = write(tmp_path / name, "b.csv", "a.csv", "deep/c.csv")
    write(tmp_path, "run1/x.csv", "aXb/x.csv", "whats/x.csv")
    assert below(folder, find_files(str(folder / "*.csv"))) == ["a.csv", "b.csv"]
    found = find_files(str(folder / "*" / "*.csv"))
    assert below(folder, found) == ["deep/c.csv"]


def test_a_pattern_is_looked_for_where_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path / "run[1]", "a.csv"))
    assert below(tmp_path, find_files("*.csv")) == ["run[1]/a.csv"]


def test_folders_may_be_a_pattern(tmp_path):
    write(tmp_path, "run1/a.csv", "run2/a.csv", "run3/a.csv")
    found = find_files(str(tmp_path / "run[12]" / "*.csv"))
    assert below(tmp_path, found) == ["run1/a.csv", "run2/a.csv"]


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    write(tmp_path, "cat/1.png", "cat/deep/2.png", "dog/3.png", "more/4.png")
    (tmp_path / "cat/here").symlink_to(tmp_path / "cat")
    (tmp_path / "cat/deep/up").symlink_to(tmp_path)
    (tmp_path / "dog/more").symlink_to(tmp_path / "more")
    source = folder_source(tmp_path, class_names=["cat", "dog"])
    assert below(tmp_path, source.paths) == [
        "cat/1.png",
        "cat/deep/2.png",
        *("dog/3.png", "dog/more/4.png"),
    ]
    assert "2 links to a folder above" in source.explain(None)[1]


NOT_UTF_8 = os.fsdecode(b"caf\xe9.txt")


@pytest.mark.parametrize("begin", [Pipeline.from_images, Pipeline.from_text], ids=str)
def test_a_name_that_is_no_utf_8_is_told(tmp_path, begin):
    name = os.path.join(tmp_path, NOT_UTF_8)
    try:
        with open(name, "w") as file:
            file.write("text\n")
    except OSError:
        pytest.skip("this file system takes no such names")
    message = f"File {name!r} has a name that is not UTF-8; expected one that is."
    with pytest.raises(ValueError, match=re.escape(message)):
        begin(tmp_path, labels=None, extensions=[".txt"])
