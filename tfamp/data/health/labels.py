"""Rules on targets: range, classes and their balance."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data._examples import Column
from tfamp.data.health.profile import finite
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

RULES = ("labels", "one_hot", "balance", "unseen_class")
# More distinct values than this are no classes, and would fill the memory.
_MAX_CLASSES = 20_000
# Rows of one-hot or soft labels sum to 1 but for rounding, in float16 too.
_SUM_TOLERANCE = 1e-2
_MOSTLY = 0.5
# The commonest class against the rarest.
_UNEVEN, _VERY_UNEVEN = 10, 100
_MAX_NAMED = 8
# Labels that mark what does not count, or are of masks that were saved as pictures.
_MARKS = {99, 100, 127, 254, 255, 999, 9999, 65535}
_OUT_OF_RANGE = "sparse crossentropy stops on the CPU and gives NaN on GPUs and by XLA"


class Labels:
    """Counts the values of one target column, or the classes of its one-hot rows."""

    def __init__(self, column: Column) -> None:
        self.column = column
        width = column.shape[-1] if column.shape else 1
        self.is_one_hot = (
            len(column.shape) == 1 and (width or 0) > 1 and not column.is_text
        )
        self.counts: collections.Counter[Any] = collections.Counter()
        # One-hot rows seen, those that do not sum to 1, and of these those whose sum is
        # a whole number, such as 0 or 2.
        self.num_rows = self.num_off = self.num_off_integral = 0
        self._in_range = True
        # The values of rows that are 0 but for one.
        self.hot_values: set[float] = set()
        self._has_one_value = True
        self._too_many = False

    @property
    def are_classes(self) -> bool:
        """Whether the values are classes rather than quantities."""
        if self._too_many or not self.counts:
            return False
        if self.is_one_hot:
            return self._in_range and self.num_off < _MOSTLY * self.num_rows
        if self.column.is_float:
            return all(float(value).is_integer() for value in self.counts)
        return 2 * len(self.counts) <= sum(self.counts.values())

    @property
    def are_countable(self) -> bool:
        """Whether they are classes beyond doubt, so that their shares mean something.

        Whole numbers are if there are few, mostly next to one another.
        """
        if not self.are_classes:
            return False
        if self.is_one_hot or self.column.is_text or self.column.dtype == "bool":
            return True
        values = [int(value) for value in self.counts]
        span = max(values) - min(*values, 1) + 1
        repeated = sum(self.counts.values()) >= 2 * len(values)
        return repeated and len(values) >= _MOSTLY * span

    def update(self, chunk: np.ndarray) -> None:
        """Takes the labels of the next examples."""
        if self._too_many or not chunk.size:
            return
        if self.is_one_hot:
            chunk = self._classes_of_rows(chunk)
        elif self.column.is_float:
            chunk = finite(chunk)
        values, counts = np.unique(chunk.ravel(), return_counts=True)
        self.counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self._too_many = len(self.counts) > _MAX_CLASSES

    def _classes_of_rows(self, rows: np.ndarray) -> np.ndarray:
        values = rows.astype(np.float64)
        off = ~(np.abs(values.sum(axis=1) - 1) <= _SUM_TOLERANCE)
        self.num_rows += len(rows)
        self.num_off += int(off.sum())
        binary = ((values == 0) | (values == 1)).all(axis=1)
        self.num_off_integral += int((off & binary).sum())
        self._in_range &= bool(((values >= 0) & (values <= 1)).all())
        self._has_one_value &= bool((np.count_nonzero(values, axis=1) == 1).all())
        if self._has_one_value and len(self.hot_values) < 2:
            self.hot_values |= set(values.max(axis=1).tolist())
        return values[~off].argmax(axis=1)

    @property
    def hot_value(self) -> float:
        """The one value of rows that are 0 elsewhere, 1 where that is no such value."""
        is_one = self._has_one_value and len(self.hot_values) == 1
        return next(iter(self.hot_values)) if is_one else 1.0

    def finding(
        self, rule: str, severity: Severity, message: str, remedy: str, figure: float
    ) -> Finding:
        """Returns a finding about the column."""
        name = self.column.name
        return Finding(
            rule, severity, f"{name} {message}", remedy, column=name, figure=figure
        )


def find(
    train: Labels, validation: Labels | None, num_classes: int | None
) -> Iterator[Finding]:
    """Yields what is wrong with the labels of one target column."""
    if train.is_one_hot and train.hot_value != 1.0:
        value = number(train.hot_value)
        yield train.finding(
            "one_hot",
            "warning",
            f"has rows that are 0 but for one {value}; one-hot rows hold a 1, and "
            "categorical crossentropy weights each example by this value.",
            f"Divide them by {value}.",
            train.hot_value,
        )
    if not train.are_classes:
        return
    if train.is_one_hot:
        yield from _one_hot(train)
    elif not train.column.is_text and train.column.dtype != "bool":
        yield from _range(train, num_classes)
    yield from _balance(train)
    if validation is not None:
        yield from _unseen(train, validation)


def _one_hot(labels: Labels) -> Iterator[Finding]:
    if not labels.num_off:
        return
    share = labels.num_off / labels.num_rows
    several = labels.num_off == labels.num_off_integral
    yield labels.finding(
        "one_hot",
        "note" if several else "warning",
        f"has {labels.num_off:,} of {labels.num_rows:,} rows ({format_share(share)}) "
        "that do not sum to 1: categorical crossentropy weights these examples by "
        "their sum, and rows of 0 teach nothing.",
        "Nothing if an example may have several classes (use binary crossentropy); "
        "else divide each row by its sum, or correct the label map.",
        share,
    )


def _range(labels: Labels, num_classes: int | None) -> Iterator[Finding]:
    """Whole numbers that sparse crossentropy cannot take as they are."""
    values = sorted(int(value) for value in labels.counts)
    if values[0] < 0:
        yield _negative(labels, values)
        return
    beyond = [value for value in values if num_classes and value >= num_classes]
    if beyond:
        count = sum(labels.counts[value] for value in beyond)
        yield labels.finding(
            "labels",
            "error",
            f"holds {count:,} labels from {beyond[0]} to {beyond[-1]} with "
            f"{num_classes} classes: {_OUT_OF_RANGE}.",
            f"Labels run from 0 to {(num_classes or 1) - 1}: subtract 1 if they start "
            "at 1, give the model more outputs, or mask them by `ignore_class`.",
            float(beyond[-1]),
        )
        return
    if num_classes is None and (far := _far(labels, values)):
        yield _beyond(labels, values, far)
    num_missing = (num_classes or values[-1] + 1) - len(values)
    if num_missing and labels.are_countable:
        free = (value for value in itertools.count() if value not in labels.counts)
        missing = list(itertools.islice(free, min(num_missing, _MAX_NAMED + 1)))
        yield labels.finding(
            "labels",
            "warning" if num_classes is None else "note",
            f"has {len(values)} classes from {values[0]} to {values[-1]}; "
            f"{num_missing} between 0 and the last are missing ({_listed(missing)}): "
            "as many outputs as classes would be too few, and the missing ones are "
            "never learned.",
            "Map the labels to 0, 1, 2, ..., or pass `num_classes` if the missing ones "
            "exist.",
            float(num_missing),
        )


def _far(labels: Labels, values: list[int]) -> list[int]:
    """Returns one or two labels far beyond others that are next to one another."""
    if labels.are_countable or sum(labels.counts.values()) < 2 * len(values):
        return []
    first, far = min(values[0], 1), values[-1:]
    if len(values) > 2 and values[-2] in _MARKS:
        far = values[-2:]
    near = values[: -len(far)]
    are_next = bool(near) and near == list(range(near[0], near[0] + len(near)))
    is_far = far[0] in _MARKS or far[0] >= 10 * (len(near) + first)
    return far if are_next and near[0] == first and is_far else []


def _beyond(labels: Labels, values: list[int], far: list[int]) -> Finding:
    """Returns the finding about labels that no output of a model stands for."""
    near = values[: -len(far)]
    count = sum(labels.counts[value] for value in far)
    return labels.finding(
        "labels",
        "warning",
        f"holds {count:,} labels of {_listed(far)} beside {_listed(near)}: a model of "
        f"as many classes has no output for them; {_OUT_OF_RANGE}, binary crossentropy "
        "learns nonsense.",
        "Map the labels to 0 and 1, as by `y > 0`."
        if near == [0]
        else "Mask them by `ignore_class` if they mark what does not count, map them "
        f"to {near[-1] + 1}, or pass `num_classes` if the classes between exist.",
        float(far[-1]),
    )


def _negative(labels: Labels, values: list[int]) -> Finding:
    count = sum(number for value, number in labels.counts.items() if value < 0)
    two = values == [-1, 1]
    # One negative value is a mark for "ignore"; several are a quantity.
    mark = sum(value < 0 for value in values) == 1 and not two
    return labels.finding(
        "labels",
        "error" if mark and labels.column.is_integer else "note",
        f"holds {count:,} negative labels, down to {values[0]}: right for hinge losses "
        f"and quantities; {_OUT_OF_RANGE}.",
        "Map -1 and 1 to 0 and 1 for crossentropy."
        if two
        else "Map the labels to 0, 1, 2, ..., or mask them by `ignore_class`.",
        float(values[0]),
    )


def _balance(labels: Labels) -> Iterator[Finding]:
    if len(labels.counts) < 2 or not labels.are_countable:
        return
    ordered, total = labels.counts.most_common(), sum(labels.counts.values())
    (commonest, many), (rarest, rare) = ordered[0], ordered[-1]
    if many / rare < _UNEVEN:
        return
    yield labels.finding(
        "balance",
        "warning" if many / rare >= _VERY_UNEVEN else "note",
        f"has class {_word(rarest)} in {rare:,} of {total:,} examples "
        f"({format_share(rare / total)}), {number(many / rare)} times fewer than "
        f"class {_word(commonest)}: always answering that one is right in "
        f"{format_share(many / total)}.",
        "Use `Pipeline.balance` or `class_weight`, and judge by recall of each class.",
        rare / total,
    )


def _unseen(train: Labels, validation: Labels) -> Iterator[Finding]:
    if not train.are_countable or not validation.counts:
        return
    new = sorted(set(validation.counts) - set(train.counts))
    absent = sorted(set(train.counts) - set(validation.counts))
    if new:
        count = sum(validation.counts[value] for value in new)
        yield train.finding(
            "unseen_class",
            "error",
            f"has {len(new)} classes in the validation data ({_listed(new)}) that are "
            f"not in the training data; {count:,} validation examples can never be "
            "right.",
            "Split the data by class (stratified), or drop these examples.",
            float(count),
        )
    if absent:
        yield train.finding(
            "unseen_class",
            "note",
            f"has {len(absent)} classes in the training data ({_listed(absent)}) that "
            "are not in the validation data, which cannot tell how well they are "
            "learned.",
            "Split the data by class (stratified).",
            float(len(absent)),
        )


def _listed(values: list[Any]) -> str:
    """Returns the first classes for a message."""
    more = ["..."] if len(values) > _MAX_NAMED else []
    return ", ".join([*map(_word, values[:_MAX_NAMED]), *more])


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return repr(value.decode("utf-8", "replace"))
    return number(value) if isinstance(value, float) else repr(value)
