"""What sources do about data that they cannot read: name it, then raise or go on."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfamp.data._errors import OnError


def report(
    on_error: OnError | None, where: str, message: str, total: Callable[[], int]
) -> None:
    """Counts damaged data where that is skipped, else raises.

    Args:
        on_error: What to do about it, None to raise.
        where: File, and place in it.
        message: What is wrong.
        total: Gives the number of elements, about, that errors are held against.

    Raises:
        ValueError: Errors are not skipped, or there are too many.
    """
    if on_error is None:
        raise ValueError(
            f"{where}: {message}. Expected data that can be read: repair it, or leave "
            "out what is damaged with `.on_error('skip')`."
        )
    if where not in on_error.log:
        on_error.log.leave_out(where, message, about=total())


def summed_up(chunks: tf.data.Dataset, on_error: OnError | None) -> tf.data.Dataset:
    """Returns chunks; a pass ends with a look at the share of damaged data.

    Where a later step looks for errors too, that one does it.
    """
    if on_error is None or not on_error.is_last:
        return chunks
    spec, log = chunks.element_spec, on_error.log
    held = tf.experimental.Optional

    def finish(seen: tf.Tensor) -> None:
        log.finish(int(seen))

    def count(seen: tf.Tensor, found: Any) -> Any:
        is_end, chunk = found
        ended = tf.cond(
            is_end, lambda: tf.group(tf.py_function(finish, [seen], [])), tf.no_op
        )
        with tf.control_dependencies([ended]):
            num_rows = tf.cond(
                is_end,
                lambda: tf.constant(0, tf.int64),
                lambda: _num_rows(chunk.get_value()),
            )
        return seen + num_rows, {"is_end": is_end, "chunk": chunk}

    given = chunks.map(
        lambda *parts: (False, held.from_value(parts if len(parts) > 1 else parts[0]))
    )
    end = tf.data.Dataset.from_tensors((True, held.empty(spec)))
    counted = given.concatenate(end).scan(tf.constant(0, tf.int64), count)
    kept = counted.filter(lambda found: not found["is_end"])
    return kept.map(lambda found: found["chunk"].get_value())


def _num_rows(chunk: Any) -> tf.Tensor:
    """Returns the number of examples in a chunk."""
    first = tf.nest.flatten(chunk)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int64)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    return tf.shape(first, tf.int64)[0]
