"""Elements that a pass leaves out: those that cannot be read, and those of filters.

tf.data's own `ignore_errors` counts nothing, and drops the rest of a source that
fails. Here each element is worked on in a dataset of its own, inside a parallel
map, so an error costs that element and nothing else; one that was skipped leaves a
mark, which a later step reports and takes out. What a filter drops is counted by its
reason.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data._elements import as_arguments, blank, from_arguments, known_length
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.records import checks, units
from tfamp.records.record import Record

# Before a length is known, errors are held against at least this many elements, so
# that one bad element among the first ten does not end a pass over a million.
_MIN_SEEN = 1000
_NAMED_IN_ERROR = 5
_PURPOSE = "`.on_error('skip')` is used"
# Between two reports of a filter; one costs a call into Python, about 0.1 ms.
_REPORT_EVERY = 4096
# Stands for the position, or the reason, of the mark behind the last element.
_END = -1


@dataclasses.dataclass(frozen=True)
class SkippedElement(Record):
    """An element that was left out.

    Attributes:
        where: The file, and the place in it, or the element's number.
        message: What reading it raised, in one line.
    """

    where: str
    message: str


class ErrorLog:
    """The elements that a build has skipped, each once however often it was met."""

    def __init__(self, max_fraction: float) -> None:
        self.max_fraction = max_fraction
        self.found: dict[str, SkippedElement] = {}
        # Elements of a pass, where that is known.
        self.length: int | None = None
        self._seen = 0
        # Of those found, the ones that the source left out, so that no step sees them.
        self._num_left_out = 0
        self._summed_up = False
        self._lock = threading.Lock()

    @property
    def skipped(self) -> tuple[SkippedElement, ...]:
        """What was skipped, in the order in which it was met first."""
        return tuple(self.found.values())

    def __contains__(self, where: str) -> bool:
        return where in self.found

    def add(self, where: str, message: str, *, seen: int) -> None:
        """Counts an element that a step has met; the first one is logged.

        `seen` is the number of elements met so far in this pass, this one included.
        """
        with self._lock:
            if self._note(where, message):
                self._seen = max(self._seen, seen + self._num_left_out)
                total = self.length or max(self._seen, _MIN_SEEN)
                self._check(total, self.length or self._seen)

    def leave_out(self, where: str, message: str) -> None:
        """Counts an element that the source does not give, to be judged at the end.

        The first one is logged.
        """
        with self._lock:
            self._num_left_out += self._note(where, message)

    def finish(self, seen: int) -> None:
        """Ends a pass: checks the share exactly, and sums up once.

        `seen` is what the source gave in the pass, with what a step skipped.
        """
        with self._lock:
            self._seen = seen + self._num_left_out
            if self.found:
                total = self.length or self._seen
                self._check(total, total)
            if self.found and not self._summed_up:
                self._summed_up = True
                share = units.format_share(len(self.found) / max(1, self._seen))
                text = "Skipped %d of %d elements (%s) that cannot be read."
                logging.warning(text, len(self.found), self._seen, share)

    def _note(self, where: str, message: str) -> bool:
        """Returns whether an element is a new one, and logs the first of all."""
        if where in self.found:
            return False
        self.found[where] = SkippedElement(where, message)
        if len(self.found) == 1:
            text = "Skipped %s: %s. Further ones are counted; see `.skipped`."
            logging.warning(text, where, message)
        return True

    def _check(self, total: int, told: int) -> None:
        """Raises where more than the allowed share cannot be read."""
        if len(self.found) <= self.max_fraction * total:
            return
        named = self.skipped[:_NAMED_IN_ERROR]
        first = "; ".join(f"{one.where}: {one.message}" for one in named)
        raise ValueError(
            f"{len(self.found)} of {told} elements cannot be "
            f"read; expected at most {units.format_share(self.max_fraction)} "
            f"(`max_fraction`). The first: {first}. Repair or remove them, or raise "
            f"`max_fraction` in `.on_error`. {checks.see('failures/damaged-record')}"
        )


@dataclasses.dataclass(frozen=True)
class OnError(Stage):
    """What to do with an element that cannot be read: a setting, not a step.

    It `is_last` where no step behind the source looks for errors, so that the source
    itself ends a pass.
    """

    name: ClassVar[str] = "on_error"
    max_fraction: float
    log: ErrorLog = dataclasses.field(compare=False)
    is_last: bool = False

    def for_build(self) -> "OnError":
        """Returns the setting with a log of its own."""
        return dataclasses.replace(self, log=ErrorLog(self.max_fraction))

    def with_counts_of(self, builds: Sequence[Any]) -> "OnError":
        """Returns the setting with what several builds have skipped."""
        joined = ErrorLog(self.max_fraction)
        for build in builds:
            joined.found.update(build.log.found)
        return dataclasses.replace(self, log=joined)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it is."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        count = len(self.log.found)
        share = units.format_share(self.max_fraction)
        return f"skip, at most {share}", f"each one costs itself; {count} so far"


@dataclasses.dataclass(frozen=True)
class Careful(Stage):
    """Calls functions one after another on pairs (position, element), skips what fails.

    The functions are those of the stages called `names`; `locate` gives the place of an
    element by its position in the source. Where a filter stands between functions there
    are several such steps, of which the first knows the length and the last sums up.
    """

    name: ClassVar[str] = "careful map"
    functions: tuple[Callable[..., Any], ...]
    names: tuple[str, ...]
    locate: Callable[[int], str] = dataclasses.field(compare=False)
    on_error: OnError
    is_first: bool = True
    is_last: bool = True

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel, reports what failed, and takes it out."""
        if self.is_first:
            self.on_error.log.length = known_length(dataset)
        element_spec = dataset.element_spec[1]
        outcome = dataset.map(lambda position, element: self._call(element))
        blanks = blank(outcome.element_spec, purpose=_PURPOSE)

        def careful(position: tf.Tensor, element: Any) -> Any:
            tried = tf.data.Dataset.from_tensors(element)
            tried = tried.map(
                lambda *parts: (position >= 0, self._call(from_arguments(parts)))
            )
            tried = tried.ignore_errors(log_warning=False)
            nothing = tf.data.Dataset.from_tensors((False, blanks))
            is_read, result = tried.concatenate(nothing).take(1).get_single_element()
            return is_read, position, element, result

        last = (tf.constant(_END, tf.int64), blank(element_spec, purpose=_PURPOSE))
        ended = dataset.concatenate(tf.data.Dataset.from_tensors(last))
        tried = map_in_order(ended, careful, settings).enumerate()
        # One after another, so that the end is reported last.
        kept = tried.map(self._report).filter(lambda is_read, result: is_read)
        return kept.map(lambda is_read, result: result)

    def _call(self, element: Any) -> Any:
        """Returns what the last function makes of an element."""
        for function in self.functions:
            element = function(*as_arguments(element))
        return element

    def _report(self, seen: tf.Tensor, found: Any) -> tuple[tf.Tensor, Any]:
        """Notes an element that was not read; costs the others one comparison."""
        is_read, position, element, result = found
        leaves = tf.nest.flatten(element)

        def note(seen: tf.Tensor, position: tf.Tensor, *parts: tf.Tensor) -> bool:
            if int(position) == _END:
                if self.is_last:
                    self.on_error.log.finish(int(seen))
                return False
            where = self.locate(int(position))
            if where not in self.on_error.log:
                again = tf.nest.pack_sequence_as(element, list(parts))
                message = self._message(again)
                self.on_error.log.add(where, message, seen=int(seen) + 1)
            return False

        kept = tf.cond(
            is_read,
            lambda: True,
            lambda: tf.py_function(note, [seen, position, *leaves], tf.bool),
        )
        return tf.ensure_shape(kept, ()), result

    def _message(self, element: Any) -> str:
        """Returns what calling the functions raises, in one line."""
        try:
            self._call(element)
        except Exception as error:  # whatever a user's function raises
            text = str(getattr(error, "message", error)).strip()
            first = text.splitlines()[0] if text else type(error).__name__
            # TensorFlow's own additions, as "{{node}} text [Op:Name] name:".
            return (first.partition("}} ")[2] or first).partition(" [Op:")[0]
        return "failed once; calling it again went well"

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return " + ".join(self.names), "element by element, so one error costs one"


class DropLog:
    """What a filter saw and dropped by reason, and the passes that came to their end.

    Iterators over a dataset report to it, from any thread.

    Example:
        >>> log = DropLog(["outlier", "predicate"])
        >>> log.add([200, 5, 0], passes=1)
        >>> print(log)
        Dropped 5 of 200 elements (2.5 %) in 1 pass: 5 outlier.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.seen = self.passes = 0
        self.dropped = dict.fromkeys(reasons, 0)
        self._lock = threading.Lock()

    def add(self, counts: Sequence[int], *, passes: int) -> None:
        """Adds elements seen, those dropped for each reason, and whole passes."""
        seen, *dropped = counts
        with self._lock:
            self.seen += int(seen)
            self.passes += passes
            for reason, number in zip(self.dropped, dropped, strict=True):
                self.dropped[reason] += int(number)

    def __str__(self) -> str:
        total = sum(self.dropped.values())
        share = units.format_share(total / max(1, self.seen))
        passes = f"{self.passes} pass{'' if self.passes == 1 else 'es'}"
        reasons = [f"{num:,} {reason}" for reason, num in self.dropped.items() if num]
        text = f"Dropped {total:,} of {self.seen:,} elements ({share}) in {passes}"
        return f"{text}: {units.join_words(reasons)}." if reasons else f"{text}."


def drop(judged: tf.data.Dataset, log: DropLog) -> tf.data.Dataset:
    """Returns the elements that have no reason to go.

    `judged` has pairs of an int32 and an element: 0 to keep it, else the number of the
    reason in `log.dropped`, from 1. Every iterator counts for itself and reports to the
    log every 4,096 elements and at its end, so a pass that is broken off is off by less
    than that. A pass in which all of one or more elements went ends in
    `tf.errors.InvalidArgumentError`.
    """
    last = blank(judged.element_spec[1], purpose="`.filter` drops some")
    ended = judged.concatenate(tf.data.Dataset.from_tensors((tf.constant(_END), last)))
    reasons = list(log.dropped)
    zeros = tf.zeros(1 + len(reasons), tf.int64)

    def add(counts: Any, is_end: Any) -> None:
        log.add(counts.numpy().tolist(), passes=int(is_end))

    def check_some_left(total: tf.Tensor) -> tf.Operation:
        text = (
            f"`filter` dropped all {{}} elements ({{}} of them by {reasons}); expected "
            "one or more to be left. Loosen it: print the statistics, or call the "
            "predicate on single elements."
        )
        is_fine = (total[0] == 0) | (total[0] > tf.reduce_sum(total[1:]))
        message = tf.strings.format(text, (total[0], total[1:]))
        return tf.debugging.Assert(is_fine, [message])

    def count(state: Any, pair: Any) -> Any:
        (total, reported), (code, element) = state, pair
        is_end = tf.equal(code, _END)
        # Position 0 counts all that was seen, kept or not.
        seen = tf.cast(tf.logical_not(is_end), tf.int64)
        kinds = tf.one_hot(code, len(reasons) + 1, dtype=tf.int64)
        total = total + tf.concat([[seen], kinds[1:]], 0)
        new = total - reported
        is_due = is_end | (new[0] >= _REPORT_EVERY)

        def report() -> tf.Operation:
            return tf.group(tf.py_function(add, [new, is_end], []))

        done = [
            tf.cond(is_end, lambda: check_some_left(total), tf.no_op),
            tf.cond(is_due, report, tf.no_op),
        ]
        reported = tf.where(is_due, total, reported)
        with tf.control_dependencies(done):
            is_kept = tf.equal(code, 0)
        return (total, reported), {"is_kept": is_kept, "element": element}

    counted = ended.scan((zeros, zeros), count)
    kept = counted.filter(lambda found: found["is_kept"])
    return kept.map(lambda found: found["element"])
