"""Compares train with validation, column by column, with a stated error rate.

Numbers by the two-sample Kolmogorov-Smirnov test, categories by chi-square. Of an
example with many values (an image) its mean is compared, since values of one
example are no independent draws.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data.health.features import number, place
from tfamp.data.health.labels import Labels
from tfamp.data.health.profile import Profile
from tfamp.records import checks
from tfamp.records.findings import Finding
from tfamp.records.units import format_share

RULES = ("drift",)
# Chance of any false alarm over all columns together, where nothing drifted.
ERROR_RATE = 0.01
# What is significant in large data may still be a trifle: the distributions have
# to differ by this much, as the largest difference of their cumulative shares, or
# as the share of examples that would have to change category.
MIN_DIFFERENCE = 0.1
# Integers with at most so many values are categories.
_MAX_CATEGORIES = 32
# Chi-square wants so many expected examples in a cell.
_MIN_EXPECTED = 5.0
# Below this no difference can be told from chance.
_MIN_ROWS = 20


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One column of train against the same of validation.

    Attributes:
        column: The column or feature.
        difference: In [0, 1]: how far the distributions are apart.
        p_value: Chance of such a difference where nothing drifted.
        message: What moved, with the figures.
    """

    column: str
    difference: float
    p_value: float
    message: str


def _stats() -> Any:
    return checks.require("scipy.stats", extra="data", purpose="The rule on drift")


def kolmogorov_smirnov(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Returns the largest difference of two empirical distributions, and its p-value.

    The p-value is the asymptotic one; with ties it is too large, so it errs to
    silence.
    """
    found = _stats().ks_2samp(first, second, method="asymp")
    return float(found.statistic), float(found.pvalue)


def chi_square(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Returns the share of examples that differ in category, and the p-value.

    Args:
        first: Examples of each category in one set.
        second: The same of the other set. Rare categories are joined to one.
    """
    table = np.stack([first, second]).astype(np.float64)
    shares = table / table.sum(axis=1, keepdims=True)
    difference = float(np.abs(shares[0] - shares[1]).sum() / 2)
    smallest = table.sum(axis=0) * (table.sum(axis=1).min() / table.sum())
    rare = smallest < _MIN_EXPECTED
    if rare.any():
        joined = table[:, rare].sum(axis=1, keepdims=True)
        table = np.concatenate([table[:, ~rare], joined], axis=1)
    if table.shape[1] < 2:
        return difference, 1.0
    found = _stats().chi2_contingency(table, correction=False)
    return difference, float(found.pvalue)


def compare(train: Profile, validation: Profile) -> Iterator[Comparison]:
    """Yields the comparison of each feature of a column."""
    if train.column.is_text:
        words = [profile.sample[:, 0] for profile in (train, validation)]
        if min(map(len, words)) >= _MIN_ROWS:
            yield _categories(train.column.name, *words)
        return
    samples = train.example_means, validation.example_means
    if min(map(len, samples)) < _MIN_ROWS:
        return
    for feature in range(train.num_features):
        pair = [_finite(sample[:, feature]) for sample in samples]
        if min(map(len, pair)) < _MIN_ROWS:
            continue
        name = place(train, feature)
        integers = all(part.dtype.kind in "iub" for part in pair)
        if integers and len(np.unique(np.concatenate(pair))) <= _MAX_CATEGORIES:
            yield _categories(name, *pair)
        else:
            yield _numbers(name, *pair)


def compare_labels(train: Labels, validation: Labels) -> Iterator[Comparison]:
    """Yields the comparison of a target column that holds classes, if it does."""
    if not validation.counts:
        return
    classes = sorted({*train.counts, *validation.counts})
    first, second = (
        np.array([labels.counts.get(value, 0) for value in classes])
        for labels in (train, validation)
    )
    if min(first.sum(), second.sum()) >= _MIN_ROWS and len(classes) > 1:
        yield _compare_counts(train.column.name, classes, first, second)


def find(comparisons: list[Comparison]) -> Iterator[Finding]:
    """Yields the columns that drifted, the furthest apart first.

    A p-value counts if it is below `ERROR_RATE` over the number of comparisons
    (Bonferroni), so the chance of any false alarm stays below `ERROR_RATE`.
    """
    limit = ERROR_RATE / max(1, len(comparisons))
    for comparison in sorted(comparisons, key=lambda c: -c.difference):
        if comparison.p_value >= limit or comparison.difference < MIN_DIFFERENCE:
            continue
        yield Finding(
            "drift",
            "warning",
            f"{comparison.message}: the validation score tells of other data than "
            "that trained on.",
            "Shuffle before splitting; where the split is meant (by time, by place), "
            "expect the score to differ.",
            column=comparison.column,
            figure=comparison.difference,
            details={
                "p_value": comparison.p_value,
                "num_comparisons": len(comparisons),
            },
        )


def _finite(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "iub":
        return values
    values = values.astype(np.float64)
    return values[np.isfinite(values)]


def _numbers(name: str, first: np.ndarray, second: np.ndarray) -> Comparison:
    difference, p_value = kolmogorov_smirnov(first, second)
    middles = [number(float(np.median(part))) for part in (first, second)]
    return Comparison(
        name,
        difference,
        p_value,
        f"{name} differs between train and validation by {format_share(difference)} "
        f"in its distribution (Kolmogorov-Smirnov; medians {middles[0]} and "
        f"{middles[1]})",
    )


def _categories(name: str, first: np.ndarray, second: np.ndarray) -> Comparison:
    values, codes = np.unique(np.concatenate([first, second]), return_inverse=True)
    codes = codes.reshape(-1)
    counts = [
        np.bincount(part, minlength=len(values))
        for part in (codes[: len(first)], codes[len(first) :])
    ]
    return _compare_counts(name, values.tolist(), counts[0], counts[1])


def _compare_counts(
    name: str, values: list[Any], first: np.ndarray, second: np.ndarray
) -> Comparison:
    difference, p_value = chi_square(first, second)
    shares = first / first.sum(), second / second.sum()
    most = int(np.abs(shares[0] - shares[1]).argmax())
    return Comparison(
        name,
        difference,
        p_value,
        f"{name} has {format_share(difference)} of its examples in other categories "
        f"in validation than in train (chi-square; {values[most]!r}: "
        f"{format_share(shares[0][most])} and {format_share(shares[1][most])})",
    )
