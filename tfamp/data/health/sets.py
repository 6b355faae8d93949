"""Labels, examples that come twice, and what differs between train and validation."""

import collections
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data.health.columns import Profile
from tfamp.records import checks
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

RULES = ("labels", "duplicates")
COMPARING = ("leak", "unseen_class", "drift")
# More distinct values than this are no classes, and would fill the memory.
_MAX_CLASSES, _MAX_NAMED = 20_000, 8
# Labels that mark what does not count, or are of masks that were saved as pictures.
_MARKS = {99, 100, 127, 254, 255, 999, 9999, 65535}
# Shares of train and of validation worth a warning.
_MANY_DUPLICATES, _MIN_LEAK, _LARGE_LEAK = 0.01, 0.001, 0.1
# With fewer distinct rows than this, equal rows are no surprise.
_MIN_DISTINCT = 0.5
# Chance of any false alarm of drift over all columns together; the largest difference
# of cumulative shares that is a trifle, be it significant; too few examples to tell.
_ERROR_RATE, _MIN_DIFFERENCE, _MIN_ROWS = 0.01, 0.1, 20


class Classes:
    """Counts the values of a target column, as long as they may be classes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: collections.Counter[Any] = collections.Counter()
        self._may_be = True

    def update(self, chunk: np.ndarray) -> None:
        """Takes the labels of the next examples."""
        if not self._may_be:
            return
        if chunk.dtype.kind not in "iubOSU":
            chunk = chunk.astype(np.float64)
            chunk = chunk[np.isfinite(chunk)]
            self._may_be = bool((chunk == np.floor(chunk)).all())
        values, counts = np.unique(chunk.ravel(), return_counts=True)
        self.counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._may_be &= len(self.counts) <= _MAX_CLASSES

    @property
    def are_classes(self) -> bool:
        """Whether the values are classes rather than quantities: each comes often."""
        repeat = 2 * len(self.counts) <= sum(self.counts.values())
        return self._may_be and bool(self.counts) and repeat


def find_labels(
    train: Classes, validation: Classes | None, num_classes: int | None
) -> Iterator[Finding]:
    """Yields labels that a classifier's loss cannot take, or has never seen."""
    if not train.are_classes:
        return
    name, counts, are_classes = train.name, train.counts, True
    if not any(isinstance(value, (str, bytes)) for value in counts):
        values = sorted(int(value) for value in counts)
        # Most numbers up to the largest are there, so they count classes.
        are_classes = 2 * len(values) >= values[-1] + 1 - min(values[0], 1)
        odd = _out_of_classes(values, num_classes, are_classes)
        if odd:
            many = sum(counts[value] for value in odd)
            sure = num_classes is not None or odd[0] < 0
            yield Finding(
                *("labels", "error" if sure else "warning"),
                f"{name} holds {many:,} labels of {_listed(odd)}, with "
                f"{num_classes or len(values)} classes from {values[0]} to "
                f"{values[-1]}: no output stands for them; sparse crossentropy stops "
                "on the CPU and gives NaN on GPUs and by XLA.",
                "Map the labels to 0, 1, 2, ... (`y > 0` for two classes), mask them "
                "by `ignore_class` if they mark what does not count, or pass "
                "`num_classes` if the classes between exist.",
                column=name,
                figure=float(many),
            )
    new = sorted(set(validation.counts) - set(counts)) if validation else []
    if validation and new and are_classes:
        many = sum(validation.counts[value] for value in new)
        yield Finding(
            *("unseen_class", "error"),
            f"{name} has {len(new)} classes in the validation data ({_listed(new)}) "
            f"that are not in the training data; {many:,} validation examples can "
            "never be right.",
            "Split the data by class (stratified), or drop these examples.",
            column=name,
            figure=float(many),
        )


def _out_of_classes(
    values: list[int], num_classes: int | None, are_classes: bool
) -> list[int]:
    """Returns the labels, of those that occur, that are none of 0, 1, 2, ...

    Without a number of classes that is for labels of which most, or all but one or two
    far ones, are next to one another.

    Example:
        >>> _out_of_classes([0, 1, 2, 255], None, False)
        [255]
        >>> _out_of_classes([1990, 2005, 2020], None, False)
        []
    """
    negative = [value for value in values if value < 0]
    if negative:
        # One is a mark for "ignore"; of two classes it is right for hinge losses, and
        # several are a quantity.
        return negative if len(negative) == 1 and len(values) > 2 else []
    if num_classes is not None:
        return [value for value in values if value >= num_classes]
    near = [value for place, value in enumerate(values) if value == values[0] + place]
    end, far = near[-1] + 1, values[len(near) :]
    is_far = 0 < len(far) < 3 and (far[0] in _MARKS or far[0] >= 10 * end)
    if are_classes or (is_far and values[0] < 2):
        return [value for value in values if value >= len(values)]
    return []


class RowKeys:
    """A 64-bit key of the inputs of each example.

    Of 4 million different rows two agree by chance once in 2 million sets. 0.0 and -0.0
    differ, as do NaNs of different bits.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def update(self, inputs: list[np.ndarray]) -> None:
        """Takes the columns of the next examples."""
        for parts in zip(*map(_bytes_of_rows, inputs), strict=True):
            digest = hashlib.blake2b(digest_size=8)
            for part in parts:
                digest.update(part)
            self._parts.append(digest.digest())

    def keys(self) -> np.ndarray:
        """Returns the keys seen, one an example."""
        return np.frombuffer(b"".join(self._parts), "<u8")


def _bytes_of_rows(column: np.ndarray) -> list[Any]:
    """Returns the bytes of each row, the same for equal numbers of other dtypes."""
    flat = column.reshape(len(column), -1)
    if column.dtype.kind in "OSU":  # with the lengths, so that none run together
        return [repr(row.tolist()).encode() for row in flat]
    wide = np.ascontiguousarray(flat, "i8" if column.dtype.kind in "iub" else "f8")
    return list(wide.view(np.uint8)) if flat.size else [b""] * len(column)


def find_equal(train: RowKeys, validation: RowKeys | None) -> Iterator[Finding]:
    """Yields equal examples and what they do to the result."""
    keys = train.keys()
    others = validation.keys() if validation else keys[:0]
    distinct = np.unique(keys)
    few = len(distinct) < _MIN_DISTINCT * len(keys)
    natural = ", which is natural with so few distinct ones" if few else ""
    copies, leaked = len(keys) - len(distinct), int(np.isin(others, distinct).sum())
    if copies:
        share = copies / len(keys)
        yield Finding(
            *("duplicates", "note" if few or share < _MANY_DUPLICATES else "warning"),
            f"{format_share(share)} of the training examples repeat the inputs of "
            f"another one ({copies:,} of {len(keys):,}): they count double in the "
            f"loss{natural}.",
            "Nothing." if few else "Drop the copies, unless they are meant as weights.",
            figure=share,
        )
    if leaked:
        share = leaked / len(others)
        severity: Severity = "error" if share >= _LARGE_LEAK else "warning"
        yield Finding(
            *("leak", "note" if few or share < _MIN_LEAK else severity),
            f"{format_share(share)} of the validation examples ({leaked:,} of "
            f"{len(others):,}) have inputs that are in the training data{natural}: the "
            "validation score is better than new data will give.",
            "Split by a hash of the inputs, or by what belongs together (person, day).",
            figure=share,
        )


def find_drift(pairs: list[tuple[Profile, Profile]]) -> Iterator[Finding]:
    """Yields the columns that differ between train and validation (Kolmogorov).

    Of an example with many values (an image) its mean is compared, since values of one
    example are no independent draws; texts are compared in the order of the alphabet. A
    p-value counts if it is below `_ERROR_RATE` over the number of comparisons
    (Bonferroni). With ties it is too large, so it errs to silence.
    """
    stats = checks.require("scipy.stats", extra="data", purpose="The rule on drift")
    found = []
    for train, validation in pairs:
        samples = [train.sample.rows(), validation.sample.rows()]
        if not all(sample.size for sample in samples):
            continue
        for feature in range(train.num_features):
            parts = [sample[:, feature] for sample in samples]
            if train.column.is_text:
                codes = np.unique(np.concatenate(parts), return_inverse=True)[1]
                parts = np.split(codes.reshape(-1), [len(parts[0])])
            parts = [part.astype(np.float64) for part in parts]
            parts = [part[np.isfinite(part)] for part in parts]
            if min(map(len, parts)) >= _MIN_ROWS:
                test = stats.ks_2samp(*parts, method="asymp")
                middles = [number(float(np.median(part))) for part in parts]
                found.append((train.place(feature), test, middles))
    for name, test, middles in sorted(found, key=lambda one: -one[1].statistic):
        is_sure = test.pvalue < _ERROR_RATE / len(found)
        if is_sure and test.statistic >= _MIN_DIFFERENCE:
            yield Finding(
                *("drift", "warning"),
                f"{name} differs between train and validation by "
                f"{format_share(float(test.statistic))} in its distribution "
                f"(Kolmogorov-Smirnov; medians {middles[0]} and {middles[1]}): the "
                "validation score tells of other data than that trained on.",
                "Shuffle before splitting; where the split is meant (by time, by "
                "place), expect the score to differ.",
                column=name,
                figure=float(test.statistic),
                details={"p_value": float(test.pvalue)},
            )


def _listed(values: list[Any]) -> str:
    """Returns the first classes for a message."""
    more = ["..."] if len(values) > _MAX_NAMED else []
    return ", ".join([*map(repr, values[:_MAX_NAMED]), *more])
