"""Text sources: lines and files, labels, what is no UTF-8, lengths, wrong files."""

import gzip
import re

import pytest
import tensorflow as tf

from tests.file_sources import RAISE, read, refused_files, skip, skipped, write
from tfamp.data.sources import text
from tfamp.data.sources.text import text_source


def decoded(source, settings=RAISE):
    return [(found.decode(), int(label)) for found, label in read(source, settings)]


def test_lines_come_in_order_without_empty_ones(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo words\nthree: é\n")
    source = text_source(path)
    dataset = source.dataset(RAISE)
    assert dataset.element_spec == tf.TensorSpec((), tf.string)
    assert int(dataset.cardinality()) == 3
    assert read(source) == [b"one", b"two words", "three: é".encode()]
    what, why = source.explain(None)
    assert what == "text, 1 file, 3 lines"
    assert why == "checked to be UTF-8; 1 empty ones left out"


@pytest.mark.parametrize(
    "data", [b"a\n\n\nb\n", b"a\r\n\r\n\r\nb\r\n"], ids=["Unix", "Windows"]
)
def test_empty_lines_are_kept_when_told(tmp_path, data):
    source = text_source(write(tmp_path / "a.txt", data), keep_empty=True)
    assert read(source) == [b"a", b"", b"", b"b"]
    assert source.num_examples == 4


def test_an_empty_line_that_alone_is_left_of_a_block_is_kept(tmp_path):
    source = text_source(
        write(tmp_path / "a.txt", b"\n\xff\n"), keep_empty=True, num_examples=None
    )
    assert read(source, skip(1.0)) == [b""]


CHANGES = {
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "no last line end": lambda data: data[:-1],
    "gzip": gzip.compress,
    "gzip in two parts": lambda data: b"".join(
        map(gzip.compress, (data[:2], data[2:]))
    ),
    "gzip and a mark": lambda data: gzip.compress(b"\xef\xbb\xbf" + data),
}


@pytest.mark.quick("no last line end")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_files_of_other_programs(tmp_path, change):
    paths = [write(tmp_path / name, change(b"a\nb\n")) for name in ("1.txt", "2.txt")]
    paths.append(write(tmp_path / "3.txt", b"a\nb\n"))
    assert read(text_source(paths)) == 3 * [b"a", b"b"]
    for found in read(text_source(paths, by="file")):
        assert found.splitlines() == [b"a", b"b"]


def test_lines_are_whole_across_blocks(tmp_path, monkeypatch):
    lines = [f"line {n} " * (n % 7 + 1) for n in range(200)]
    path = write(tmp_path / "a.txt", "\n".join(lines))
    monkeypatch.setattr(text, "BLOCK_BYTES", 50)
    source = text_source(path)
    assert read(source) == [line.encode() for line in lines]
    assert len(list(source.chunks(RAISE))) > 20


def test_lines_of_a_class_folder_have_its_label(tmp_path):
    write(tmp_path / "pos/1.txt", "good\nfine\n")
    write(tmp_path / "pos/deep/2.txt", "great\n")
    write(tmp_path / "neg/1.txt", "bad\n")
    source = text_source(tmp_path, labels="inferred")
    expected = [("bad", 0), ("good", 1), ("fine", 1), ("great", 1)]
    assert decoded(source) == expected
    assert source.class_names == ("neg", "pos")
    assert source.dataset(RAISE).element_spec[1] == tf.TensorSpec((), tf.int32)
    turned = text_source(tmp_path, labels="inferred", class_names=["pos", "neg"])
    assert decoded(turned)[0] == ("good", 0)


def test_files_can_be_examples(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_FILES_A_CHUNK", 2)
    for name in ("a/3.txt", "a/1.txt", "b/2.txt"):
        write(tmp_path / name, f"text\nof {name}\n")
    write(tmp_path / "b/empty.txt", "")
    write(tmp_path / "b/x.txt.gz", gzip.compress(b"packed"))
    source = text_source(tmp_path, labels="inferred", by="file")
    expected = [
        (f"text\nof {name}\n", n) for name, n in (("a/1.txt", 0), ("a/3.txt", 0))
    ]
    assert decoded(source) == [*expected, ("text\nof b/2.txt\n", 1), ("packed", 1)]
    assert source.num_examples is None
    counted = text_source(tmp_path, labels="inferred", by="file", num_examples="count")
    assert (counted.num_examples, counted.num_empty) == (4, 1)
    assert int(counted.dataset(RAISE).cardinality()) == 4


def test_labels_can_be_given_for_each_file(tmp_path):
    paths = [write(tmp_path / name, f"{name}\n") for name in ("b.txt", "a.txt")]
    assert decoded(text_source(paths, labels=[3, 4])) == [("b.txt", 3), ("a.txt", 4)]
    by_name = text_source(tmp_path, labels={"b.txt": "x", "a.txt": "y"})
    assert decoded(by_name) == [("a.txt", 1), ("b.txt", 0)]


def test_a_line_that_is_no_text_costs_itself(tmp_path):
    write(tmp_path / "a.txt", b"one\ntwo\n")
    path = write(tmp_path / "b.txt", b"three\n\nfo\xffr\nfive\n\xc3\n")
    settings = skip(0.9)
    assert read(text_source(tmp_path), settings) == [b"one", b"two", b"three", b"five"]
    assert skipped(settings) == [
        (f"{path}, line 3", "byte 0xff at column 3 is no UTF-8"),
        (f"{path}, line 5", "byte 0xc3 at column 1 is no UTF-8"),
    ]


def test_a_line_that_is_no_text_is_named_where_it_is_not_skipped(tmp_path):
    path = write(tmp_path / "a.txt", b"one\nt\xe9o\n")
    dataset = text_source(path).dataset(RAISE)
    message = f"{path}, line 2: byte 0xe9 at column 2 is no UTF-8."
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        list(dataset)


def test_a_file_that_is_no_text_costs_itself(tmp_path):
    write(tmp_path / "a.txt", "one")
    path = write(tmp_path / "b.txt", b"line\nt\xe9o\n\xe9\n")
    settings = skip(0.9)
    assert read(text_source(tmp_path, by="file"), settings) == [b"one"]
    ((where, _),) = skipped(settings)
    assert where == f"{path}, line 2"


A = {"a.txt": "a"}
REFUSED = {
    "holds no texts; expected at least": ({"x/a": "a"},),
    "The 1 files in `paths` hold no text; expected at least one line that is not": (
        *({"a.txt": "\n\n"}, {"paths": "a.txt"}),
    ),
    "is with zero bytes; expected text": ({"a.txt": b"a\0b"},),
    "Unknown `by` 'word'; expected 'line' or 'file'.": (A, {"by": "word"}),
    "`labels` has 2 entries for 1 files; expected as many.": (A, {"labels": [1, 2]}),
    "no folder, and `class_names` or a dict of `labels` came with it;": (
        *(A, {"paths": "a.txt", "labels": {"a.txt": 1}}),
    ),
    "has no class folders: it has files such as 'a.txt'.": (A, {"labels": "inferred"}),
}

test_wrong_files_and_arguments_are_refused_at_once = refused_files(text_source, REFUSED)
