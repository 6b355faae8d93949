"""The rule of a filter that gives columns one shape."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import TENSOR
from tfamp.data.stages.filter_rules import Columns, Rule, check_there
from tfamp.records import checks

Shape = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Reshape(Rule):
    """Gives columns one shape each, in which None stands for any size.

    `action` for others is "drop", "error" or "crop_or_pad".
    """

    reason: ClassVar[str] = "other shape"
    takes_chunks: ClassVar[bool] = False
    shapes: tuple[tuple[str, Shape], ...]
    action: str

    @property
    def drops(self) -> bool:  # type: ignore[override]
        """Whether elements may go because of it."""
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
            check_there(name, columns, "shape")
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

    def act(self, columns: Columns, *, is_chunk: bool) -> tuple[Columns, tf.Tensor]:
        """Returns columns of the shapes, and whether the element had another."""
        is_bad, changed = tf.constant(False), dict(columns)
        for name, shape in self.shapes:
            values = columns[name]
            if self.action == "crop_or_pad":
                changed[name] = crop_or_pad(values, shape)
                continue
            fits = _has_shape(values, shape)
            if self.action == "error":
                # TensorFlow writes quotes with a backslash, so there are none.
                message = tf.strings.format(
                    f"Column {name} has shape {{}}; expected {shape} (`shape`). Drop "
                    "such elements with another `shape_action`, or resize them.",
                    tf.shape(values),
                )
                with tf.control_dependencies([tf.debugging.Assert(fits, [message])]):
                    changed[name] = tf.ensure_shape(tf.identity(values), shape)
                continue
            is_bad = tf.logical_or(is_bad, tf.logical_not(fits))
            # What goes needs the shape too, so that all elements have one spec.
            empty = tf.zeros([size or 0 for size in shape], values.dtype)
            kept = tf.cond(fits, lambda v=values: v, lambda e=empty: e)
            changed[name] = tf.ensure_shape(kept, shape)
        return changed, is_bad


def shapes_of(shape: Any) -> tuple[tuple[str, Shape], ...]:
    """Returns column and shape from one shape or a dict of them.

    Raises:
        TypeError: A shape is no tuple of sizes and None.
        ValueError: A size is below 1.

    Example:
        >>> shapes_of((28, None)), shapes_of({"image": [8, 8]})
        ((('x', (28, None)),), (('image', (8, 8)),))
    """
    shapes = dict(shape) if isinstance(shape, Mapping) else {TENSOR: shape}
    for sizes in shapes.values():
        if not isinstance(sizes, (tuple, list)):
            raise TypeError(
                f"`shape` is {sizes!r}, of type {type(sizes).__name__}; expected a "
                "tuple of sizes, None for any. Pass `(28, 28, 1)`, or a dict of such "
                "tuples by column."
            )
    checked = {
        name: tuple(n if n is None else checks.positive_int("shape", n) for n in sizes)
        for name, sizes in shapes.items()
    }
    return tuple(checked.items())


def crop_or_pad(values: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Returns the middle of a tensor, with zeros around it where it is too small.

    Where the difference is odd, one more is cut from, or added to, the end.

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
    sizes = tf.shape(values)
    fits = tf.equal(tf.rank(values), len(shape))
    for axis, size in enumerate(shape):
        if size is not None:
            fits = tf.cond(
                fits, lambda a=axis, s=size: tf.equal(sizes[a], s), lambda: False
            )
    return fits
