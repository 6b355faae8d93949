"""What a filter does to the columns of one element: a frozen record for each rule."""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import TENSOR
from tfamp.data.statistics.conditioning import (
    ColumnRule,
    check_column,
    fill_missing_text,
    is_missing_tensor,
)
from tfamp.records import checks

Columns = dict[str, tf.Tensor]
Shape = tuple[int | None, ...]


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


@dataclasses.dataclass(frozen=True)
class Reshape(Rule):
    """Gives columns one shape each, None for any size, or acts on those of others."""

    reason: ClassVar[str] = "other shape"
    shapes: tuple[tuple[str, Shape], ...]
    action: str

    @property
    def drops(self) -> bool:  # type: ignore[override]
        """Whether elements of another shape go."""
        return self.action == "drop"

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        shapes = [
            str(shape) if name == TENSOR else f"{name} {shape}"
            for name, shape in self.shapes
        ]
        return f"shape {', '.join(shapes)} or {self.action.replace('_', ' ')}"

    def check(self, columns: Mapping[str, Any]) -> None:
        """Raises if a column is missing, never fits, or cannot be padded."""
        for name, shape in self.shapes:
            _check_there(name, columns, "shape")
            spec = columns[name]
            fits = spec.shape.is_compatible_with(shape)
            expected = "a shape that elements can have"
            if self.action == "crop_or_pad":
                fits = spec.shape.rank == len(shape) and spec.dtype != tf.string
                expected = "numbers with as many axes"
            if not fits:
                raise ValueError(
                    f"`shape` is {shape!r} for column {name!r}, which has shape "
                    f"{spec.shape} and dtype {spec.dtype.name}; expected {expected}. "
                    "Correct `shape`, or set the shape in `.map`."
                )

    def act(self, columns: Columns) -> tuple[Columns, tf.Tensor]:
        """Returns columns of the shapes, and whether the element had another."""
        is_bad, changed = tf.constant(False), dict(columns)
        for name, shape in self.shapes:
            values = columns[name]
            fits = _has_shape(values, shape)
            if self.action == "crop_or_pad":
                changed[name] = crop_or_pad(values, shape)
            elif self.action == "error":
                # TensorFlow writes quotes with a backslash, so there are none.
                text = (
                    f"Column {name} has shape {{}}; expected {shape} (`shape`). Drop "
                    "such elements with another `shape_action`, or resize them."
                )
                message = tf.strings.format(text, tf.shape(values))
                with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
                    changed[name] = tf.ensure_shape(tf.identity(values), shape)
            else:
                is_bad |= ~fits
                # What goes needs the shape too, so that all elements have one spec.
                empty = tf.zeros([size or 0 for size in shape], values.dtype)
                kept = tf.cond(fits, lambda v=values: v, lambda e=empty: e)
                changed[name] = tf.ensure_shape(kept, shape)
        return changed, is_bad


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


def _check_there(name: str, columns: Mapping[str, Any], argument: str) -> None:
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
        _check_there(rule.name, columns, "statistics")
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


def shapes_of(shape: Any) -> tuple[tuple[str, Shape], ...]:
    """Returns column and shape from one shape or a dict of them.

    Example:
        >>> shapes_of((28, None)), shapes_of({"image": [8, 8]})
        ((('x', (28, None)),), (('image', (8, 8)),))
    """

    def checked(sizes: Any) -> Shape:
        if not isinstance(sizes, (tuple, list)):
            raise TypeError(
                f"`shape` is {sizes!r}, of type {type(sizes).__name__}; expected a "
                "tuple of sizes, None for any. Pass `(28, 28, 1)`, or a dict of such "
                "tuples by column."
            )
        whole = checks.positive_int
        return tuple(None if n is None else whole("shape", n) for n in sizes)

    shapes = shape if isinstance(shape, Mapping) else {TENSOR: shape}
    return tuple((name, checked(sizes)) for name, sizes in shapes.items())


def crop_or_pad(values: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Returns the middle of a tensor, with zeros around it where it is too small.

    Example:
        >>> crop_or_pad(tf.range(5), (3,)).numpy(), crop_or_pad([7, 8], (5,)).numpy()
        (array([1, 2, 3], dtype=int32), array([0, 7, 8, 0, 0], dtype=int32))
    """
    sizes = tf.shape(values)
    wanted = tf.stack(
        [sizes[axis] if size is None else size for axis, size in enumerate(shape)]
    )
    cut = tf.maximum(sizes - wanted, 0)
    values = tf.slice(values, cut // 2, tf.minimum(sizes, wanted))
    lack = tf.maximum(wanted - sizes, 0)
    values = tf.pad(values, tf.stack([lack // 2, lack - lack // 2], axis=1))
    return tf.ensure_shape(values, shape)


def _has_shape(values: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Returns whether a tensor has a shape, known only when it comes."""
    if values.shape.rank is not None and values.shape.rank != len(shape):
        return tf.constant(False)
    wanted = tf.constant([-1 if size is None else size for size in shape], tf.int32)
    return tf.cond(
        tf.equal(tf.rank(values), len(shape)),
        lambda: tf.reduce_all((tf.shape(values) == wanted) | (wanted < 0)),
        lambda: False,
    )
