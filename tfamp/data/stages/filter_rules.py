"""What a filter does to the columns of one element: a frozen record for each rule.

A rule changes columns, or judges whether the element is to go.
"""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data.statistics import Column, Statistics, TextColumn
from tfamp.data.statistics.conditioning import (
    ColumnRule,
    check_column,
    fill_missing_text,
    is_missing_tensor,
)
from tfamp.data.statistics.options import (
    collapses,
    fill_text,
    fill_values,
    outlier_limits,
)

Columns = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """What every rule can do.

    `drops` says whether elements may go because of it, `reason` why: one of
    `filter.REASONS`. One that `takes_chunks` acts on many elements at once as on one.
    """

    drops: ClassVar[bool] = False
    reason: ClassVar[str] = ""
    takes_chunks: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """What it does, in a few words."""

    @abc.abstractmethod
    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises unless it can act on columns of these specs."""

    @abc.abstractmethod
    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns the columns, and whether the element goes.

        Of a chunk, whose columns have an axis in front, an answer for each element.
        """


@dataclasses.dataclass(frozen=True)
class DropMissing(Rule):
    """Drops elements with a missing value, in columns of statistics or NaN in any."""

    drops: ClassVar[bool] = True
    reason: ClassVar[str] = "missing value"
    columns: tuple[ColumnRule, ...] | None
    description = "drop missing values"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if no column can have a missing value."""
        _check_columns(self.columns, columns)
        _check_finds(self.columns, columns, "drop")

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value is missing."""
        found = []
        for rule in self.columns or _floats(columns):
            values = columns[rule.name]
            if rule.text:
                missing = tf.zeros_like(values, tf.bool)
                for text in rule.missing_texts:
                    missing = tf.logical_or(missing, tf.equal(values, text))
            else:
                missing = is_missing_tensor(values, rule.missing_values)
            found.append(_any(missing, is_chunk))
        return columns, tf.reduce_any(tf.stack(found), axis=0)


@dataclasses.dataclass(frozen=True)
class Fill(Rule):
    """Fills missing values, by column or with `number` in all that hold floats."""

    columns: tuple[ColumnRule, ...] | None
    number: float | None
    how: str

    @classmethod
    def from_statistics(cls, statistics: Statistics, how: str) -> "Fill":
        """Returns the rule that fills with means, medians or modes."""
        rules = []
        for column in statistics.columns:
            if isinstance(column, TextColumn):
                fill: dict[str, Any] = {"fill_text": fill_text(column, how)}
            else:
                fill = {"fill": tuple(fill_values(column, how).tolist())}
            rules.append(dataclasses.replace(declared(column), **fill))
        return cls(tuple(rules), None, how)

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return f"fill missing values with {self.how}"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if nothing can be missing, or a fill can't be written."""
        _check_columns(self.columns, columns)
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

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
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

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value lies beyond."""
        found = []
        for rule in self.columns:
            values = tf.cast(columns[rule.name], tf.float64)
            absent = is_missing_tensor(columns[rule.name], rule.missing_values)
            lower, upper = _limits(rule)
            beyond = tf.logical_or(values < lower, values > upper)
            found.append(_any(beyond & tf.logical_not(absent), is_chunk))
        return columns, tf.reduce_any(tf.stack(found), axis=0)


@dataclasses.dataclass(frozen=True)
class Clip(DropOutliers):
    """Sets values beyond their limits to the limit."""

    drops: ClassVar[bool] = False
    description = "clip outliers"

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
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


def declared(column: Column | TextColumn) -> ColumnRule:
    """Returns what a column is like and what stands for a missing value in it."""
    if isinstance(column, TextColumn):
        texts = column.missing_values
        return ColumnRule(
            name=column.name, text=True, scalar=column.scalar, missing_texts=texts
        )
    return ColumnRule(
        name=column.name,
        text=False,
        scalar=column.scalar,
        missing_values=column.missing_values,
        # Without a limit or a fill, these numbers say how many features there are.
        fill=(math.nan,) * len(column.features),
    )


def limits_of(statistics: Statistics, rule: Any) -> tuple[ColumnRule, ...]:
    """Returns the limits of outliers for each column of numbers of training data.

    Raises:
        ValueError: There is no column of numbers, or limits would leave one value of
            a feature.
    """
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
        rules.append(dataclasses.replace(declared(column), lower=low, upper=high))
    if not rules:
        raise ValueError(
            f"`outliers` is {rule!r}, and all columns of `statistics` are text; "
            "expected numbers. Leave `outliers` out."
        )
    return tuple(rules)


def _any(flags: tf.Tensor, is_chunk: bool) -> tf.Tensor:
    """Returns whether any value of an element has a flag, for each of a chunk."""
    axes = list(range(1, flags.shape.rank)) if is_chunk else None
    return tf.reduce_any(flags, axis=axes)


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


def check_there(name: str, columns: Mapping[str, Any], argument: str) -> None:
    """Raises if an element has no column of a name."""
    if name not in columns:
        raise ValueError(
            f"`{argument}` has column {name!r}, and elements have {tuple(columns)!r}; "
            "expected the same names ('x' for inputs that are one tensor). Rename "
            f"them, or leave it out of `{argument}`."
        )


def _check_columns(
    rules: Sequence[ColumnRule] | None, columns: Mapping[str, Any]
) -> None:
    """Raises unless the columns are those that statistics were taken of."""
    for rule in rules or ():
        check_there(rule.name, columns, "statistics")
        check_column(columns[rule.name], rule)
        if rule.scalar and columns[rule.name].shape.rank not in (0, None):
            raise ValueError(
                f"Column {rule.name!r} has shape {columns[rule.name].shape}, and "
                "`statistics` were taken of scalars; expected shape (). Fit them on "
                "elements like these."
            )


def _check_finds(
    rules: Sequence[ColumnRule] | None, columns: Mapping[str, Any], missing: str
) -> None:
    """Raises where no value can be missing, so that a rule would do nothing."""
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
