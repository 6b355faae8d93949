"""What happens to elements that cannot be read: each costs itself, and is named.

tf.data's own `ignore_errors` counts nothing, and drops the rest of a source that
fails. Here each element is worked on in a dataset of its own, inside a parallel map, so
an error costs that element and nothing else; one that was skipped leaves a mark, which
a later step reports and takes out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data._elements import as_arguments, at_end, blank, from_arguments
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.records import checks, units
from tfamp.records.record import Record

_NAMED_IN_ERROR = 5
_PURPOSE = "`.on_error('skip')` is used"


@dataclasses.dataclass(frozen=True)
class SkippedElement(Record):
    """An element that was left out.

    Attributes:
        where: The file, and the place in it, or the element's number.
        message: What reading it raised, in one line.
    """

    where: str
    message: str


@dataclasses.dataclass(frozen=True)
class OnError(Stage):
    """Skips elements that cannot be read, and judges them at the end of a pass.

    Each is in `found` by its place once, however often it was met.
    """

    name: ClassVar[str] = "on_error"
    max_fraction: float
    told_of: list[int] = dataclasses.field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        checks.fraction("max_fraction", self.max_fraction)

    def add(self, where: str, message: str) -> None:
        """Counts an element that cannot be read; the first one is logged."""
        if not self.found:
            text = "Skipped %s: %s. Further ones are counted; see `.skipped`."
            logging.warning(text, where, message)
        self.found.setdefault(where, SkippedElement(where, message))

    def finish(self, came: int, unit: str = "elements") -> None:
        """Ends a pass in which so many could be read: sums up, or raises."""
        skipped = tuple(self.found.values())
        total = came + len(skipped)
        told = f"{len(skipped)} of {total} {unit}"
        if len(skipped) > self.max_fraction * total:
            named = [f"{one.where}: {one.message}" for one in skipped[:_NAMED_IN_ERROR]]
            raise ValueError(
                f"{told} cannot be read; expected at most "
                f"{units.format_share(self.max_fraction)} (`max_fraction`). The first: "
                f"{'; '.join(named)}. Repair or remove them, or raise `max_fraction` "
                f"in `.on_error`. {checks.see('failures/damaged-record')}"
            )
        if skipped and len(skipped) not in self.told_of:
            self.told_of.append(len(skipped))
            share = units.format_share(len(skipped) / total)
            logging.warning("Skipped %s (%s) that cannot be read.", told, share)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the elements that could be read; a pass ends by judging the rest."""

        def finish(number: tf.Tensor) -> tf.Operation:
            told = tf.py_function(lambda n: self.finish(int(n)), [number], [])
            return tf.group(told)

        try:
            return at_end(dataset, finish, _PURPOSE)
        except TypeError:  # ragged examples of TFRecord files, which are judged before
            return dataset

    @property
    def setting(self) -> str:
        """The share that may be skipped."""
        return f"skip, at most {units.format_share(self.max_fraction)}"

    @property
    def facts(self) -> str:
        """How many were skipped."""
        return f"{len(self.found)} so far"


@dataclasses.dataclass(frozen=True)
class Careful(Stage):
    """Calls functions one after another on pairs (position, element), skips what fails.

    The functions are those of the stages called `names`; `locate` gives the place of an
    element by its position in the source.
    """

    name: ClassVar[str] = "careful map"
    functions: tuple[Callable[..., Any], ...]
    names: tuple[str, ...]
    locate: Callable[[int], str] = dataclasses.field(compare=False)
    on_error: OnError = dataclasses.field(compare=False)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel, reports what failed, and takes it out."""
        outcome = dataset.map(lambda position, element: self._call(element))
        blanks = blank(outcome.element_spec, purpose=_PURPOSE)

        def careful(position: tf.Tensor, element: Any) -> Any:
            tried = tf.data.Dataset.from_tensors(element)
            tried = tried.map(lambda *parts: (True, self._call(from_arguments(parts))))
            tried = tried.ignore_errors(log_warning=False)
            nothing = tf.data.Dataset.from_tensors((False, blanks))
            is_read, result = tried.concatenate(nothing).take(1).get_single_element()
            return is_read, position, element, result

        tried = map_in_order(dataset, careful, settings)
        kept = tried.map(self._report).filter(lambda is_read, result: is_read)
        return kept.map(lambda is_read, result: result)

    def _call(self, element: Any) -> Any:
        """Returns what the last function makes of an element."""
        for function in self.functions:
            element = function(*as_arguments(element))
        return element

    def _report(self, is_read: Any, position: Any, element: Any, result: Any) -> Any:
        """Notes an element that was not read; costs the others one comparison."""

        def note(position: tf.Tensor, *parts: tf.Tensor) -> bool:
            where = self.locate(int(position))
            if where not in self.on_error.found:
                again = tf.nest.pack_sequence_as(element, list(parts))
                self.on_error.add(where, self._message(again))
            return False

        leaves = tf.nest.flatten(element)
        kept = tf.cond(
            is_read,
            lambda: True,
            lambda: tf.py_function(note, [position, *leaves], tf.bool),
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

    @property
    def setting(self) -> str:
        """The names of the stages."""
        return " + ".join(self.names)

    @property
    def reason(self) -> str:
        """Why it is one step."""
        return "element by element, so one error costs one"
