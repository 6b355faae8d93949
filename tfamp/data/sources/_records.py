r"""Reads lines and records of text files in TensorFlow alone.

The workers of a data service are other processes, which have none of this one's Python.
They read line by line, at half the speed, and a "\r" inside of a line is lost there.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfamp.data.sources._blocks import BYTE_ORDER_MARK, MAX_RECORD_BYTES, is_gzip


def compressions(paths: Sequence[str]) -> list[str]:
    """Returns how each file is compressed, as `tf.data` names it."""
    return ["GZIP" if is_gzip(path) else "" for path in paths]


def read_whole(path: tf.Tensor, compression: tf.Tensor) -> tf.Tensor:
    """Returns the text of a file, without a byte order mark."""
    data = tf.io.read_file(path)
    data = tf.cond(
        compression == "GZIP",
        lambda: tf.io.decode_compressed(data, "GZIP"),
        lambda: data,
    )
    return _without_mark(data)


def read_lines(
    path: tf.Tensor, compression: tf.Tensor, *, num_skipped: int = 0
) -> tf.data.Dataset:
    """Returns the lines of a file, without a byte order mark.

    Args:
        path: The file.
        compression: "GZIP" or "".
        num_skipped: Lines to leave out at the beginning.
    """
    lines = tf.data.TextLineDataset(path, compression_type=compression)
    if num_skipped:
        return lines.skip(num_skipped)
    return lines.take(1).map(_without_mark).concatenate(lines.skip(1))


def read_records(
    path: tf.Tensor, compression: tf.Tensor, *, num_skipped: int, num_lines: int
) -> tf.data.Dataset:
    """Returns vectors of the records of a CSV file, whose quotes may hold line ends.

    Args:
        path: The file.
        compression: "GZIP" or "".
        num_skipped: Lines to leave out at the beginning.
        num_lines: Lines to look at in one call.
    """
    lines = read_lines(path, compression, num_skipped=num_skipped).batch(num_lines)
    end = tf.data.Dataset.from_tensors((tf.constant([], tf.string), True))
    ended = lines.map(lambda some: (some, False)).concatenate(end)
    records = ended.scan(tf.constant(""), lambda rest, found: _joined(rest, *found))
    return records.filter(lambda some: tf.size(some) > 0)


def _joined(
    rest: tf.Tensor, lines: tf.Tensor, is_end: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the record that stays open behind some lines, and those that end there.

    Args:
        rest: The record that was open before, "" for none.
        lines: Those that follow.
        is_end: Whether the file ends behind them.
    """
    lines = tf.concat([tf.fill([tf.cast(rest != "", tf.int32)], rest), lines], 0)
    quotes = tf.strings.regex_replace(lines, '[^"]', "")
    is_odd = tf.cast(tf.strings.length(quotes) % 2, tf.int32)
    inside = tf.cumsum(is_odd) % 2
    # A line begins a record where the one before it ended outside of quotes.
    begins = 1 - tf.concat([[0], inside], 0)[:-1]
    records = tf.strings.unsorted_segment_join(
        lines, tf.cumsum(begins) - 1, tf.reduce_sum(begins), separator="\n"
    )
    stays = tf.concat([[0], inside], 0)[-1] == 1
    whole = tf.cond(stays, lambda: records[:-1], lambda: records)
    last = tf.strings.reduce_join(
        tf.cond(stays, lambda: records[-1:], lambda: records[:0])
    )
    # A quote that is never closed costs its own line, as where Python reads.
    is_stray = stays & (is_end | (tf.strings.length(last) > MAX_RECORD_BYTES))
    found = tf.cond(
        is_stray,
        lambda: tf.concat([whole, tf.strings.split(last, "\n")], 0),
        lambda: whole,
    )
    return tf.where(is_stray, "", last), found


def _without_mark(text: tf.Tensor) -> tf.Tensor:
    """Returns a text without a byte order mark."""
    size = len(BYTE_ORDER_MARK)
    return tf.cond(
        tf.strings.substr(text, 0, size) == BYTE_ORDER_MARK,
        lambda: tf.strings.substr(text, size, tf.strings.length(text)),
        lambda: text,
    )
