"""Elements that go: those that a filter drops, and those that cannot be read.

One that cannot be read costs itself, and is named.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf
from absl import logging

from tfamp.data import _elements
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.statistics import Column, Statistics, check_rule, outlier_limits
from tfamp.records import checks, units
from tfamp.records.record import Record

_NAMED_IN_ERROR = 5
_PURPOSE = "`.on_error('skip')` is used"


@dataclasses.dataclass(frozen=True)
class SkippedElement(Record):
    """An element that was left out, and what reading it raised, in one line."""

    where: str  # the file, and the place in it, or the element's number
    message: str


@dataclasses.dataclass(frozen=True)
class OnError(Stage):
    """Skips elements that cannot be read, and judges them at the end of a pass."""

    name: ClassVar[str] = "on_error"
    max_fraction: float
    told_of: set[int] = dataclasses.field(
        default_factory=set, init=False, compare=False, repr=False
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
        if len(skipped) > self.max_fraction * total or (skipped and not came):
            most = units.format_share(self.max_fraction)
            named = [f"{one.where}: {one.message}" for one in skipped[:_NAMED_IN_ERROR]]
            raise ValueError(
                f"{told} cannot be read; expected at most {most} (`max_fraction`), and "
                f"one that can. The first: {'; '.join(named)}. Repair them, or raise "
                f"`max_fraction`. {checks.see('failures/damaged-record')}"
            )
        if skipped and len(skipped) not in self.told_of:
            self.told_of.add(len(skipped))
            share = units.format_share(len(skipped) / total)
            logging.warning("Skipped %s (%s) that cannot be read.", told, share)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the elements that could be read; a pass ends by judging the rest."""

        def finish(number: tf.Tensor, _: tf.Tensor) -> tf.Operation:
            told = tf.py_function(lambda n: self.finish(int(n)), [number], [])
            return tf.group(told)

        try:
            return _elements.at_end(dataset, finish, _PURPOSE)
        except TypeError:  # ragged examples of TFRecord files, which are judged before
            return dataset

    setting = property(
        lambda self: f"skip, at most {units.format_share(self.max_fraction)}"
    )

    facts = property(lambda self: f"{len(self.found)} so far")


@dataclasses.dataclass(frozen=True)
class Careful(Stage):
    """Calls functions in turn on pairs (position, element), skips what fails."""

    name: ClassVar[str] = "careful map"
    functions: tuple[Callable[..., Any], ...]
    names: tuple[str, ...]
    locate: Callable[[int], str] = dataclasses.field(compare=False)
    on_error: OnError = dataclasses.field(compare=False)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel, reports what failed, and takes it out."""
        outcome = dataset.map(lambda position, element: self._call(element))
        blanks = _elements.blank(outcome.element_spec, purpose=_PURPOSE)

        def careful(position: tf.Tensor, element: Any) -> Any:
            is_read, result = _elements.attempted(self._run, element, blanks)
            return is_read, position, element, result

        tried = map_in_order(dataset, careful, settings)
        kept = tried.map(self._report).filter(lambda is_read, result: is_read)
        return kept.map(lambda is_read, result: result)

    def _run(self, *parts: Any) -> Any:
        return self._call(_elements.from_arguments(parts))

    def _call(self, element: Any) -> Any:
        for function in self.functions:
            element = function(*_elements.as_arguments(element))
        return element

    def _report(self, is_read: Any, position: Any, element: Any, result: Any) -> Any:
        """Notes an element that was not read; costs the others one comparison."""

        def note(position: tf.Tensor, *parts: tf.Tensor) -> bool:
            where = self.locate(int(position))
            if where not in self.on_error.found:
                again = tf.nest.pack_sequence_as(element, list(parts))
                message = self._message(again).removeprefix(f"{where}: ")
                self.on_error.add(where, message)
            return False

        given = [position, *tf.nest.flatten(element)]
        noted = lambda: tf.py_function(note, given, tf.bool)  # noqa: E731
        return tf.ensure_shape(tf.cond(is_read, lambda: True, noted), ()), result

    def _message(self, element: Any) -> str:
        try:
            self._call(element)
        except Exception as error:  # whatever a user's function raises
            return _elements.message_of(error)
        return "failed once; calling it again went well"

    setting = property(lambda self: " + ".join(self.names))
    reason = property(lambda self: "element by element, so one error costs one")


@dataclasses.dataclass(frozen=True)
class Filter(Stage):
    """Drops elements with missing values or outliers, or that a predicate refuses."""

    name: ClassVar[str] = "filter"
    predicate: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    missing: str | None = None
    outliers: Any = None
    statistics: Statistics | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    limits: dict[str, Any] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        rule = check_rule("outliers", self.outliers)
        if (rule is None) != (self.statistics is None):
            raise TypeError(
                "`outliers` or `statistics` came without the other; expected both. "
                "Pass what `tfamp.data.fit_statistics` returns."
            )
        limits = {}
        for column in self.statistics.columns if self.statistics else ():
            if isinstance(column, Column):
                low, high = outlier_limits(column, rule)
                ends = (low[0], high[0]) if column.scalar else (low, high)
                limits[column.name] = ends
        object.__setattr__(self, "limits", limits)
        if self.missing is not None:
            checks.choice("missing", self.missing, ["drop"])
        has_rule = self.missing is not None or self.outliers is not None
        if not (callable(self.predicate) or (has_rule and not self.predicate)):
            raise TypeError(
                f"`predicate` is {self.predicate!r}; expected something that can be "
                "called, or `missing` or `outliers`. Pass as `lambda x, y: y < 10`."
            )

    def _check(self, dataset: tf.data.Dataset) -> None:
        spec = dataset.element_spec
        if (self.missing or self.limits) and self.acts_on_batches:
            raise ValueError(
                f"`.filter` behind `.{self.stays_behind}` has rules on values; "
                "expected a predicate alone, on batches. Write the rules in a "
                "`.filter` of their own, before `.batch`."
            )
        names = (
            _elements.named_columns(_elements.inputs_of(spec)) if self.limits else {}
        )
        if lacking := [name for name in self.limits if name not in names]:
            raise ValueError(
                f"`statistics` has column {lacking[0]!r}; expected one of "
                f"{tuple(names)!r}. Fit statistics on what comes in here."
            )
        if _elements.looks_batched(spec) and not self.acts_on_batches:
            raise ValueError(
                f"Elements {spec} look like batches; expected single examples, since "
                "`.filter` keeps or drops one at a time. Pass `dataset.unbatch()`."
            )
        if self.predicate is not None:
            answer = dataset.map(self.predicate).element_spec
            if answer != tf.TensorSpec((), tf.bool):
                raise ValueError(
                    f"`predicate` returns {answer!r}; expected one boolean, True to "
                    "keep the element or batch. Reduce it with `tf.reduce_all`."
                )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Judges in parallel, drops in order; a pass that drops all is an error."""
        self._check(dataset)
        if self.acts_on_batches:
            return dataset.filter(self.predicate)

        def report(kept: tf.Tensor, came: tf.Tensor) -> tf.Operation:
            message = tf.strings.format(
                "`filter` dropped all {} elements; expected one or more to be left. "
                "Loosen it: call the predicate on some.",
                came,
            )
            check = tf.debugging.Assert((kept > 0) | (came == 0), [message])
            return tf.group(check, tf.py_function(self._note, [kept, came], []))

        purpose = "`.filter` drops some"
        return _elements.at_end(dataset, report, purpose, self._keeps, settings)

    def _note(self, kept: tf.Tensor, came: tf.Tensor) -> None:
        self.found.setdefault("passes", []).append((int(kept), int(came)))

    @property
    def facts(self) -> str:
        """How many were dropped in all passes."""
        passes = self.found.get("passes", [])
        if self.acts_on_batches or not passes:
            return "drops are not counted" if self.acts_on_batches else ""
        kept, came = (sum(one) for one in zip(*passes, strict=True))
        share = units.format_share((came - kept) / max(1, came))
        many = f"{len(passes)} pass{'' if len(passes) == 1 else 'es'}"
        return f"dropped {came - kept:,} of {came:,} elements ({share}) in {many}"

    @property
    def setting(self) -> str:
        """What is dropped, or kept."""
        words = ["drop missing values"] if self.missing is not None else []
        words += ["drop outliers"] if self.limits else []
        if self.predicate is not None:
            name = getattr(self.predicate, "__name__", repr(self.predicate))
            words.append(f"keep where {name}")
        return units.join_words(words)

    def _keeps(self, *parts: Any) -> tf.Tensor:
        inputs = _elements.inputs_of(_elements.from_arguments(parts))
        keeps = tf.constant(True)
        for part in tf.nest.flatten(inputs) if self.missing else ():
            if part.dtype.is_floating:
                keeps &= _not_any(tf.math.is_nan(part))
        columns = _elements.named_columns(inputs) if self.limits else {}
        for name, (low, high) in self.limits.items():
            given = tf.cast(columns[name], tf.float64)
            keeps &= _not_any((given < low) | (given > high))
        if self.predicate is None:
            return keeps
        return tf.cond(
            keeps,
            lambda: tf.convert_to_tensor(self.predicate(*parts)),
            lambda: tf.constant(False),
        )


def _not_any(values: tf.Tensor) -> tf.Tensor:
    return tf.logical_not(tf.reduce_any(values))
