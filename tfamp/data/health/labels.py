"""Rules on targets and weights: range, classes and their balance."""

import collections
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfamp.data._examples import Column
from tfamp.data.health.profile import Hits, Profile, Rounding, finite
from tfamp.records.findings import Finding
from tfamp.records.units import format_share, number

RULES = ("weights", "labels", "one_hot", "balance", "unseen_class")
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


class Labels:
    """Counts the values of one target column, or the classes of its one-hot rows."""

    def __init__(self, column: Column) -> None:
        self.column = column
        width = column.shape[-1] if column.shape else 1
        numbers = column.is_float or column.is_integer or column.dtype == "bool"
        self.is_one_hot = len(column.shape) == 1 and (width or 0) > 1 and numbers
        self.counts: collections.Counter[Any] = collections.Counter()
        # One-hot rows seen, those that do not sum to 1, and of these those whose sum is
        # a whole number, such as 0 or 2.
        self.num_rows = self.num_off = self.num_off_integral = 0
        self._in_range = True
        # The one value of rows that are 0 elsewhere, None before and after another.
        self.hot_value: float | None = None
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
        sums = values.sum(axis=1)
        off = ~(np.abs(sums - 1) <= _SUM_TOLERANCE)
        self.num_rows += len(rows)
        self.num_off += int(off.sum())
        binary = ((values == 0) | (values == 1)).all(axis=1)
        self.num_off_integral += int((off & binary).sum())
        if not ((values >= 0) & (values <= 1)).all():
            self._in_range = False
        self._has_one_value &= bool((np.count_nonzero(values, axis=1) == 1).all())
        highest = {*values.max(axis=1).tolist(), self.hot_value or values.max()}
        self._has_one_value &= len(highest) == 1
        self.hot_value = highest.pop() if self._has_one_value else None
        return values[~off].argmax(axis=1)


def find(
    train: Labels, validation: Labels | None, num_classes: int | None
) -> Iterator[Finding]:
    """Yields what is wrong with the labels of one target column."""
    if train.is_one_hot and train.hot_value not in (None, 0.0, 1.0):
        yield _scaled(train)
    if not train.are_classes:
        return
    if train.is_one_hot:
        yield from _one_hot(train)
    elif not train.column.is_text and train.column.dtype != "bool":
        yield from _range(train, num_classes)
    yield from _balance(train)
    if validation is not None:
        yield from _unseen(train, validation)


def find_out_of_range(profile: Profile, rounding: Rounding) -> Iterator[Finding]:
    """Yields targets that layers in a compute dtype cannot give, and bad weights."""
    if profile.column.role == "target":
        yield from _unreachable(profile, rounding)
    elif profile.column.role == "weight":
        yield from _weights(profile)


def _one_hot(labels: Labels) -> Iterator[Finding]:
    if not labels.num_off:
        return
    name, share = labels.column.name, labels.num_off / labels.num_rows
    several = labels.num_off == labels.num_off_integral
    yield Finding(
        "one_hot",
        "note" if several else "warning",
        f"{name}: {labels.num_off:,} of {labels.num_rows:,} rows "
        f"({format_share(share)}) do not sum to 1: categorical crossentropy weights "
        "these examples by their sum, and rows of 0 teach nothing.",
        "Nothing if an example may have several classes (use binary crossentropy); "
        "else correct these rows."
        if several
        else "Divide each row by its sum, or correct the label map.",
        column=name,
        figure=share,
    )


def _range(labels: Labels, num_classes: int | None) -> Iterator[Finding]:
    """Whole numbers that sparse crossentropy cannot take as they are."""
    name = labels.column.name
    values = sorted(int(value) for value in labels.counts)
    if values[0] < 0:
        yield _negative(labels, values)
        return
    if num_classes is not None and values[-1] >= num_classes:
        beyond = [value for value in values if value >= num_classes]
        count = sum(labels.counts[value] for value in beyond)
        yield Finding(
            "labels",
            "error",
            f"{name} holds {count:,} labels from {beyond[0]} to {beyond[-1]} with "
            f"{num_classes} classes: sparse crossentropy stops on the CPU and gives "
            "NaN on GPUs and under XLA.",
            f"Labels run from 0 to {num_classes - 1}: subtract 1 if they start at 1, "
            "give the model more outputs, or mask them by `ignore_class`.",
            column=name,
            figure=float(beyond[-1]),
        )
        return
    if num_classes is None and (far := _far(labels, values)):
        yield _beyond(labels, values, far)
    num_missing = (num_classes or values[-1] + 1) - len(values)
    if num_missing and labels.are_countable:
        free = (value for value in itertools.count() if value not in labels.counts)
        listed = _listed(list(itertools.islice(free, min(num_missing, _MAX_NAMED + 1))))
        yield Finding(
            "labels",
            "warning" if num_classes is None else "note",
            f"{name} has {len(values)} classes from {values[0]} to {values[-1]}; "
            f"{num_missing} between 0 and the last are missing ({listed}): as "
            "many outputs as classes would be too few, and the missing ones are never "
            "learned.",
            "Map the labels to 0, 1, 2, ..., or pass `num_classes` if the missing ones "
            "exist.",
            column=name,
            figure=float(num_missing),
        )
    if labels.column.is_float and labels.are_countable and len(values) > 2:
        yield Finding(
            "labels",
            "note",
            f"{name} is {labels.column.dtype}, and every value is a whole number from "
            f"{values[0]} to {values[-1]}: classes, or a quantity?",
            "Cast classes to int32, so that a rounding can never move a label.",
            column=name,
            figure=float(len(values)),
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
    name, near = labels.column.name, values[: -len(far)]
    count = sum(labels.counts[value] for value in far)
    if near == [0]:
        beside, remedy = "beside 0", "Map the labels to 0 and 1, as by `y > 0`."
    else:
        beside = f"beside {near[0]} to {near[-1]}"
        remedy = (
            "Mask them by `ignore_class` if they mark what does not count, map them to "
            f"{near[-1] + 1}, or pass `num_classes` if the classes between exist."
        )
    return Finding(
        "labels",
        "warning",
        f"{name} holds {count:,} labels of {_listed(far)} {beside}: a model of as many "
        "classes has no output for them; sparse crossentropy stops on the CPU and "
        "gives NaN on GPUs and under XLA, binary crossentropy learns nonsense.",
        remedy,
        column=name,
        figure=float(far[-1]),
    )


def _scaled(labels: Labels) -> Finding:
    """Returns the finding about one-hot rows of another value than 1."""
    name, value = labels.column.name, float(labels.hot_value or 0.0)
    return Finding(
        "one_hot",
        "warning",
        f"{name}: rows are 0 but for one {number(value)}; one-hot rows hold a 1, and "
        "categorical crossentropy weights each example by this value.",
        f"Divide them by {number(value)}.",
        column=name,
        figure=value,
    )


def _negative(labels: Labels, values: list[int]) -> Finding:
    name = labels.column.name
    count = sum(number for value, number in labels.counts.items() if value < 0)
    two = values == [-1, 1]
    # One negative value is a mark for "ignore"; several are a quantity.
    mark = sum(value < 0 for value in values) == 1 and not two
    return Finding(
        "labels",
        "error" if mark and labels.column.is_integer else "note",
        f"{name} holds {count:,} negative labels, down to {values[0]}: right for "
        "hinge losses and quantities; sparse crossentropy stops on the CPU and gives "
        "NaN on GPUs and under XLA.",
        "Map -1 and 1 to 0 and 1 for crossentropy."
        if two
        else "Map the labels to 0, 1, 2, ..., or mask them by `ignore_class`.",
        column=name,
        figure=float(values[0]),
    )


def _balance(labels: Labels) -> Iterator[Finding]:
    if len(labels.counts) < 2 or not labels.are_countable:
        return
    counts, total = labels.counts, sum(labels.counts.values())
    rarest, commonest = (
        end(counts, key=lambda value: counts[value]) for end in (min, max)
    )
    rare, ratio = counts[rarest], counts[commonest] / counts[rarest]
    if ratio < _UNEVEN:
        return
    yield Finding(
        "balance",
        "warning" if ratio >= _VERY_UNEVEN else "note",
        f"{labels.column.name}: class {_word(rarest)} has {rare:,} of {total:,} "
        f"examples ({format_share(rare / total)}), {number(ratio)} times fewer than "
        f"class {_word(commonest)}: always answering that one is right in "
        f"{format_share(counts[commonest] / total)}.",
        "Use `Pipeline.balance` or `class_weight`, and judge by recall of each class.",
        column=labels.column.name,
        figure=rare / total,
        details={"num_classes": len(counts), "ratio": ratio},
    )


def _unseen(train: Labels, validation: Labels) -> Iterator[Finding]:
    if not train.are_countable or not validation.counts:
        return
    new = sorted(set(validation.counts) - set(train.counts))
    absent = sorted(set(train.counts) - set(validation.counts))
    name = train.column.name
    if new:
        count = sum(validation.counts[value] for value in new)
        yield Finding(
            "unseen_class",
            "error",
            f"{name}: {len(new)} classes of the validation data ({_listed(new)}) are "
            f"not in the training data; {count:,} validation examples can never be "
            "right.",
            "Split the data by class (stratified), or drop these examples.",
            column=name,
            figure=float(count),
        )
    if absent:
        yield Finding(
            "unseen_class",
            "note",
            f"{name}: {len(absent)} classes of the training data ({_listed(absent)}) "
            "are not in the validation data, which cannot tell how well they are "
            "learned.",
            "Split the data by class (stratified).",
            column=name,
            figure=float(len(absent)),
        )


def _unreachable(profile: Profile, rounding: Rounding) -> Iterator[Finding]:
    """Targets that are fine for the loss, but that no output layer can give."""
    limit = rounding.format.max
    largest = profile.largest.astype(float)
    beyond = (largest > limit) & (profile.num_finite > 0)
    found = Hits(profile, beyond & (profile.num_overflows == 0), largest)
    if not found or profile.column.is_integer:
        return
    yield found.finding(
        "overflow",
        "warning",
        f"has targets up to {number(largest[found.worst])}; an output layer in "
        f"{rounding.name} ends at {number(limit)}, so the loss stays large or inf.",
        "Divide the targets by their standard deviation, or keep the output layer in "
        "float32, as `tfamp.enable` does.",
        figure=largest[found.worst],
    )


def _weights(profile: Profile) -> Iterator[Finding]:
    no_weight = (profile.num_nonzero == 0) & (profile.num_nan == 0)
    found = Hits(profile, no_weight & no_weight.all(), profile.count)
    if found:
        yield found.finding(
            "weights",
            "error",
            "is 0 for every example: nothing is learned.",
            "Give positive weights, or leave them out.",
            figure=0.0,
        )
    found = Hits(profile, profile.low < 0, -profile.low.astype(float))
    if found:
        lowest = profile.low[found.worst]
        yield found.finding(
            "weights",
            "warning",
            f"goes down to {number(lowest)}: a negative weight makes training raise "
            "the loss of that example.",
            "Clip the weights at 0.",
            figure=lowest,
        )


def _listed(values: list[Any]) -> str:
    """Returns the first classes for a message."""
    more = ["..."] if len(values) > _MAX_NAMED else []
    return ", ".join([*map(_word, values[:_MAX_NAMED]), *more])


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return repr(value.decode("utf-8", "replace"))
    return number(value) if isinstance(value, float) else repr(value)
