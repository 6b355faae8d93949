"""TFRecord sources: parsing, order, lengths, damage of every kind, wrong files."""

import gzip
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import RAISE, read, refused_files, skip, skipped
from tfamp.data.sources import _frames
from tfamp.data.sources.tfrecord import tfrecord_source
from tfamp.data.stages import Settings

FEATURES = {
    "x": tf.io.FixedLenFeature((2,), tf.float32),
    "y": tf.io.FixedLenFeature((), tf.int64),
}
FRAME = 16


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


def labels(source, settings=RAISE):
    return [int(element["y"]) for element in source.dataset(settings)]


RAGGED = {"x": tf.io.RaggedFeature(tf.float32), "y": tf.io.VarLenFeature(tf.int64)}


@pytest.mark.parametrize("features", [FEATURES, RAGGED], ids=["fixed", "ragged"])
def test_features_are_parsed(tmp_path, features):
    path = write(tmp_path / "a", [example(n) for n in range(3)])
    dataset = tfrecord_source(path, features=features).dataset(RAISE)
    found = [tf.nest.flatten(e, expand_composites=True) for e in dataset]
    assert [e[0].numpy().tolist() for e in found] == [[0, 0], [1, -1], [2, -2]]
    # Of a sparse feature the values stand between places and shape.
    y = 1 if features is FEATURES else 2
    assert [np.ravel(e[y]).tolist() for e in found] == [[0], [1], [2]]


@pytest.mark.quick("raise")
@pytest.mark.parametrize("settings", [RAISE, skip()], ids=["raise", "skip"])
def test_files_come_by_turns_in_the_same_order_each_time(tmp_path, settings):
    for file in range(6):
        write(tmp_path / f"part-{file}", [b"%d%d" % (file, n) for n in range(3)])
    source = tfrecord_source(tmp_path)
    # One chunk holds a file here, so files follow one another.
    expected = [b"%d%d" % (file, n) for file in range(6) for n in range(3)]
    assert read(source, settings) == expected
    assert read(source, settings) == expected


def test_order_does_not_depend_on_threads_or_on_skipping(tmp_path):
    for file in range(6):
        count = 60 if file == 2 else 20
        write(tmp_path / f"part-{file}", [b"%d-%d" % (file, n) for n in range(count)])
    source = tfrecord_source(tmp_path)
    source = type(source)(**{**vars(source), "chunk_size": 6})
    orders = [
        read(source, Settings(threads, autotune))
        for threads, autotune in ((1, False), (4, False), (2, True))
    ]
    assert orders[0] == orders[1] == orders[2] == read(source, skip())
    assert len(orders[0]) == 160
    assert orders[0][6] == b"1-0"


@pytest.mark.quick("raise-ZLIB")
@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
@pytest.mark.parametrize("settings", [RAISE, skip()], ids=["raise", "skip"])
def test_compressed_files_are_told_by_their_bytes(tmp_path, compression, settings):
    write(tmp_path / "a", [example(0)])
    write(tmp_path / "b", [example(1), example(2)], compression)
    source = tfrecord_source(tmp_path, features=FEATURES)
    assert source.compressions == ("", compression)
    assert source.num_examples is None
    assert labels(source, settings) == [0, 1, 2]
    counted = tfrecord_source(tmp_path, num_examples="count")
    assert int(counted.dataset(RAISE).cardinality()) == 3


def test_a_plain_file_that_looks_packed_is_read(tmp_path):
    # Its first length, 35,615, is the mark of gzip in its first two bytes.
    record = b"a" * 0x8B1F
    source = tfrecord_source(write(tmp_path / "a", [record]))
    assert source.compressions == ("",)
    assert read(source) == [record]


def test_stock_skipping_loses_the_rest_and_ours_one_record(tmp_path):
    path = write(tmp_path / "a", fixed(1000))
    change(path, 36 * 500 + 12)  # the first byte of record 500
    stock = tf.data.TFRecordDataset(path).ignore_errors(log_warning=False)
    assert len(list(stock)) == 500
    with pytest.raises(tf.errors.DataLossError, match="corrupted record at"):
        read(tfrecord_source(path))
    settings = skip()
    found = read(tfrecord_source(path), settings)
    assert found == fixed(1000)[:500] + fixed(1000)[501:]
    message = "its bytes do not fit their checksum"
    assert skipped(settings) == [(f"{path}, record 500 at byte 18000", message)]


def test_behind_a_damaged_length_the_rest_of_that_file_is_left_out_and_said(tmp_path):
    path = write(tmp_path / "a", fixed(20))
    write(tmp_path / "b", fixed(3))
    change(path, 36 * 7, 36 * 3 + 20)  # a length, and a record before it
    settings = skip()
    kept = [r for n, r in enumerate(fixed(7)) if n != 3] + fixed(3)
    assert read(tfrecord_source(tmp_path), settings) == kept
    assert skipped(settings) == [
        (f"{path}, record 3 at byte 108", "its bytes do not fit their checksum"),
        (
            f"{path}, record 7 at byte 252",
            "its length is damaged, so the last 468 bytes of the file cannot be read",
        ),
    ]


@pytest.mark.parametrize("left", [5, 30], ids=["in its header", "in its payload"])
def test_a_cut_file_is_an_error_when_it_is_built(tmp_path, left):
    path = write(tmp_path / "a", fixed(3))
    with open(path, "r+b") as file:
        file.truncate(72 + left)
    source = tfrecord_source(path)
    message = f"File {path!r} is cut off or damaged: record 2 at byte 72 does not end"
    with pytest.raises(ValueError, match=re.escape(message)):
        source.dataset(RAISE)
    settings = skip()
    assert read(source, settings) == fixed(2)
    assert skipped(settings)[0][1].startswith("cut off after")


def test_damage_in_a_packed_file_costs_one_record(tmp_path):
    plain = write(tmp_path / "plain", fixed(20))
    change(plain, 36 * 5 + 15)
    path = tmp_path / "packed"
    path.write_bytes(gzip.compress(Path(plain).read_bytes()))
    settings = skip()
    assert read(tfrecord_source(path), settings) == fixed(20)[:5] + fixed(20)[6:]
    ((where, _),) = skipped(settings)
    assert where == f"{path}, record 5 at byte 180 of the unpacked file"


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["GZIP", "ZLIB"])
def test_a_broken_stream_ends_in_an_error_that_says_how_much_is_lost(tmp_path, pack):
    plain = write(
        tmp_path / "plain", [np.random.default_rng(n).bytes(500) for n in range(400)]
    )
    packed = pack(Path(plain).read_bytes())
    path = tmp_path / "packed"
    path.write_bytes(packed[: len(packed) // 2])
    dataset = tfrecord_source(path).dataset(skip())
    message = f"{path}: the {'GZIP' if pack is gzip.compress else 'ZLIB'} stream breaks"
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        list(dataset)
    text = str(caught.value)
    assert message in text
    read_so_far = int(re.search(r"after ([\d,]+) records", text)[1])
    assert 150 < read_so_far < 201


def test_records_that_do_not_fit_the_features_are_skipped_one_by_one(tmp_path):
    records = [example(n) for n in range(20)]
    # TensorFlow's own error for the first is no UTF-8, so not even an error of its.
    records[5], records[9] = b"\xff\xfe\xfd", example(9, with_y=False)
    path = write(tmp_path / "a", records)
    settings = skip()
    source = tfrecord_source(path, features=FEATURES)
    assert labels(source, settings) == [n for n in range(20) if n not in (5, 9)]
    first, (where, message) = skipped(settings)
    told = "cannot be parsed, and holds bytes that are no text"
    assert first == (f"{path}, record 5", told)
    assert where == f"{path}, record 9"
    assert "Feature: y (data type: int64) is required" in message


def test_a_record_that_does_not_fit_is_named_where_it_is_not_skipped(tmp_path):
    records = [example(n) for n in range(20)]
    records[9] = example(9, with_y=False)
    path = write(tmp_path / "a", records)
    dataset = tfrecord_source(path, features=FEATURES).dataset(RAISE)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"Name: {path}, record 9, "
    ):
        list(dataset)


def test_numbers_go_on_behind_damage(tmp_path):
    records = [example(n) for n in range(20)]
    records[9] = b"no example"
    path = write(tmp_path / "a", records)
    change(path, 12)
    settings = skip()
    source = tfrecord_source(path, features=FEATURES)
    assert labels(source, settings) == [n for n in range(20) if n not in (0, 9)]
    places = [where for where, _ in skipped(settings)]
    assert places == [f"{path}, record 0 at byte 0", f"{path}, record 9"]


def test_without_skipping_no_python_runs(tmp_path):
    path = write(tmp_path / "a", [example(n) for n in range(5)])
    source = tfrecord_source(path, features=FEATURES)
    assert b"PyFunc" not in source.dataset(RAISE)._as_serialized_graph().numpy()
    assert b"PyFunc" in source.dataset(skip())._as_serialized_graph().numpy()


A = {"a": "hello " * 50}
REFUSED = {
    "in `paths` is no TFRecord file: it begins with no record.": (A,),
    "Unknown `compression` 'gz'; expected 'auto', 'GZIP' or 'ZLIB'.": (
        *(A, {"compression": "gz"}),
    ),
    "`features` is ['x']; expected a dict {name: feature}.": (
        *(A, {"features": ["x"]}, TypeError),
    ),
}

test_wrong_files_and_arguments_are_refused_at_once = refused_files(
    tfrecord_source, REFUSED
)


@pytest.mark.parametrize(
    "record, told",
    [
        (example(1), "; the first record has 'x' and 'y'. Expected"),
        (b"\xff", "holds bytes that are no text; the first record is no tf.train.Exam"),
    ],
    ids=["other names", "garbage"],
)
def test_features_that_no_record_has_are_refused_at_once(tmp_path, record, told):
    path = write(tmp_path / "a", 5 * [record])
    features = {"z": tf.io.FixedLenFeature((), tf.float32)}
    message = f"The records of {path!r} do not fit `features` 'z': "
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        tfrecord_source(path, features=features)
    assert told in str(caught.value)


def test_the_source_explains_itself(tmp_path):
    write(tmp_path / "a", fixed(3))
    write(tmp_path / "b", fixed(4), "GZIP")
    what, why = tfrecord_source(tmp_path, num_examples=7).explain(None)
    assert what == "TFRecord, 2 files, GZIP, 7 records"
    assert why.startswith("2 files by turns, read by ")


def test_frames_hold_what_tensorflow_wrote(tmp_path):
    lengths = np.random.default_rng(1).integers(0, 3000, 200)
    records = [np.random.default_rng(n).bytes(n) for n in lengths]
    path = write(tmp_path / "a", records)
    frames = list(_frames.read_frames(path))
    assert [frame.payload for frame in frames] == records
    offsets = np.cumsum([0, *(lengths + FRAME)])[:-1]
    assert [frame.offset for frame in frames] == offsets.tolist()
