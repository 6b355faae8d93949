"""TFRecord sources: parsing, order, lengths, damage of every kind, wrong files."""

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, refused_files, told
from tfamp.data import Pipeline

FEATURES = {
    "x": tf.io.FixedLenFeature((2,), tf.float32),
    "y": tf.io.FixedLenFeature((), tf.int64),
}
begin = Pipeline.from_tfrecord


def example(number, with_y=True):
    made = tf.train.Example()
    made.features.feature["x"].float_list.value.extend([number, -number])
    if with_y:
        made.features.feature["y"].int64_list.value.append(number)
    return made.SerializeToString()


def write(path, records, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def fixed(count):
    """Records of 20 bytes each, so that frame n begins at byte 36 n."""
    return [f"record {number:013d}".encode() for number in range(count)]


def change(path, *places):
    data = bytearray(Path(path).read_bytes())
    for place in places:
        data[place] ^= 0xFF
    Path(path).write_bytes(bytes(data))


def labels(found):
    return [int(element["y"]) for element in found]


RAGGED = {"x": tf.io.RaggedFeature(tf.float32), "y": tf.io.VarLenFeature(tf.int64)}


@pytest.mark.parametrize("features", [FEATURES, RAGGED], ids=["fixed", "ragged"])
def test_features_are_parsed(tmp_path, features):
    path = write(tmp_path / "a", [example(n) for n in range(3)])
    dataset = begin(path, features=features).build()
    assert int(dataset.cardinality()) == 3
    found = [tf.nest.flatten(e, expand_composites=True) for e in dataset]
    assert [e[0].numpy().tolist() for e in found] == [[0, 0], [1, -1], [2, -2]]
    # Of a sparse feature the values stand between places and shape.
    y = 1 if features is FEATURES else 2
    assert [np.ravel(e[y]).tolist() for e in found] == [[0], [1], [2]]


def test_order_does_not_depend_on_threads_or_on_skipping(tmp_path):
    for file in range(6):  # more than a chunk of 1 MiB each
        numbers = (b"%d-%d" % (file, n) for n in range(30 if file == 2 else 20))
        write(tmp_path / f"part-{file}", [n.ljust(100_000) for n in numbers])
    pipeline = begin(tmp_path).map(lambda record: tf.strings.strip(record))
    orders = [
        list(pipeline.build(autotune=a).as_numpy_iterator()) for a in (False, True)
    ]
    assert orders[0] == orders[1] == careful(begin(tmp_path).map(tf.strings.strip))[0]
    assert len(orders[0]) == 130
    assert orders[0][10][:1] == b"1", "four files by turns"


@pytest.mark.parametrize("is_careful", [False, True], ids=["raise", "skip"])
def test_compressed_files_are_told_by_their_bytes(tmp_path, is_careful):
    write(tmp_path / "a", [example(0)])
    write(tmp_path / "b", [example(1), example(2)], "GZIP")
    pipeline = begin(tmp_path, features=FEATURES)
    found = careful(pipeline)[0] if is_careful else elements(pipeline)
    assert labels(found) == [0, 1, 2]
    counted = begin(tmp_path, num_examples="count")
    assert int(counted.build().cardinality()) == 3
    assert "2 files, 3 records, GZIP" in told(counted)


def test_a_plain_file_that_looks_packed_is_read(tmp_path):
    # Its first length, 35,615, is the mark of gzip in its first two bytes.
    record = b"a" * 0x8B1F
    assert elements(begin(write(tmp_path / "a", [record]))) == [record]


def test_stock_skipping_loses_the_rest_and_ours_one_record(tmp_path):
    path = write(tmp_path / "a", fixed(1000))
    change(path, 36 * 500 + 12)  # the first byte of record 500
    stock = tf.data.TFRecordDataset(path).ignore_errors(log_warning=False)
    assert len(list(stock)) == 500
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at"):
        elements(begin(path))
    found, skipped = careful(begin(path))
    assert found == fixed(1000)[:500] + fixed(1000)[501:]
    message = "its bytes do not fit their checksum"
    assert skipped == [(f"{path}, record 500 at byte 18000", message)]


def test_behind_a_damaged_length_the_rest_of_that_file_is_left_out_and_said(tmp_path):
    path = write(tmp_path / "a", fixed(20))
    write(tmp_path / "b", fixed(3))
    change(path, 36 * 7, 36 * 3 + 20)  # a length, and a record before it
    found, skipped = careful(begin(tmp_path))
    assert found == [r for n, r in enumerate(fixed(7)) if n != 3] + fixed(3)
    assert [where for where, _ in skipped] == [
        f"{path}, record 3 at byte 108",
        f"{path}, record 7 at byte 252",
    ]
    assert "the rest of the file cannot be read" in skipped[1][1]


@pytest.mark.parametrize("left", [5, 30], ids=["in its header", "in its payload"])
def test_a_cut_file_is_an_error_and_costs_its_last_record(tmp_path, left):
    path = write(tmp_path / "a", fixed(3))
    with open(path, "r+b") as file:
        file.truncate(72 + left)
    message = f"File {path!r} is cut off or damaged: record 2 at byte 72 does not end"
    with pytest.raises(ValueError, match=re.escape(message)):
        begin(path).build()
    found, skipped = careful(begin(path))
    assert found == fixed(2)
    assert skipped[0][1].startswith("cut off after")


def test_a_broken_gzip_stream_is_an_error_that_names_the_file(tmp_path):
    data = [np.random.default_rng(n).bytes(500) for n in range(400)]
    packed = gzip.compress(Path(write(tmp_path / "plain", data)).read_bytes())
    path = tmp_path / "packed"
    path.write_bytes(packed[: len(packed) // 2])
    message = f"File '{path}' is damaged: its gzip stream breaks near byte"
    with pytest.raises(tf.errors.InvalidArgumentError, match=re.escape(message)):
        careful(begin(path))


def test_records_that_do_not_fit_the_features_are_skipped_one_by_one(tmp_path):
    records = [example(n) for n in range(20)]
    # TensorFlow's own error for the first is no UTF-8, so not even an error of its.
    records[5], records[9] = b"\xff\xfe\xfd", example(9, with_y=False)
    path = write(tmp_path / "a", records)
    change(path, 12)  # and one that is damaged, before both
    found, skipped = careful(begin(path, features=FEATURES))
    assert labels(found) == [n for n in range(20) if n not in (0, 5, 9)]
    places = [f"{path}, record {n}" for n in ("0 at byte 0", 5, 9)]
    assert [where for where, _ in skipped] == places
    assert "holds bytes that are no text" in skipped[1][1]
    assert "Feature: y (data type: int64) is required" in skipped[2][1]


def test_a_record_that_does_not_fit_is_named_where_it_is_not_skipped(tmp_path):
    records = [example(n) for n in range(20)]
    records[9] = example(9, with_y=False)
    path = write(tmp_path / "a", records)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"Name: {path}, record 9, "
    ):
        elements(begin(path, features=FEATURES))


REFUSED = {
    "in `paths` is no TFRecord file: it begins with no record.": (
        {"a": "hello " * 50},
    ),
    "`features` is ['x']; expected a dict {name: feature}.": (
        *({"a": "hello " * 50}, {"features": ["x"]}, TypeError),
    ),
}
test_wrong_files_and_arguments_are_refused_at_once = refused_files(begin, REFUSED)
