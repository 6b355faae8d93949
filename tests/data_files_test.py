"""Files of sources: patterns, links, names, and what CSV, text and TFRecord share."""

import gzip
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, write
from tfamp.data import Pipeline


def fill(folder, *names):
    for name in names:
        write(folder / name, f"{name}\n")
    return folder


def lines(paths):
    return [line.item().decode() for line in elements(Pipeline.from_text(paths))]


@pytest.mark.parametrize("name", ["run[1]", "a*b", "what?"], ids=str)
def test_signs_of_patterns_in_an_existing_folder_are_its_name(tmp_path, name):
    folder = fill(tmp_path / name, "b.txt", "a.txt", "deep/c.txt")
    fill(tmp_path, "run1/x.txt", "aXb/x.txt", "whats/x.txt")
    assert lines(str(folder / "*.txt")) == ["a.txt", "b.txt"]
    assert lines(str(folder / "*" / "*.txt")) == ["deep/c.txt"]


WRONG_PATHS = {
    "missing": ("none", "in `paths` is no file that ends in .txt"),
    "nearly right": ("train.tx", "Did you mean 'FOLDER/train.txt'?"),
    "no match": ("*.none", "FOLDER' has 'empty.md' and 'train.txt'."),
    "twice": (["train.txt", "t*.txt"], "`paths` names 'FOLDER/train.txt' twice;"),
    "empty": ("empty.md", "in `paths` has 0 bytes; expected at least one element."),
}


@pytest.mark.parametrize("paths, message", WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_wrong_paths_are_refused_at_once(tmp_path, paths, message):
    fill(tmp_path, "train.txt")
    write(tmp_path / "empty.md", "")
    names = paths if isinstance(paths, list) else [paths]
    message = message.replace("FOLDER", str(tmp_path))
    with pytest.raises(ValueError, match=re.escape(message)):
        Pipeline.from_text([tmp_path / name for name in names])
    with pytest.raises(ValueError, match=re.escape("`paths` is []; expected at least")):
        Pipeline.from_text([])


def records(path, numbers):
    """Writes numbers as rows, lines or records, by the ending of a path."""
    if path.suffix == ".tfrecord":
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in numbers:
                writer.write(b"%d" % number)
        return str(path)
    head = "a,b\n" if path.suffix == ".csv" else ""
    return write(path, head + "".join(f"{number},0\n" for number in numbers))


MAKERS = {
    ".csv": Pipeline.from_csv,
    ".txt": Pipeline.from_text,
    ".tfrecord": Pipeline.from_tfrecord,
}


def num_caches(folder):
    return sum(path.is_dir() for path in folder.iterdir())


@pytest.mark.parametrize("ending", MAKERS)
def test_a_changed_file_has_another_cache(tmp_path, ending):
    for numbers, expected in ((3, 1), (3, 1), (4, 2)):
        if numbers == 4 or not num_caches(tmp_path):
            path = records(tmp_path / f"a{ending}", range(numbers))
        cached = MAKERS[ending](path).cache(tmp_path / "cache", unseen="error").build()
        assert len(list(cached)) == numbers
        assert num_caches(tmp_path) == expected


@pytest.mark.parametrize("ending", [".csv", ".txt"])
def test_a_cut_gzip_file_is_an_error_that_names_it(tmp_path, ending):
    rng = np.random.default_rng(0)
    data = "a,b\n" + "".join(f"{n},{rng.bytes(200).hex()}\n" for n in range(3000))
    packed = gzip.compress(data.encode())
    path = write(tmp_path / f"a{ending}", packed[: len(packed) // 2])
    message = f"File {path!r} is damaged: "
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        elements(MAKERS[ending](path))


def test_a_line_that_is_no_text_costs_itself(tmp_path):
    write(tmp_path / "a.txt", "one\n\ntwo: é\n")
    path = write(tmp_path / "b.txt", b"three\n\nfo\xffr\nfive\n\xc3\n")
    found, skipped = careful(Pipeline.from_text(tmp_path), 0.9)
    assert found == [b"one", "two: é".encode(), b"three", b"five"]
    assert skipped == [
        (f"{path}, line 3", "byte 0xff at column 3 is no UTF-8"),
        (f"{path}, line 5", "byte 0xc3 at column 1 is no UTF-8"),
    ]
    message = f"{path}, line 3: byte 0xff at column 3 is no UTF-8."
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        elements(Pipeline.from_text(tmp_path))


CHANGES = {
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "no last line end": lambda data: data[:-1],
    "gzip in two parts": lambda data: b"".join(
        map(gzip.compress, (data[:2], data[2:]))
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lines_are_those_of_files_of_other_programs(tmp_path, change):
    paths = [write(tmp_path / name, change(b"a\nb\n")) for name in ("1.txt", "2.txt")]
    paths.append(write(tmp_path / "3.txt", b"a\nb\n"))
    assert elements(Pipeline.from_text(paths)) == 3 * [b"a", b"b"]
