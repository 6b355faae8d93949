"""Takes elements out of a dataset and says how many, and why."""

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.data._elements import blank
from tfamp.records import units
from tfamp.records.record import Record

# Between two reports of a pass; one costs a call into Python, about 0.1 ms.
_REPORT_EVERY = 4096
# Stands for the reason of the mark behind the last element.
_END = -1


@dataclasses.dataclass(frozen=True)
class DropReport(Record):
    """What a filter saw and dropped, in all passes together.

    Args:
        seen: Elements that came in.
        dropped: How many went, by reason.
        passes: Passes that came to their end.

    Example:
        >>> print(DropReport(200, {"outlier": 5, "predicate": 0}, passes=1))
        Dropped 5 of 200 elements (2.5 %) in 1 pass: 5 outlier.
    """

    seen: int
    dropped: dict[str, int]
    passes: int

    def __str__(self) -> str:
        if not self.seen:
            return (
                "No element came in yet. A pass over the dataset counts; one from a "
                "cache behind the filter doesn't."
            )
        total = sum(self.dropped.values())
        share = units.format_share(total / self.seen)
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'}"
        reasons = [f"{num:,} {reason}" for reason, num in self.dropped.items() if num]
        text = f"Dropped {total:,} of {self.seen:,} elements ({share}) in {passes}"
        return f"{text}: {units.join_words(reasons)}." if reasons else f"{text}."


class DropLog:
    """Adds up what iterators over a dataset report; safe between threads."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        self._lock = threading.Lock()
        self._counts = [0] * (1 + len(self.reasons))
        self._passes = 0

    def add(self, counts: Sequence[int], *, passes: int) -> None:
        """Adds elements seen, those dropped for each reason, and whole passes."""
        with self._lock:
            pairs = zip(self._counts, counts, strict=True)
            self._counts = [a + int(b) for a, b in pairs]
            self._passes += passes

    def report(self) -> DropReport:
        """Returns the sums so far."""
        with self._lock:
            dropped = dict(zip(self.reasons, self._counts[1:], strict=True))
            return DropReport(self._counts[0], dropped, self._passes)


def drop(judged: tf.data.Dataset, log: DropLog) -> tf.data.Dataset:
    """Returns the single elements that have no reason to go.

    Every iterator counts for itself and reports to the log every 4,096 elements and at
    its end, so a pass that is broken off is off by less than that. A pass in which all
    of one or more elements went ends in `tf.errors.InvalidArgumentError`.

    Args:
        judged: Chunks of pairs of an int32 and an element, `(chunk, ...)`: 0 to keep
            it, else the number of the reason in `log.reasons`, from 1.
        log: Takes the counts.

    Raises:
        TypeError: Elements hold something else than dense tensors of known rank.
    """
    spec = judged.element_spec[1]
    last = blank(spec, purpose="`.filter` drops some", sizes=[1])
    ended = judged.concatenate(
        tf.data.Dataset.from_tensors((tf.constant([_END], tf.int32), last))
    )
    zeros = tf.zeros(1 + len(log.reasons), tf.int64)

    def add(counts: Any, is_end: Any) -> None:
        log.add(counts.numpy().tolist(), passes=int(is_end))

    def count(state: Any, pair: Any) -> Any:
        (total, reported), (codes, elements) = state, pair
        is_end = tf.equal(codes[0], _END)
        kinds = tf.one_hot(codes, len(log.reasons) + 1, dtype=tf.int64)
        kinds = tf.reduce_sum(kinds, axis=0)
        # Position 0 counts all that was seen, kept or not.
        seen = tf.size(codes, tf.int64) * tf.cast(tf.logical_not(is_end), tf.int64)
        total = total + tf.concat([[seen], kinds[1:]], 0)
        new = total - reported
        is_due = tf.logical_or(is_end, new[0] >= _REPORT_EVERY)
        checks = [
            tf.cond(is_end, lambda: _check_some_left(total, log.reasons), tf.no_op),
            tf.cond(
                is_due,
                lambda: tf.group(tf.py_function(add, [new, is_end], [])),
                tf.no_op,
            ),
        ]
        reported = tf.where(is_due, total, reported)
        with tf.control_dependencies(checks):
            is_kept = tf.equal(codes, 0)
        kept = tf.nest.map_structure(lambda v: tf.boolean_mask(v, is_kept), elements)
        # A structure of its own: a tuple alone would be taken for several values.
        return (total, reported), {"kept": kept}

    counted = ended.scan((zeros, zeros), count)
    return counted.map(lambda found: found["kept"]).unbatch()


def _check_some_left(total: tf.Tensor, reasons: Sequence[str]) -> tf.Operation:
    """Raises at the end of a pass that kept none of its elements."""
    listed = ", ".join(f"{{}} {reason}" for reason in reasons)
    text = (
        f"`filter` dropped all {{}} elements ({listed}); expected one or more to be "
        "left. Loosen it: print the statistics, or call the predicate on single "
        "elements."
    )
    is_fine = tf.logical_or(
        tf.equal(total[0], 0), tf.greater(total[0], tf.reduce_sum(total[1:]))
    )
    message = tf.strings.format(text, tuple(tf.unstack(total)))
    return tf.debugging.Assert(is_fine, [message])
