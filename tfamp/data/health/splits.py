"""Compares train with validation: drift of each column, and examples with equal inputs.

Numbers are compared by the two-sample Kolmogorov-Smirnov test, categories by
chi-square. Of an example with many values (an image) its mean is compared, since
values of one example are no independent draws.

Rows are compared by a 64-bit hash of their bytes: of 4 million different rows two agree
by chance once in 2 million sets. 0.0 and -0.0 differ, as do NaNs of different bits.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data.health.labels import Labels
from tfamp.data.health.profile import Profile, finite
from tfamp.records import checks
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

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
# Hashes held of one data set, 16 bytes each: 64 MiB. Beyond, a fixed part of all
# hash values is kept, of both sets, so shares stay right.
_MAX_HELD = 2**22
# Shares of train and of validation worth a warning.
_MANY_DUPLICATES, _MIN_LEAK, _LARGE_LEAK = 0.01, 0.001, 0.1
# With fewer distinct rows than this, equal rows are no surprise.
_MIN_DISTINCT = 0.5


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One column or feature of train against the same of validation.

    `difference`, in [0, 1], says how far the distributions are apart, `p_value` is the
    chance of that where nothing drifted, `message` says what moved.
    """

    column: str
    difference: float
    p_value: float
    message: str


def compare(train: Profile, validation: Profile) -> Iterator[Comparison]:
    """Yields the comparison of each feature of a column."""
    both, is_text = (train, validation), train.column.is_text
    if min(len(profile.sample) for profile in both) < _MIN_ROWS:
        return
    samples = [profile.sample if is_text else profile.example_means for profile in both]
    for feature in range(train.num_features):
        pair = [part[:, feature] for part in samples]
        pair = pair if is_text else [finite(part) for part in pair]
        if min(map(len, pair)) < _MIN_ROWS:
            continue
        if is_text or all(part.dtype.kind in "iub" for part in pair):
            values, codes = np.unique(np.concatenate(pair), return_inverse=True)
            if is_text or len(values) <= _MAX_CATEGORIES:
                parts = np.split(codes.reshape(-1), [len(pair[0])])
                counts = [np.bincount(part, minlength=len(values)) for part in parts]
                yield _categories(train.place(feature), values.tolist(), *counts)
                continue
        yield _numbers(train.place(feature), *pair)


def compare_labels(train: Labels, validation: Labels) -> Iterator[Comparison]:
    """Yields the comparison of a target column that holds classes, if both do."""
    classes = sorted({*train.counts, *validation.counts})
    first = np.array([train.counts[value] for value in classes])
    second = np.array([validation.counts[value] for value in classes])
    if min(first.sum(), second.sum()) >= _MIN_ROWS and len(classes) > 1:
        yield _categories(train.column.name, classes, first, second)


def _numbers(name: str, first: np.ndarray, second: np.ndarray) -> Comparison:
    """Compares numbers; with ties the p-value is too large, so it errs to silence."""
    found = _scipy_stats().ks_2samp(first, second, method="asymp")
    middles = [number(float(np.median(part))) for part in (first, second)]
    message = (
        f"{name} differs between train and validation by "
        f"{format_share(float(found.statistic))} in its distribution "
        f"(Kolmogorov-Smirnov; medians {middles[0]} and {middles[1]})"
    )
    return Comparison(name, float(found.statistic), float(found.pvalue), message)


def _categories(
    name: str, values: list[Any], first: np.ndarray, second: np.ndarray
) -> Comparison:
    """Compares the examples of each category in either set; rare ones are joined."""
    table = np.stack([first, second]).astype(np.float64)
    shares = table / table.sum(axis=1, keepdims=True)
    difference, p_value = float(np.abs(shares[0] - shares[1]).sum() / 2), 1.0
    smallest = table.sum(axis=0) * (table.sum(axis=1).min() / table.sum())
    rare = smallest < _MIN_EXPECTED
    if rare.any():
        joined = table[:, rare].sum(axis=1, keepdims=True)
        table = np.concatenate([table[:, ~rare], joined], axis=1)
    if table.shape[1] > 1:
        test = _scipy_stats().chi2_contingency(table, correction=False)
        p_value = float(test.pvalue)
    most = int(np.abs(shares[0] - shares[1]).argmax())
    message = (
        f"{name} has {format_share(difference)} of its examples in other categories "
        f"in validation than in train (chi-square; {values[most]!r}: "
        f"{format_share(shares[0][most])} and {format_share(shares[1][most])})"
    )
    return Comparison(name, difference, p_value, message)


def _scipy_stats() -> Any:
    return checks.require("scipy.stats", extra="data", purpose="The rule on drift")


def find_drift(comparisons: list[Comparison]) -> Iterator[Finding]:
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
            details={"p_value": comparison.p_value},
        )


class RowHashes:
    """A 64-bit hash of the inputs of each example.

    Beyond `_MAX_HELD` rows every second one is kept, by its hash, then every fourth,
    and so on: 1 in 2**`skipped_bits` of the `num_rows` seen.
    """

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []
        self._held = self.num_rows = self.skipped_bits = 0

    def update(self, inputs: list[np.ndarray]) -> None:
        """Takes the columns of the next examples."""
        if not inputs:
            return
        found = []
        for parts in zip(*map(_bytes_of_rows, inputs), strict=True):
            digest = hashlib.blake2b(digest_size=8)
            for part in parts:
                digest.update(part)
            found.append(digest.digest())
        keys = np.frombuffer(b"".join(found), "<u8")
        self.num_rows += len(keys)
        self._parts.append(_thinned(keys, self.skipped_bits))
        self._held += len(self._parts[-1])
        while self._held > _MAX_HELD:
            self._held = len(self.thin(self.skipped_bits + 1))

    def thin(self, bits: int) -> np.ndarray:
        """Returns 1 in 2**bits of the hashes, which alone are kept."""
        held = np.concatenate([np.empty(0, np.uint64), *self._parts])
        self._parts, self.skipped_bits = [_thinned(held, bits)], bits
        return self._parts[0]


def _thinned(keys: np.ndarray, bits: int) -> np.ndarray:
    return keys[(keys & np.uint64(2**bits - 1)) == 0]


def _bytes_of_rows(column: np.ndarray) -> list[Any]:
    """Returns the bytes of each row; text with its lengths, so none run together."""
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    if column.dtype.kind in "OSU":
        return [repr(row.tolist()).encode() for row in flat]
    raw = flat.view(np.uint8) if flat.size else np.zeros((len(column), 1), np.uint8)
    return list(raw)


def find_equal(train: RowHashes, validation: RowHashes | None) -> Iterator[Finding]:
    """Yields equal examples and what they do to the result."""
    both = [train] if validation is None else [train, validation]
    bits = max(hashes.skipped_bits for hashes in both)
    keys, *others = [hashes.thin(bits) for hashes in both]
    if not len(keys):
        return
    distinct = np.unique(keys)
    about = "about " if bits else ""
    few = len(distinct) < _MIN_DISTINCT * len(keys)
    natural = ", which is natural with so few distinct ones" if few else ""
    share = 1 - len(distinct) / len(keys)
    if share:
        yield Finding(
            "duplicates",
            "note" if few or share < _MANY_DUPLICATES else "warning",
            f"{about}{format_share(share)} of the training examples repeat the inputs "
            f"of another one ({about}{round(share * train.num_rows):,} of "
            f"{train.num_rows:,}): they count double in the loss{natural}.",
            "Nothing." if few else "Drop the copies, unless they are meant as weights.",
            figure=share,
        )
    leaked = float(np.isin(others[0], distinct).mean()) if others else 0.0
    if validation is not None and leaked > 0:
        count = round(leaked * validation.num_rows)
        severity: Severity = "error" if leaked >= _LARGE_LEAK else "warning"
        yield Finding(
            "leak",
            "note" if few or leaked < _MIN_LEAK else severity,
            f"{about}{format_share(leaked)} of the validation examples ({about}"
            f"{count:,} of {validation.num_rows:,}) have inputs that are in the "
            f"training data{natural}: the validation score is better than new data "
            "will give.",
            "Split by a hash of the inputs, or by what belongs together (person, day).",
            figure=leaked,
        )
