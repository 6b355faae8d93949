"""The rules about outliers: elements go, or values are set to their limits."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data.stages.filter_rules import (
    Columns,
    Rule,
    any_in,
    check_columns,
    declared,
)
from tfamp.data.statistics import Statistics, TextColumn
from tfamp.data.statistics.conditioning import ColumnRule, is_missing_tensor
from tfamp.data.statistics.options import collapses, outlier_limits


@dataclasses.dataclass(frozen=True)
class Limits(Rule):
    """What is common to the rules about outliers.

    Attributes:
        columns: The lowest and highest value of each feature.
    """

    columns: tuple[ColumnRule, ...]

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises unless all columns of the statistics are there."""
        check_columns(self.columns, columns, "statistics")


@dataclasses.dataclass(frozen=True)
class DropOutliers(Limits):
    """Drops elements with a value beyond its limits."""

    drops: ClassVar[bool] = True
    reason: ClassVar[str] = "outlier"

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return "drop outliers"

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns the columns as they are, and whether a value lies beyond."""
        found = []
        for rule in self.columns:
            values = tf.cast(columns[rule.name], tf.float64)
            absent = is_missing_tensor(columns[rule.name], rule.missing_values)
            lower, upper = _limits(rule)
            beyond = tf.logical_or(values < lower, values > upper)
            is_out = tf.logical_and(beyond, tf.logical_not(absent))
            found.append(any_in(is_out, is_chunk))
        return columns, tf.reduce_any(tf.stack(found), axis=0)


@dataclasses.dataclass(frozen=True)
class Clip(Limits):
    """Sets values beyond their limits to the limit."""

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return "clip outliers"

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


def limits_of(statistics: Statistics, rule: Any) -> tuple[ColumnRule, ...]:
    """Returns the limits of outliers for each column of numbers.

    Args:
        statistics: Of the training data.
        rule: As `check_rule` returns it.

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
        rules.append(
            dataclasses.replace(
                declared(column),
                lower=tuple(lower.tolist()),
                upper=tuple(upper.tolist()),
            )
        )
    if not rules:
        raise ValueError(
            f"`outliers` is {rule!r}, and all columns of `statistics` are text; "
            "expected numbers. Leave `outliers` out."
        )
    return tuple(rules)


def _limits(rule: ColumnRule) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the limits of a column as float64 constants."""
    pair = (rule.lower, rule.upper)
    lower, upper = (
        tf.constant(side[0] if rule.scalar else side, tf.float64) for side in pair
    )
    return lower, upper
