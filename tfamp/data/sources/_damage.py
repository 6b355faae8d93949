"""What sources do about data that they cannot read: name it, then raise or go on."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfamp.data._errors import OnError

# What parsing raises for data that does not fit.
PARSE_ERRORS = (tf.errors.InvalidArgumentError, UnicodeDecodeError)


def message_of(error: Exception) -> str:
    """Returns what an operation says is wrong, in a line, without its own name.

    TensorFlow quotes the data; bytes that are no text make its error another one.
    """
    if isinstance(error, UnicodeDecodeError):
        return "cannot be parsed, and holds bytes that are no text"
    text = str(getattr(error, "message", error))
    first = text.splitlines()[0] if text else type(error).__name__
    return first.partition("} ")[2] or first


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


def tried(
    function: Callable[[tf.Tensor], Any],
    records: tf.Tensor,
    repaired: Callable[[], tf.Tensor],
) -> Any:
    """Returns `function(records)`, or of what is left of them where that fails.

    The attempt runs in a dataset of its own, which is the one place where a graph can
    go on after an error. It costs 0.2 ms, so it is made for many records at once.

    Args:
        function: Takes a vector of strings; parses none where that is empty.
        records: Vector of strings.
        repaired: Gives the records that can be parsed.
    """
    attempt = tf.data.Dataset.from_tensors(records).map(
        lambda records: (True, function(records))
    )
    attempt = attempt.ignore_errors(log_warning=False)
    blank = tf.data.Dataset.from_tensors((False, _nothing(attempt, function)))
    is_parsed, parsed = attempt.concatenate(blank).take(1).get_single_element()
    return tf.cond(is_parsed, lambda: parsed, lambda: function(repaired()))


def _nothing(attempt: tf.data.Dataset, function: Callable[[tf.Tensor], Any]) -> Any:
    """Returns what the function makes of no records."""
    spec = attempt.element_spec[1]
    parts = tf.nest.flatten(spec)
    if not all(isinstance(part, tf.TensorSpec) for part in parts):
        return function(tf.zeros([0], tf.string))
    # Without calling it once more, which takes time when a dataset is built.
    return tf.nest.map_structure(
        lambda part: tf.constant(
            [], part.dtype, [size or 0 for size in part.shape.as_list()]
        ),
        spec,
    )
