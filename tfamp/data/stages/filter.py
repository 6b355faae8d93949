"""The stage that fills, clips or drops elements, and counts what it drops."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import (
    TENSOR,
    as_arguments,
    inputs_of,
    looks_batched,
    named_columns,
    with_inputs,
)
from tfamp.data.stages import (
    Settings,
    Stage,
    acts_on_batches,
    as_written,
    map_in_order,
)
from tfamp.data.stages.dropped import DropLog, drop
from tfamp.data.statistics import Column, Statistics, TextColumn
from tfamp.data.statistics.conditioning import (
    ColumnRule,
    check_column,
    fill_missing_text,
    is_missing_tensor,
)
from tfamp.data.statistics.record import (
    FILLS,
    check_fill,
    check_rule,
    collapses,
    declared,
    fill_text,
    fill_values,
    outlier_limits,
)
from tfamp.records import checks, units

OUTLIER_ACTIONS = ("drop", "clip")
# Codes of elements are positions in here, from 1.
REASONS = ("missing value", "outlier", "predicate")
Columns = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """Changes columns, or judges whether the element is to go.

    `drops` says whether elements may go because of it, `reason` why: one of
    `filter.REASONS`.
    """

    drops: ClassVar[bool] = False
    reason: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What it does, in a few words."""

    @abc.abstractmethod
    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises unless it can act on columns of these specs."""

    @abc.abstractmethod
    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns the columns, and whether the element goes."""


@dataclasses.dataclass(frozen=True)
class DropMissing(Rule):
    """Drops elements with a missing value, in columns of statistics or NaN in any."""

    drops: ClassVar[bool] = True
    reason: ClassVar[str] = "missing value"
    columns: tuple[ColumnRule, ...] | None
    description = "drop missing values"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if no column can have a missing value."""
        _check_finds(self.columns, columns, "drop")

    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value is missing."""
        found = []
        for rule in self.columns or _floats(columns):
            values = columns[rule.name]
            if rule.text:
                missing = tf.zeros_like(values, tf.bool)
                for text in rule.missing_texts:
                    missing |= tf.equal(values, text)
            else:
                missing = is_missing_tensor(values, rule.missing_values)
            found.append(tf.reduce_any(missing))
        return columns, tf.reduce_any(tf.stack(found))


@dataclasses.dataclass(frozen=True)
class Fill(Rule):
    """Fills missing values, by column or with `number` in all that hold floats."""

    columns: tuple[ColumnRule, ...] | None
    number: float | None
    how: str

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return f"fill missing values with {self.how}"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if nothing can be missing, or a fill can't be written."""
        _check_finds(self.columns, columns, self.how)
        for rule in self.columns or ():
            dtype = columns[rule.name].dtype
            whole = all(float(value).is_integer() for value in rule.fill)
            if dtype.is_integer and rule.missing_values and not whole:
                raise ValueError(
                    f"`missing` is {self.how!r}, and column {rule.name!r} of dtype "
                    f"{dtype.name} cannot hold {rule.fill!r}; expected whole numbers. "
                    "Pass 'median', or cast the column to float32 in `.map`."
                )

    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns the filled columns."""
        changed = dict(columns)
        for rule in self.columns or _floats(columns):
            values = columns[rule.name]
            if rule.text:
                changed[rule.name] = fill_missing_text(values, rule)
            elif values.dtype.is_floating or rule.missing_values:
                fill = rule.fill if rule.fill else (self.number,)
                one = fill[0] if rule.scalar or not rule.fill else fill
                written = tf.cast(tf.constant(one, tf.float64), values.dtype)
                missing = is_missing_tensor(values, rule.missing_values)
                changed[rule.name] = tf.where(missing, written, values)
        return changed, tf.constant(False)


@dataclasses.dataclass(frozen=True)
class DropOutliers(Rule):
    """Drops elements with a value beyond the lowest or highest of its feature."""

    drops: ClassVar[bool] = True
    reason: ClassVar[str] = "outlier"
    columns: tuple[ColumnRule, ...]
    description = "drop outliers"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises unless all columns of the statistics are there."""
        _check_columns(self.columns, columns)

    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value lies beyond."""
        found = []
        for rule in self.columns:
            values = tf.cast(columns[rule.name], tf.float64)
            absent = is_missing_tensor(columns[rule.name], rule.missing_values)
            lower, upper = _limits(rule)
            beyond = tf.logical_or(values < lower, values > upper)
            found.append(tf.reduce_any(beyond & tf.logical_not(absent)))
        return columns, tf.reduce_any(tf.stack(found))


@dataclasses.dataclass(frozen=True)
class Clip(DropOutliers):
    """Sets values beyond their limits to the limit."""

    drops: ClassVar[bool] = False
    description = "clip outliers"

    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns clipped columns."""
        changed = dict(columns)
        for rule in self.columns:
            values = columns[rule.name]
            wide = tf.cast(values, tf.float64)
            lower, upper = _limits(rule)
            if values.dtype.is_integer:
                lower, upper = tf.math.ceil(lower), tf.floor(upper)
            clipped = tf.where(wide < lower, lower, wide)
            clipped = tf.where(clipped > upper, upper, clipped)
            absent = is_missing_tensor(values, rule.missing_values)
            # What is within its limits is not cast to and fro.
            same = tf.logical_or(absent, tf.equal(clipped, wide))
            changed[rule.name] = tf.where(same, values, tf.cast(clipped, values.dtype))
        return changed, tf.constant(False)


def _limits(rule: ColumnRule) -> list[tf.Tensor]:
    """Returns the limits of a column as float64 constants."""
    pair = (rule.lower, rule.upper)
    return [tf.constant(s[0] if rule.scalar else s, tf.float64) for s in pair]


def _floats(columns: Mapping[str, Any]) -> Sequence[ColumnRule]:
    """Returns rules about NaN in all columns that can hold it."""
    return tuple(
        ColumnRule(name=name, text=False, scalar=True)
        for name, values in columns.items()
        if values.dtype.is_floating
    )


def _check_columns(
    rules: Sequence[ColumnRule] | None, columns: Mapping[str, Any]
) -> None:
    """Raises unless the columns are those that statistics were taken of."""
    for rule in rules or ():
        if rule.name not in columns:
            raise ValueError(
                f"`statistics` has column {rule.name!r}, and elements have "
                f"{tuple(columns)!r}; expected the same names ('x' for inputs that are "
                "one tensor). Rename them, or fit statistics without it."
            )
        check_column(columns[rule.name], rule)
        shape = columns[rule.name].shape
        if rule.scalar and shape.rank not in (0, None):
            raise ValueError(
                f"Column {rule.name!r} has shape {shape}, and `statistics` were taken "
                "of scalars; expected shape (). Fit them on elements like these."
            )


def _check_finds(
    rules: Sequence[ColumnRule] | None, columns: Mapping[str, Any], missing: str
) -> None:
    """Raises where no value can be missing, so that a rule would do nothing."""
    _check_columns(rules, columns)
    rules = _floats(columns) if rules is None else rules
    if not any(
        columns[rule.name].dtype.is_floating
        or rule.missing_values
        or rule.missing_texts
        for rule in rules
    ):
        kinds = {name: spec.dtype.name for name, spec in columns.items()}
        raise ValueError(
            f"`missing` is {missing!r}, and columns {kinds!r} cannot hold NaN; "
            "expected a float column, or `statistics` fitted with `missing_value`. "
            "Leave `missing` out, or say there what stands for a missing value."
        )


def _argument() -> Any:
    """Returns the field of an argument that counts by the rules made of it."""
    return dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Filter(Stage):
    """Fills and clips inputs, and drops elements, in one pass.

    `Pipeline.filter` explains the arguments, of which the rules are made. An element is
    dropped, and counted, for its first reason.
    """

    name: ClassVar[str] = "filter"
    predicate: Callable[..., Any] | None = None
    _: dataclasses.KW_ONLY
    missing: Any = _argument()
    outliers: Any = _argument()
    outlier_action: str | None = _argument()
    statistics: Statistics | None = _argument()
    stays_behind: str = dataclasses.field(default="", compare=False, repr=False)
    rules: tuple[Rule, ...] = dataclasses.field(init=False)
    log: DropLog = dataclasses.field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self._checked_rules()))
        object.__setattr__(self, "log", DropLog(REASONS))

    @property
    def takes_batches(self) -> bool:  # type: ignore[override]
        """Whether it acts on batches where it is written behind these."""
        return self.predicate is not None

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions in it."""
        return () if self.predicate is None else (self.predicate,)

    def behind(self, name: str) -> "Filter":
        """Returns the filter as it stays behind another stage, with the same counts."""
        moved = dataclasses.replace(self, stays_behind=name)
        object.__setattr__(moved, "log", self.log)
        return moved

    @property
    def drops(self) -> bool:
        """Whether elements may go, so that the length is not known beforehand."""
        return self.predicate is not None or any(rule.drops for rule in self.rules)

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
        if acts_on_batches(self):
            self._check_batches(dataset)
            return
        if looks_batched(dataset.element_spec):
            raise ValueError(
                f"Elements {dataset.element_spec} look like batches; expected single "
                "examples, since `.filter` keeps or drops one at a time. Pass "
                "`dataset.unbatch()`."
            )
        columns = named_columns(inputs_of(dataset.element_spec))
        for rule in self.rules:
            rule.check(columns)
        if self.predicate is None:
            return
        ruled = dataset.map(self._judge(dataset, by_rules=True))
        ruled = ruled.map(lambda code, x: x)
        self._check_answer(ruled)

    def _check_batches(self, dataset: tf.data.Dataset) -> None:
        """Raises unless it is a predicate on whole batches and nothing else."""
        if self.predicate is None or self.rules:
            raise ValueError(
                f"`.filter` behind `.{self.stays_behind}` has rules on values; "
                "expected a predicate alone, which gets whole batches there. Write the "
                "rules in a `.filter` of their own, before `.batch` and what follows."
            )
        self._check_answer(dataset)

    def _check_answer(self, dataset: tf.data.Dataset) -> None:
        """Raises unless the predicate gives one boolean for an element."""
        answer = dataset.map(self.predicate).element_spec
        if answer != tf.TensorSpec((), tf.bool):
            raise ValueError(
                f"`predicate` returns {answer!r}; expected one boolean for an element, "
                "or for a batch behind `.batch`, True to keep it. Reduce it with "
                "`tf.reduce_all`."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Judges in parallel, drops in order."""
        if acts_on_batches(self):
            return dataset.filter(self.predicate)
        judge = self._judge(dataset)
        if self.drops:
            return drop(map_in_order(dataset, judge, settings), self.log)
        return map_in_order(dataset, lambda *parts: judge(*parts)[1], settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        words = [rule.description for rule in self.rules]
        if self.predicate is not None:
            name = getattr(self.predicate, "__name__", repr(self.predicate))
            words.append(f"keep where {name}")
        if not self.drops:
            return units.join_words(words), "keeps every element"
        why = as_written(self.stays_behind) or "before the cache, done once"
        so_far = str(self.log) if self.log.seen else "drops are counted"
        if acts_on_batches(self):
            so_far = "drops are not counted"
        return units.join_words(words), f"{why}; {so_far}"

    def _judge(
        self, dataset: tf.data.Dataset, *, by_rules: bool = False
    ) -> Callable[..., tuple[tf.Tensor, Any]]:
        """Returns a function from parts to the reason's number, 0 to keep, and x.

        It is mapped over `dataset`. With `by_rules` the predicate is not asked.
        """
        is_tuple = isinstance(dataset.element_spec, tuple)

        def judge(*parts: Any) -> tuple[tf.Tensor, Any]:
            code, element = self._ruled(parts if is_tuple else parts[0])
            if self.predicate is None or by_rules:
                return code, element
            keep = tf.cond(
                tf.equal(code, 0),
                lambda: tf.convert_to_tensor(self.predicate(*as_arguments(element))),
                lambda: tf.constant(True),
            )
            last = tf.constant(len(REASONS), tf.int32)
            return tf.where(keep, code, last), element

        return judge

    def _ruled(self, element: Any) -> tuple[tf.Tensor, Any]:
        """Returns the number of the first reason to drop, and the element."""
        inputs = inputs_of(element)
        columns = named_columns(inputs)
        code = tf.constant(0)
        for rule in self.rules:
            columns, is_bad = rule.act(columns)
            if rule.drops:
                reason = tf.constant(REASONS.index(rule.reason) + 1, tf.int32)
                code = tf.where(tf.logical_and(is_bad, code == 0), reason, code)
        new = columns if isinstance(inputs, Mapping) else columns[TENSOR]
        return code, with_inputs(element, new)

    def _checked_rules(self) -> Iterator[Rule]:
        """Yields the rules of the arguments, once these are checked."""
        if self.predicate is not None and not callable(self.predicate):
            raise TypeError(
                f"`predicate` is {self.predicate!r}; expected something that can be "
                "called with one element. Pass a function, such as `lambda x, y: y < "
                "10`."
            )
        missing, outliers = self.missing, self.outliers
        _check_action(outliers, self.outlier_action)
        if all(value is None for value in (self.predicate, missing, outliers)):
            raise ValueError(
                "`.filter` came without anything to do; expected `predicate`, "
                "`missing` or `outliers`. Pass one, or leave the filter out."
            )
        if missing is not None:
            yield _missing_rule(missing, self.statistics)
        if outliers is not None:
            statistics = _needed(self.statistics, "outliers", outliers)
            limits = _limits_of(statistics, check_rule("outliers", outliers))
            drops = self.outlier_action == "drop"
            yield DropOutliers(limits) if drops else Clip(limits)
        is_used = outliers is not None or isinstance(missing, str)
        if self.statistics is not None and not is_used:
            raise ValueError(
                "`statistics` came without `outliers` or a `missing` that reads them; "
                "expected one of these. Leave `statistics` out."
            )


def _limits_of(statistics: Statistics, rule: Any) -> tuple[ColumnRule, ...]:
    """Returns the limits of outliers for each column of numbers of training data."""
    rules = []
    for column in statistics.columns:
        if isinstance(column, TextColumn):
            continue
        lower, upper = outlier_limits(column, rule)
        for feature, low, high in zip(column.features, lower, upper, strict=True):
            if collapses(feature, low, high):
                raise ValueError(
                    f"`outliers` is {rule!r}, which leaves feature {feature.name!r} "
                    f"one value, since nearly all are equal; expected features that "
                    "vary. Fit `statistics` with `columns` that leave it out."
                )
        low, high = tuple(lower.tolist()), tuple(upper.tolist())
        rules.append(declared(column, lower=low, upper=high))
    if not rules:
        raise ValueError(
            f"`outliers` is {rule!r}, and all columns of `statistics` are text; "
            "expected numbers. Leave `outliers` out."
        )
    return tuple(rules)


def _filled(column: Column | TextColumn, how: str) -> ColumnRule:
    """Returns what to fill a column with: its mean, median or mode."""
    if isinstance(column, TextColumn):
        return declared(column, fill_text=fill_text(column, how))
    return declared(column, fill=tuple(fill_values(column, how).tolist()))


def _missing_rule(missing: Any, statistics: Statistics | None) -> Rule:
    """Returns the rule about missing values."""
    if missing == "drop":
        columns = None if statistics is None else map(declared, statistics.columns)
        return DropMissing(None if columns is None else tuple(columns))
    if isinstance(missing, str):
        checks.choice("missing", missing, ("drop", *FILLS))
        found = _needed(statistics, "missing", missing)
        fills = tuple(_filled(column, missing) for column in found.columns)
        return Fill(fills, None, missing)
    if callable(getattr(missing, "transform", None)):
        raise TypeError(
            f"`missing` is {missing!r}; expected 'drop', one of {FILLS!r} or a number. "
            "Fit an imputer to the training rows and call its `transform` in `.map`, "
            "by `tf.numpy_function`, or on the arrays beforehand."
        )
    number = check_fill(missing)
    return Fill(None, number, repr(number))


def _needed(statistics: Any, argument: str, value: Any) -> Statistics:
    """Returns the statistics, or says that an argument needs them."""
    if isinstance(statistics, Statistics):
        return statistics
    raise TypeError(
        f"`{argument}` is {value!r} and `statistics` is {statistics!r}; expected what "
        "`tfamp.data.fit_statistics` returns. Fit them on the training data and pass "
        "`statistics=...`."
    )


def _check_action(outliers: Any, action: Any) -> None:
    """Raises unless a rule about outliers and what to do about them came together."""
    if outliers is None and action is not None:
        raise ValueError(
            f"`outlier_action` is {action!r} and `outliers` is None; expected both or "
            "none. Pass `outliers`, or leave `outlier_action` out."
        )
    if outliers is not None and action is None:
        raise ValueError(
            f"`outliers` is {outliers!r} and `outlier_action` is None; expected one "
            f"of {OUTLIER_ACTIONS!r}. Say what to do with the elements it finds."
        )
    if action is not None:
        checks.choice("outlier_action", action, OUTLIER_ACTIONS)
