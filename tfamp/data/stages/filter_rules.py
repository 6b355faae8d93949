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
from tfamp.data.statistics.options import fill_text, fill_values

Columns = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """What every rule can do.

    Attributes:
        drops: Whether elements may go because of it.
        reason: Why they go; one of `_filters.REASONS`.
        takes_chunks: Whether it acts on many elements at once as on one.
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

        Args:
            columns: Of one element, or of a chunk of them, with an axis in front.
            is_chunk: Which of the two; of a chunk, an answer for each element.
        """


@dataclasses.dataclass(frozen=True)
class DropMissing(Rule):
    """Drops elements with a missing value.

    Attributes:
        columns: Rules of the columns to look at, None for NaN in all of them.
    """

    drops: ClassVar[bool] = True
    reason: ClassVar[str] = "missing value"
    columns: tuple[ColumnRule, ...] | None

    @classmethod
    def of(cls, statistics: Statistics | None) -> "DropMissing":
        """Returns the rule for the columns of statistics, or for all."""
        if statistics is None:
            return cls(None)
        return cls(tuple(declared(column) for column in statistics.columns))

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return "drop missing values"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if no column can have a missing value."""
        check_columns(self.columns, columns, "statistics")
        _check_finds(self.columns, columns, "drop")

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value is missing."""
        found = [
            any_in(_missing_in(columns[rule.name], rule), is_chunk)
            for rule in self.columns or _floats(columns)
        ]
        return columns, tf.reduce_any(tf.stack(found), axis=0)


@dataclasses.dataclass(frozen=True)
class Fill(Rule):
    """Fills missing values.

    Attributes:
        columns: What to fill in each column; None for `number` in all with floats.
        number: The number.
        how: What was asked for.
    """

    columns: tuple[ColumnRule, ...] | None
    number: float | None
    how: str

    @classmethod
    def from_statistics(cls, statistics: Statistics, how: str) -> "Fill":
        """Returns the rule that fills with means, medians or modes."""
        rules = []
        for column in statistics.columns:
            rule = declared(column)
            if isinstance(column, TextColumn):
                text = fill_text(column, how)
                rules.append(dataclasses.replace(rule, fill_text=text))
            else:
                fill = tuple(fill_values(column, how).tolist())
                rules.append(dataclasses.replace(rule, fill=fill))
        return cls(tuple(rules), None, how)

    @classmethod
    def with_number(cls, number: float) -> "Fill":
        """Returns the rule that writes one number for NaN."""
        return cls(None, number, repr(number))

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return f"fill missing values with {self.how}"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if nothing can be missing, or a fill can't be written."""
        check_columns(self.columns, columns, "statistics")
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


def any_in(flags: tf.Tensor, is_chunk: bool) -> tf.Tensor:
    """Returns whether any value of an element has a flag, for each of a chunk."""
    if not is_chunk:
        return tf.reduce_any(flags)
    return tf.reduce_any(flags, axis=list(range(1, flags.shape.rank)))


def check_there(name: str, columns: Mapping[str, Any], argument: str) -> None:
    """Raises if an element has no column of a name."""
    if name not in columns:
        raise ValueError(
            f"`{argument}` has column {name!r}, and elements have {tuple(columns)!r}; "
            "expected the same names ('x' for inputs that are one tensor). Rename "
            f"them, or leave it out of `{argument}`."
        )


def declared(column: Column | TextColumn) -> ColumnRule:
    """Returns what a column is like and what stands for a missing value in it."""
    if isinstance(column, TextColumn):
        return ColumnRule(
            name=column.name,
            text=True,
            scalar=column.scalar,
            missing_texts=column.missing_values,
        )
    # Without a limit or a fill, these numbers say how many features there are.
    return ColumnRule(
        name=column.name,
        text=False,
        scalar=column.scalar,
        missing_values=column.missing_values,
        fill=(math.nan,) * len(column.features),
    )


def _floats(columns: Mapping[str, Any]) -> Sequence[ColumnRule]:
    """Returns rules about NaN in all columns that can hold it."""
    return tuple(
        ColumnRule(name=name, text=False, scalar=True)
        for name, values in columns.items()
        if values.dtype.is_floating
    )


def check_columns(
    rules: Sequence[ColumnRule] | None, columns: Mapping[str, Any], argument: str
) -> None:
    """Raises unless the columns are those that statistics were taken of."""
    for rule in rules or ():
        check_there(rule.name, columns, argument)
        check_column(columns[rule.name], rule)
        rank = columns[rule.name].shape.rank
        if rule.scalar and rank not in (0, None):
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


def _missing_in(values: tf.Tensor, rule: ColumnRule) -> tf.Tensor:
    """Returns which values of a column are missing."""
    if not rule.text:
        return is_missing_tensor(values, rule.missing_values)
    missing = tf.zeros_like(values, tf.bool)
    for text in rule.missing_texts:
        missing = tf.logical_or(missing, tf.equal(values, text))
    return missing
