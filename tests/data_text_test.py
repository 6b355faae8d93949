"""Text sources: lines, what is no UTF-8, lengths, wrong files."""

import gzip
import re

import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, refused_files, told, write
from tfamp.data import Pipeline


def test_lines_come_in_order_without_empty_ones(tmp_path):
    path = write(tmp_path / "a.txt", "one\n\ntwo words\nthree: é\n")
    pipeline = Pipeline.from_text(path)
    dataset = pipeline.build()
    assert dataset.element_spec == tf.TensorSpec((), tf.string)
    assert int(dataset.cardinality()) == 3
    assert elements(pipeline) == [b"one", b"two words", "three: é".encode()]
    assert "text, 1 file, 3 lines" in told(pipeline)


CHANGES = {
    "byte order mark": lambda data: b"\xef\xbb\xbf" + data,
    "Windows": lambda data: data.replace(b"\n", b"\r\n"),
    "no last line end": lambda data: data[:-1],
    "gzip in two parts": lambda data: b"".join(
        map(gzip.compress, (data[:2], data[2:]))
    ),
}


@pytest.mark.quick("no last line end")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_files_of_other_programs(tmp_path, change):
    paths = [write(tmp_path / name, change(b"a\nb\n")) for name in ("1.txt", "2.txt")]
    paths.append(write(tmp_path / "3.txt", b"a\nb\n"))
    assert elements(Pipeline.from_text(paths)) == 3 * [b"a", b"b"]


def test_a_line_that_is_no_text_costs_itself(tmp_path):
    write(tmp_path / "a.txt", b"one\ntwo\n")
    path = write(tmp_path / "b.txt", b"three\n\nfo\xffr\nfive\n\xc3\n")
    found, skipped = careful(Pipeline.from_text(tmp_path), 0.9)
    assert found == [b"one", b"two", b"three", b"five"]
    assert skipped == [
        (f"{path}, line 3", "byte 0xff at column 3 is no UTF-8"),
        (f"{path}, line 5", "byte 0xc3 at column 1 is no UTF-8"),
    ]
    message = f"{path}, line 3: byte 0xff at column 3 is no UTF-8."
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        elements(Pipeline.from_text(tmp_path))


REFUSED = {
    "is no file that ends in .txt, .text, .md or": ({"x/a": "a"},),
    "The 1 files in `paths` hold no text; expected at least one line that is not": (
        *({"a.txt": "\n\n"}, {"paths": "a.txt"}),
    ),
}

test_wrong_files_and_arguments_are_refused_at_once = refused_files(
    Pipeline.from_text, REFUSED
)
