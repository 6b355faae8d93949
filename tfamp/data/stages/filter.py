"""The stage that drops elements, and counts them by reason."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import (
    as_arguments,
    blank,
    inputs_of,
    looks_batched,
    named_columns,
)
from tfamp.data.features import Column, Statistics, check_rule, outlier_limits
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.records import checks, units

# Codes of elements are positions in here, from 1.
_REASONS = ("missing value", "outlier", "predicate")
# Stands for the reason of the mark behind the last element.
_END = -1


@dataclasses.dataclass(frozen=True)
class Filter(Stage):
    """Drops elements with missing values or outliers, or that a predicate refuses.

    `Pipeline.filter` explains the arguments. An element is dropped, and counted, for
    its first reason.
    """

    name: ClassVar[str] = "filter"
    predicate: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    missing: str | None = None
    outliers: Any = None
    statistics: Statistics | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    # The lowest and highest values that are no outliers, by column.
    limits: dict[str, Any] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits", self._limits())
        if self.missing is not None:
            checks.choice("missing", self.missing, ["drop"])
        has_rule = self.missing is not None or self.outliers is not None
        if not (callable(self.predicate) or (has_rule and not self.predicate)):
            raise TypeError(
                f"`predicate` is {self.predicate!r}; expected something that can be "
                "called with the parts of an element, or `missing` or `outliers` "
                "alone. Pass a function, such as `lambda x, y: y < 10`."
            )

    def _limits(self) -> dict[str, Any]:
        rule = check_rule("outliers", self.outliers)
        if (rule is None) != (self.statistics is None):
            raise TypeError(
                f"`outliers` is {self.outliers!r} and `statistics` is "
                f"{self.statistics!r}; expected both. Fit `tfamp.data.fit_statistics` "
                "on the training data and pass what it returns."
            )
        found = {}
        for column in self.statistics.columns if self.statistics else ():
            if isinstance(column, Column):
                low, high = outlier_limits(column, rule)
                ends = (low[0], high[0]) if column.scalar else (low, high)
                found[column.name] = (*ends, column.missing_values)
        return found

    def _check(self, spec: Any) -> None:
        """Raises if elements are batches, or if nothing in them can be missing."""
        if (self.missing or self.limits) and self.acts_on_batches:
            raise ValueError(
                f"`.filter` behind `.{self.stays_behind}` has rules on values; "
                "expected a predicate alone, which gets whole batches there. Write the "
                "rules in a `.filter` of their own, before `.batch` and what follows."
            )
        names = named_columns(inputs_of(spec)) if self.limits else {}
        if lacking := [name for name in self.limits if name not in names]:
            raise ValueError(
                f"`statistics` has column {lacking[0]!r}, and elements have "
                f"{tuple(names)!r}; expected the same names ('x' for inputs that are "
                "one tensor). Fit statistics on what comes in here."
            )
        if looks_batched(spec) and not self.acts_on_batches:
            raise ValueError(
                f"Elements {spec} look like batches; expected single examples, since "
                "`.filter` keeps or drops one at a time. Pass `dataset.unbatch()`."
            )
        inputs = tf.nest.flatten(inputs_of(spec))
        if self.missing and not any(one.dtype.is_floating for one in inputs):
            raise ValueError(
                f"`missing` is 'drop', and inputs {inputs} cannot hold NaN; expected a "
                "float. Leave `missing` out, or pass a predicate."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Judges in parallel, drops in order.

        Every iterator counts for itself, and reports at its end. A pass in which all of
        one or more elements went ends in `tf.errors.InvalidArgumentError`.
        """
        self._check(dataset.element_spec)
        if self.predicate is not None:
            answer = dataset.map(self.predicate).element_spec
            if answer != tf.TensorSpec((), tf.bool):
                raise ValueError(
                    f"`predicate` returns {answer!r}; expected one boolean for an "
                    "element, or for a batch behind `.batch`, True to keep it. Reduce "
                    "it with `tf.reduce_all`."
                )
        if self.acts_on_batches:
            return dataset.filter(self.predicate)
        is_tuple = isinstance(dataset.element_spec, tuple)

        def judge(*parts: Any) -> tuple[tf.Tensor, Any]:
            element = parts if is_tuple else parts[0]
            return self._code(element), element

        last = blank(dataset.element_spec, purpose="`.filter` drops some")
        end = tf.data.Dataset.from_tensors((tf.constant(_END), last))
        judged = map_in_order(dataset, judge, settings).concatenate(end)
        text = (
            f"`filter` dropped all {{}} elements ({{}} of them by {[*_REASONS]}); "
            "expected one or more to be left. Loosen it: call the predicate on some."
        )

        def report(counts: tf.Tensor) -> tf.Operation:
            is_fine = (counts[0] == 0) | (counts[0] > tf.reduce_sum(counts[1:]))
            message = tf.strings.format(text, (counts[0], counts[1:]))
            check = tf.debugging.Assert(is_fine, [message])
            told = tf.py_function(lambda c: self._note(c.numpy()), [counts], [])
            return tf.group(check, told)

        def count(counts: tf.Tensor, judged: Any) -> Any:
            code, element = judged
            is_end = tf.equal(code, _END)
            # Position 0 counts all that was seen, kept or not.
            kinds = tf.one_hot(code, 1 + len(_REASONS), dtype=tf.int64)
            seen = tf.cast(tf.logical_not(is_end), tf.int64)
            counts = counts + tf.concat([[seen], kinds[1:]], 0)
            done = tf.cond(is_end, lambda: report(counts), tf.no_op)
            with tf.control_dependencies([done]):
                is_kept = tf.equal(code, 0)
            return counts, {"is_kept": is_kept, "element": element}

        counted = judged.scan(tf.zeros(1 + len(_REASONS), tf.int64), count)
        kept = counted.filter(lambda found: found["is_kept"])
        return kept.map(lambda found: found["element"])

    def _note(self, counts: Any) -> None:
        """Adds what a pass saw, and dropped for each reason."""
        passes = self.found.setdefault("passes", [])  # of which each thread appends one
        passes.append(counts)

    @property
    def facts(self) -> str:
        """How many were dropped in all passes, and why."""
        passes = self.found.get("passes", [])
        if self.acts_on_batches or not passes:
            return "drops are not counted" if self.acts_on_batches else ""
        seen, *dropped = sum(passes).tolist()
        share = units.format_share(sum(dropped) / max(1, seen))
        pairs = zip(dropped, _REASONS, strict=True)
        reasons = [f"{num:,} {reason}" for num, reason in pairs if num]
        text = f"Dropped {sum(dropped):,} of {seen:,} elements ({share}) in "
        text += f"{len(passes)} pass{'' if len(passes) == 1 else 'es'}"
        return f"{text}: {units.join_words(reasons)}." if reasons else f"{text}."

    @property
    def setting(self) -> str:
        """What is dropped, or kept."""
        words = ["drop missing values"] if self.missing is not None else []
        words += ["drop outliers"] if self.limits else []
        if self.predicate is not None:
            name = getattr(self.predicate, "__name__", repr(self.predicate))
            words.append(f"keep where {name}")
        return units.join_words(words)

    def _code(self, element: Any) -> tf.Tensor:
        """Returns the number of the first reason to drop an element, 0 to keep it."""
        code = tf.constant(0)
        for part in tf.nest.flatten(inputs_of(element)) if self.missing else ():
            if part.dtype.is_floating:
                is_missing = tf.reduce_any(tf.math.is_nan(part))
                code = tf.where(is_missing, 1, code)
        columns = named_columns(inputs_of(element)) if self.limits else {}
        for name, (low, high, missing) in self.limits.items():
            given = tf.cast(columns[name], tf.float64)
            is_beyond = (given < low) | (given > high)
            for value in missing:
                is_beyond &= given != value
            code = tf.where(tf.reduce_any(is_beyond) & (code == 0), 2, code)
        if self.predicate is None:
            return code
        keep = tf.cond(
            tf.equal(code, 0),
            lambda: tf.convert_to_tensor(self.predicate(*as_arguments(element))),
            lambda: tf.constant(True),
        )
        return tf.where(keep, code, len(_REASONS))
