"""Files of sources: patterns, links, names, and what CSV, text and TFRecord share."""

import gzip
import os
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import RAISE, read, skip, write
from tfamp.data import Pipeline
from tfamp.data.sources import _files, tfrecord
from tfamp.data.sources._files import find_files
from tfamp.data.sources.csv import csv_source
from tfamp.data.sources.images import folder_source
from tfamp.data.sources.text import text_source
from tfamp.data.sources.tfrecord import tfrecord_source


def fill(folder, *names):
    for name in names:
        write(folder / name, "x,y\n1,2\n")
    return folder


def below(folder, paths):
    return [os.path.relpath(path, folder) for path in paths]


@pytest.mark.parametrize("name", ["run[1]", "a*b", "what?"], ids=str)
def test_signs_of_patterns_in_an_existing_folder_are_its_name(tmp_path, name):
    folder = fill(tmp_path / name, "b.csv", "a.csv", "deep/c.csv")
    fill(tmp_path, "run1/x.csv", "aXb/x.csv", "whats/x.csv")
    assert below(folder, find_files(str(folder / "*.csv"))) == ["a.csv", "b.csv"]
    found = find_files(str(folder / "*" / "*.csv"))
    assert below(folder, found) == ["deep/c.csv"]


def test_a_pattern_is_looked_for_where_the_program_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(fill(tmp_path / "run[1]", "a.csv"))
    assert below(tmp_path, find_files("*.csv")) == ["run[1]/a.csv"]


def test_folders_may_be_a_pattern(tmp_path):
    fill(tmp_path, "run1/a.csv", "run2/a.csv", "run3/a.csv")
    found = find_files(str(tmp_path / "run[12]" / "*.csv"))
    assert below(tmp_path, found) == ["run1/a.csv", "run2/a.csv"]


WRONG_PATHS = {
    "missing": ("none", "in `paths` does not exist."),
    "nearly right": ("train.cvs", "Did you mean 'FOLDER/train.csv'?"),
    "no match": ("*.none", "in `paths` matches no file; expected at least one."),
    "twice": (["train.csv", "*.csv"], "`paths` names 'FOLDER/train.csv' twice;"),
    "empty": ("empty.txt", "in `paths` has 0 bytes; expected at least one element."),
}


@pytest.mark.parametrize("paths, message", WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_wrong_paths_are_refused_at_once(tmp_path, paths, message):
    fill(tmp_path, "train.csv")
    write(tmp_path / "empty.txt", "")
    names = paths if isinstance(paths, list) else [paths]
    message = message.replace("FOLDER", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(message)):
        find_files([tmp_path / name for name in names])


def test_addresses_and_nothing_are_refused():
    with pytest.raises(ValueError, match=re.escape("`paths` is []; expected at least")):
        find_files([])
    message = "`paths` holds 'gs://bucket/train', an address; expected files on this"
    with pytest.raises(ValueError, match=re.escape(message)):
        find_files("gs://bucket/train")


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    fill(tmp_path, "cat/1.png", "cat/deep/2.png", "dog/3.png", "more/4.png")
    (tmp_path / "cat/here").symlink_to(tmp_path / "cat")
    (tmp_path / "cat/deep/up").symlink_to(tmp_path)
    (tmp_path / "dog/more").symlink_to(tmp_path / "more")
    source = folder_source(tmp_path, class_names=["cat", "dog"])
    expected = ["cat/1.png", "cat/deep/2.png", "dog/3.png", "dog/more/4.png"]
    assert below(tmp_path, source.paths) == expected
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


def records(path, numbers):
    """Writes numbers as rows, lines or records, by the ending of a path."""
    if path.suffix == ".tfrecord":
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in numbers:
                writer.write(b"%d" % number)
        return str(path)
    head = "a,b\n" if path.suffix == ".csv" else ""
    return write(path, head + "".join(f"{number},0\n" for number in numbers))


MAKERS = {".csv": csv_source, ".txt": text_source, ".tfrecord": tfrecord_source}
OTHERS = {
    "label": (".csv", {"label": "a"}),
    "dtypes": (".csv", {"dtypes": {"a": "float32"}}),
    "by": (".txt", {"by": "file"}),
    "labels": (".txt", {"labels": [1]}),
}


@pytest.mark.parametrize("ending", MAKERS)
def test_a_changed_file_changes_the_identity(tmp_path, ending):
    path = records(tmp_path / f"a{ending}", range(3))
    before = MAKERS[ending](path).identity()
    assert MAKERS[ending](path).identity() == before
    records(tmp_path / f"a{ending}", range(4))
    assert MAKERS[ending](path).identity() != before


@pytest.mark.parametrize("ending, options", OTHERS.values(), ids=OTHERS)
def test_other_arguments_change_the_identity(tmp_path, ending, options):
    path = records(tmp_path / f"a{ending}", range(3))
    make = MAKERS[ending]
    assert make([path], **options).identity() != make([path]).identity()


@pytest.mark.quick(".csv", ".tfrecord")
@pytest.mark.parametrize("ending", MAKERS)
def test_length_is_known_where_it_was_counted(tmp_path, ending, monkeypatch):
    make, path = MAKERS[ending], records(tmp_path / f"a{ending}", range(4))
    assert int(make(path).dataset(RAISE).cardinality()) == 4
    assert int(make(path).dataset(skip()).cardinality()) == -2
    assert make(path, num_examples=None).dataset(RAISE).cardinality() == -2
    assert make(path, num_examples=3).dataset(RAISE).cardinality() == 3
    monkeypatch.setattr(_files, "MAX_COUNTED_BYTES", 5)
    monkeypatch.setattr(tfrecord, "MAX_WALKED_RECORDS", 2)
    assert make(path).num_examples is None
    assert "length unknown (`num_examples`)" in make(path).explain(None)[0]
    assert make(path, num_examples="count").num_examples == 4


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_cut_gzip_file_is_an_error_that_names_it(tmp_path, ending):
    rng = np.random.default_rng(0)
    data = "a,b\n" + "".join(f"{n},{rng.bytes(200).hex()}\n" for n in range(3000))
    packed = gzip.compress(data.encode())
    path = write(tmp_path / f"a{ending}", packed[: len(packed) // 2])
    message = f"File {path!r} is damaged: its gzip stream breaks near byte"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        read(MAKERS[ending](path))


def damaged(path, count, every):
    """Writes numbers, and damages one of so many."""
    records(path, range(count))
    data = bytearray(path.read_bytes())
    if path.suffix == ".csv":
        data = "a,b\n" + "\n".join(f"{n},0" if n % every else "x" for n in range(count))
    elif path.suffix == ".txt":
        data = b"\n".join(b"a" if n % every else b"\xff" for n in range(count))
    else:
        at = 0
        for n in range(count):
            data[at + 12] ^= 0xFF if n % every == 0 else 0
            at += 16 + len(str(n))
    return write(path, bytes(data) if isinstance(data, bytearray) else data)


@pytest.mark.quick(".tfrecord")
@pytest.mark.parametrize("ending", MAKERS)
def test_beyond_the_fraction_it_stops(tmp_path, ending):
    path = damaged(tmp_path / f"a{ending}", 2000, every=50)
    source = MAKERS[ending](path, num_examples=None)
    match = "cannot be read; expected"
    with pytest.raises(tf.errors.InvalidArgumentError, match=match):
        read(source, skip(max_fraction=0.01))
    assert len(read(source, skip(max_fraction=0.03))) == 1960


@pytest.mark.quick(".csv")
@pytest.mark.parametrize("ending", MAKERS)
def test_reading_can_be_traced(tmp_path, ending):
    source = MAKERS[ending](records(tmp_path / f"a{ending}", range(4)))

    @tf.function
    def count():
        return source.dataset(RAISE).reduce(0, lambda count, _: count + 1)

    assert int(count()) == 4
