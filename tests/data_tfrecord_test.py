"""TFRecord sources: parsing, order, lengths, damage of every kind, wrong files."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.file_sources import careful, elements, told, write_records
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


def labels(found):
    return [int(element["y"]) for element in found]


RAGGED = {"x": tf.io.RaggedFeature(tf.float32), "y": tf.io.VarLenFeature(tf.int64)}


@pytest.mark.parametrize("features", [FEATURES, RAGGED], ids=["fixed", "ragged"])
def test_features_are_parsed(tmp_path, features):
    path = write_records(tmp_path / "a", [example(n) for n in range(3)])
    dataset = begin(path, features=features).build()
    assert int(dataset.cardinality()) == 3
    found = [tf.nest.flatten(e, expand_composites=True) for e in dataset]
    assert [e[0].numpy().tolist() for e in found] == [[0, 0], [1, -1], [2, -2]]
    # Of a sparse feature the values stand between places and shape.
    y = 1 if features is FEATURES else 2
    assert [np.ravel(e[y]).tolist() for e in found] == [[0], [1], [2]]


DAMAGE = {
    "a byte of a record": (
        lambda data: data[:20] + bytes([255 - data[20]]) + data[21:],
        tf.errors.InvalidArgumentError,
    ),
    "a length": (
        lambda data: bytes([255 - data[0]]) + data[1:],
        ValueError,
    ),
    "cut in a record": (lambda data: data[:-5], ValueError),
    "cut in a header": (lambda data: data + b"\1\2", ValueError),
}


@pytest.mark.quick("parsed-a byte of a record", "parsed-cut in a header")
@pytest.mark.parametrize("damage, kind", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("features", [None, FEATURES], ids=["strings", "parsed"])
def test_a_damaged_file_is_an_error_or_left_out_whole(tmp_path, features, damage, kind):
    for name in "abc":
        path = write_records(tmp_path / name, [example(n) for n in range(4)])
    pipeline = begin(tmp_path, features=features)
    assert len(elements(pipeline)) == 12
    data = Path(path).read_bytes()
    size = len(data) // 4
    # The third of four records, or the end.
    changed = data[: 2 * size] + damage(data[2 * size :])
    Path(path).write_bytes(changed)
    with pytest.raises(kind, match=f"{re.escape(path)}.*record [234] at byte"):
        elements(begin(tmp_path, features=features))
    found, skipped = careful(begin(tmp_path, features=features))
    assert len(found) == 8
    assert [where for where, _ in skipped] == [path]
    with pytest.raises(ValueError, match=re.escape("1 of 3 files cannot be read; exp")):
        careful(begin(tmp_path, features=features), 0.3)


def test_compressed_files_are_told_by_their_bytes(tmp_path):
    write_records(tmp_path / "a", [example(0)])
    path = write_records(tmp_path / "b", [example(1), example(2)], "GZIP")
    pipeline = begin(tmp_path, features=FEATURES)
    assert labels(elements(pipeline)) == labels(careful(pipeline)[0]) == [0, 1, 2]
    assert "2 files, length unknown, GZIP" in told(pipeline)
    packed = Path(path).read_bytes()
    Path(path).write_bytes(packed[: len(packed) // 2])
    assert labels(careful(pipeline)[0]) == [0]


def test_what_is_no_tfrecord_is_refused_at_once(tmp_path):
    (tmp_path / "a").write_text("hello " * 50)
    with pytest.raises(ValueError, match="begins with no record, or a damaged"):
        begin(tmp_path / "a")
