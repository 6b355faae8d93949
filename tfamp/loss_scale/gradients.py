"""Sums of gradients: their squares for check, norm and clipping, and over replicas.

Replicas add up their gradients in a dtype that can be chosen. A loss that is weighted
by the examples of a replica gives gradients that already are the replica's part of the
whole batch's, and float16 takes them at the loss scale. So their sum leaves its range
only where one device's gradient of the whole batch would.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.optimizers import in_xla
from tfamp.keras_hooks.variables import dtypes_read
from tfamp.keras_hooks.workers import summed

# Under XLA each reduction is a kernel of its own, which 200 small variables make
# slow to compile; gradients of one size up to this are reduced together.
_MAX_STACKED_ELEMENTS = 2**16
REDUCE_DTYPES = (None, "auto", "float16", "bfloat16")


def sums_of_squares(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of each gradient: shape (gradients,), float32.

    A sum is non-finite where an element is, or where the sum leaves float32. Rows of
    `tf.IndexedSlices` with the same index are added up first.

    Example:
        >>> sums_of_squares([tf.constant([3.0, 4.0]), tf.constant([[2.0]])]).numpy()
        array([25.,  4.], dtype=float32)
    """
    tensors = [tf.cast(_elements(g), tf.float32) for g in gradients]
    if not in_xla():
        return tf.stack([2 * tf.nn.l2_loss(t) for t in tensors])
    by_size: dict[int | None, list[int]] = {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        is_large = size is None or size > _MAX_STACKED_ELEMENTS
        by_size.setdefault(-position - 1 if is_large else size, []).append(position)
    parts, order = [], []
    for positions in by_size.values():
        if len(positions) == 1:
            parts.append(_sum_of_rows(tensors[positions[0]])[None])
        else:
            rows = [tf.reshape(tensors[p], [-1]) for p in positions]
            parts.append(_sum_of_last(tf.square(tf.stack(rows))))
        order += positions
    if order == sorted(order):
        return tf.concat(parts, 0)
    inverse = [order.index(position) for position in range(len(tensors))]
    return tf.gather(tf.concat(parts, 0), inverse)


def multiplied(gradient: Any, factor: tf.Tensor) -> Any:
    """Returns `gradient` times a float32 scalar, in float32 at least."""
    if isinstance(gradient, tf.IndexedSlices):
        values = multiplied(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if gradient.dtype.size < 4:
        gradient = tf.cast(gradient, tf.float32)
    return gradient * tf.cast(factor, gradient.dtype)


def _elements(gradient: Any) -> tf.Tensor:
    """Returns a tensor with the elements that count, in any shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    values = gradient.values
    if values.dtype.size < 4:
        values = tf.cast(values, tf.float32)
    if in_xla():  # `tf.unique` has no static shape
        dense = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.convert_to_tensor(dense)
    unique, positions = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(unique))


def _sum_of_rows(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.shape.rank is None or tensor.shape.rank < 2:
        return tf.reduce_sum(tf.square(tensor))
    return tf.reduce_sum(_sum_of_last(tf.square(tensor)))


def _sum_of_last(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sum over the last axis, the fastest one on the devices here.

    On a CPU XLA multiplies matrices on all cores and sums on one. On a GPU a
    product may round to TF32, and sums are fast.
    """
    if tf.config.list_physical_devices("GPU"):
        return tf.reduce_sum(tensor, -1)
    return tf.linalg.matvec(tensor, tf.ones(tf.shape(tensor)[-1:]))


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients of replicas are added up.

    Attributes:
        dtype: What gradients in float32 are sent in; None for as they are.
    """

    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in REDUCE_DTYPES:
            raise ValueError(
                f"Unknown `reduce_dtype` {self.dtype!r}; expected one of "
                f"{REDUCE_DTYPES}. Pass 'auto' for the dtype that each layer computes "
                "in."
            )

    def sums(
        self,
        context: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        numbers: Sequence[tf.Tensor],
        *,
        scale: tf.Tensor | None,
    ) -> tuple[list[Any], list[Any]]:
        """Returns the sums over all replicas of gradients and of numbers beside them.

        Gradients may be None, and come out in the dtype that they have. `variables` has
        None for those to leave alone. `scale` is the loss scale where it is not in the
        gradients, else None.
        """
        sent_in = self.dtypes_of(gradients, variables)
        present = [place for place, g in enumerate(gradients) if g is not None]
        sent = [_narrowed(gradients[i], sent_in[i], scale) for i in present]
        reduced = summed(context, [*sent, *numbers])
        sums = list(gradients)
        for i, total in zip(present, reduced[: len(present)], strict=True):
            sums[i] = total if sent_in[i] is None else _widened(total, scale)
        return sums, reduced[len(present) :]

    def dtypes_of(
        self, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[tf.DType | None]:
        """Returns the dtype that each gradient is sent in, None for its own."""
        if self.dtype is None:
            return [None] * len(gradients)
        found: list[tf.DType | None] = []
        unseen = []
        for gradient, variable in zip(gradients, variables, strict=True):
            is_left = gradient is None or variable is None
            if is_left or gradient.dtype != tf.float32:
                found.append(None)
                continue
            if self.dtype != "auto":
                found.append(tf.as_dtype(self.dtype))
                continue
            dtypes = dtypes_read(variable)
            if not dtypes:
                unseen.append(variable.path)
            is_half = len(dtypes) == 1 and not dtypes.isdisjoint(REDUCE_DTYPES)
            found.append(tf.as_dtype(*dtypes) if is_half else None)
        has_half = any(g is not None and g.dtype.size < 4 for g in gradients)
        if self.dtype == "auto" and not (has_half or any(found)):
            _say_once(
                "`reduce_dtype='auto'` leaves gradients in float32: none of %d "
                "variables was read by a layer that computes in half precision.",
                len(gradients),
            )
        elif unseen:
            _say_once(
                "`reduce_dtype='auto'` leaves gradients of %r in float32, since no "
                "layer was seen to read it.",
                unseen[0],
            )
        return found

    def say_unused(self, num_replicas: int) -> None:
        """Says once that there is nothing to add up."""
        if num_replicas == 1 and self.dtype is not None:
            _say_once(
                "`reduce_dtype=%r` has no effect: one replica trains, which sends no "
                "gradients. Make and compile the model in `with "
                "tfamp.distribute.strategy().scope():`.",
                self.dtype,
            )


@functools.cache
def _say_once(text: str, *values: Any) -> None:
    logging.warning(text, *values)


def _narrowed(gradient: Any, dtype: tf.DType | None, scale: tf.Tensor | None) -> Any:
    if dtype is None:
        return gradient
    if dtype == tf.float16 and scale is not None:
        gradient = multiplied(gradient, scale)
    return _cast(gradient, dtype)


def _widened(total: Any, scale: tf.Tensor | None) -> Any:
    wide = _cast(total, tf.float32)
    if total.dtype == tf.float16 and scale is not None:
        return multiplied(wide, 1 / scale)
    return wide


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.cast(gradient.values, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)
