"""What tests of sources that read files share: files, elements, and refusals."""

import re

import numpy as np
import pytest
import tensorflow as tf


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_records(path, records, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for record in records:
            writer.write(record)
    return str(path)


def elements(pipeline):
    """Returns what a pipeline gives in a pass, as NumPy has it."""
    found = pipeline.build().as_numpy_iterator()
    return [tf.nest.map_structure(np.asarray, element) for element in found]


def careful(pipeline, share=0.5):
    """Returns a pipeline that leaves out what is damaged, its elements, and that."""
    pipeline = pipeline.on_error("skip", max_fraction=share)
    found = list(pipeline.build().as_numpy_iterator())
    return found, [(one.where, one.message) for one in pipeline.skipped]


def told(pipeline):
    """Returns what `describe` says, without its line breaks."""
    return " ".join(pipeline.describe().split())


def refused_files(begin, table, files=dict):
    """Returns a test of rows of files, maybe arguments and a kind, by their message.

    `files` makes a dict {name: content} of what a row begins with. `paths` among the
    arguments stands in the folder, which is taken without it.
    """

    @pytest.mark.parametrize("message", table, ids=table)
    def test(message, tmp_path):
        row = table[message]
        given, options, kind = (*row, *({}, ValueError)[len(row) - 1 :])
        for name, data in files(given).items():
            write(tmp_path / name, data)
        paths = tmp_path / options.get("paths", "")
        rest = {name: value for name, value in options.items() if name != "paths"}
        with pytest.raises(kind, match=re.escape(message)):
            begin(paths, **rest)

    return test
