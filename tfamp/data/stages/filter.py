"""The stage that drops elements, and counts them by reason."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import as_arguments, inputs_of, looks_batched, named_columns
from tfamp.data.features import Statistics, TextColumn, check_rule, outlier_limits
from tfamp.data.layers import is_missing_tensor
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.dropped import DropLog, drop
from tfamp.records import checks, units

# Codes of elements are positions in here, from 1.
REASONS = ("missing value", "outlier", "predicate")


@dataclasses.dataclass(frozen=True)
class Filter(Stage):
    """Drops elements with missing values or outliers, or that a predicate refuses.

    `Pipeline.filter` explains the arguments. An element is dropped, and counted, for
    its first reason. `columns` are, by name, what stands for a missing value and the
    lowest and highest value that is no outlier.
    """

    name: ClassVar[str] = "filter"
    predicate: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    missing: str | None = None
    outliers: Any = None
    statistics: Statistics | None = dataclasses.field(
        default=None, compare=False, repr=False
    )
    columns: dict[str, Any] | None = dataclasses.field(init=False, repr=False)
    log: DropLog = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.predicate is not None and not callable(self.predicate):
            raise TypeError(
                f"`predicate` is {self.predicate!r}; expected something that can be "
                "called with one element. Pass a function, such as `lambda x, y: y < "
                "10`."
            )
        if self.missing is not None:
            checks.choice("missing", self.missing, ["drop"])
        if self.predicate is None and not self._has_rules:
            raise ValueError(
                "`.filter` came without anything to do; expected `predicate`, "
                "`missing` or `outliers`. Pass one, or leave the filter out."
            )
        is_needed = self.outliers is not None
        if not isinstance(self.statistics, Statistics) and (
            is_needed or self.statistics is not None
        ):
            raise TypeError(
                f"`outliers` is {self.outliers!r} and `statistics` is "
                f"{self.statistics!r}; expected what `tfamp.data.fit_statistics` "
                "returns. Fit them on the training data and pass `statistics=...`."
            )
        object.__setattr__(self, "columns", self._columns())
        object.__setattr__(self, "log", DropLog(REASONS))

    @property
    def _has_rules(self) -> bool:
        return self.missing is not None or self.outliers is not None

    def _columns(self) -> dict[str, Any] | None:
        """Returns what is missing and what is no outlier, for each column."""
        if self.statistics is None:
            return None
        rule, found = check_rule("outliers", self.outliers), {}
        for column in self.statistics.columns:
            limits = None
            if not isinstance(column, TextColumn) and rule is not None:
                low, high = outlier_limits(column, rule)
                limits = (low[0], high[0]) if column.scalar else (low, high)
            found[column.name] = (column.missing_values, limits)
        return found

    def for_build(self) -> "Filter":
        """Returns the filter with counts of its own."""
        return dataclasses.replace(self)

    def with_counts_of(self, builds: Sequence[Any]) -> "Filter":
        """Returns the filter with the counts of several builds."""
        joined = dataclasses.replace(self)
        for build in builds:
            log = build.log
            joined.log.add((log.seen, *log.dropped.values()), passes=log.passes)
        return joined

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if elements are batches, or if a rule or the predicate can't act."""
        if self._has_rules and self.acts_on_batches:
            raise ValueError(
                f"`.filter` behind `.{self.stays_behind}` has rules on values; "
                "expected a predicate alone, which gets whole batches there. Write the "
                "rules in a `.filter` of their own, before `.batch` and what follows."
            )
        if looks_batched(dataset.element_spec) and not self.acts_on_batches:
            raise ValueError(
                f"Elements {dataset.element_spec} look like batches; expected single "
                "examples, since `.filter` keeps or drops one at a time. Pass "
                "`dataset.unbatch()`."
            )
        if self._has_rules:
            self._check_columns(named_columns(inputs_of(dataset.element_spec)))
        if self.predicate is not None:
            answer = dataset.map(self.predicate).element_spec
            if answer != tf.TensorSpec((), tf.bool):
                raise ValueError(
                    f"`predicate` returns {answer!r}; expected one boolean for an "
                    "element, or for a batch behind `.batch`, True to keep it. Reduce "
                    "it with `tf.reduce_all`."
                )

    def _check_columns(self, specs: dict[str, Any]) -> None:
        """Raises unless elements have the columns, and one can have a missing value."""
        kinds = {name: spec.dtype.name for name, spec in specs.items()}
        lacking = [name for name in self.columns or () if name not in specs]
        if lacking:
            raise ValueError(
                f"`statistics` has column {lacking[0]!r}, and elements have "
                f"{tuple(specs)!r}; expected the same names ('x' for inputs that are "
                "one tensor). Rename them, or fit statistics without it."
            )
        can_miss = any(one.dtype.is_floating for one in specs.values())
        can_miss = can_miss or any(
            values for values, _ in (self.columns or {}).values()
        )
        if self.missing is not None and not can_miss:
            raise ValueError(
                f"`missing` is 'drop', and columns {kinds!r} cannot hold NaN; expected "
                "a float column, or `statistics` fitted with `missing_value`. Leave "
                "`missing` out, or say there what stands for a missing value."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Judges in parallel, drops in order."""
        if self.acts_on_batches:
            return dataset.filter(self.predicate)
        is_tuple = isinstance(dataset.element_spec, tuple)

        def judge(*parts: Any) -> tuple[tf.Tensor, Any]:
            element = parts if is_tuple else parts[0]
            return self._code(element), element

        return drop(map_in_order(dataset, judge, settings), self.log)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        words = ["drop missing values"] if self.missing is not None else []
        words += ["drop outliers"] if self.outliers is not None else []
        if self.predicate is not None:
            name = getattr(self.predicate, "__name__", repr(self.predicate))
            words.append(f"keep where {name}")
        so_far = str(self.log) if self.log.seen else "drops are counted"
        if self.acts_on_batches:
            so_far = "drops are not counted"
        why = self.why_here("before the cache, done once")
        return units.join_words(words), f"{why}; {so_far}"

    def _code(self, element: Any) -> tf.Tensor:
        """Returns the number of the first reason to drop an element, 0 to keep it."""
        code = tf.constant(0)
        if self._has_rules:
            columns = named_columns(inputs_of(element))
            for number, found in enumerate(self._found(columns), start=1):
                code = tf.where(found & (code == 0), number, code)
        if self.predicate is None:
            return code
        keep = tf.cond(
            tf.equal(code, 0),
            lambda: tf.convert_to_tensor(self.predicate(*as_arguments(element))),
            lambda: tf.constant(True),
        )
        return tf.where(keep, code, len(REASONS))

    def _found(self, columns: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns whether a value is missing, and whether one is an outlier."""
        missing, beyond = [tf.constant(False)], [tf.constant(False)]
        known = self.columns or dict.fromkeys(columns, ((), None))
        for name, (values, limits) in known.items():
            given = columns[name]
            absent = is_missing_tensor(given, values)
            missing.append(tf.reduce_any(absent))
            if limits is not None:
                low, high = (tf.constant(limit, tf.float64) for limit in limits)
                wide = tf.cast(given, tf.float64)
                outside = (wide < low) | (wide > high)
                beyond.append(tf.reduce_any(outside & ~absent))
        is_missing, is_outlier = tf.reduce_any(missing), tf.reduce_any(beyond)
        return is_missing if self.missing else tf.constant(False), is_outlier
