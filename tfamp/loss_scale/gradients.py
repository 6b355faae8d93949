"""Sums of squares: one pass over the gradients serves check, norm and clipping."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.optimizers import in_xla

# Under XLA each reduction is a kernel of its own, which 200 small variables make
# slow to compile; gradients of one size up to this are reduced together.
_MAX_STACKED_ELEMENTS = 2**16


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


def largest_magnitude(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the largest magnitude among all elements, a float32 scalar."""
    tensors = [tf.cast(_elements(g), tf.float32) for g in gradients]
    return tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(t)) for t in tensors]))


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
    return _summation()(tensor)


@functools.cache
def _summation() -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the fastest sum over the last axis on the devices here.

    On a CPU XLA multiplies matrices on all cores and sums on one. On a GPU a
    product may round to TF32, and sums are fast.
    """
    if tf.config.list_physical_devices("GPU"):
        return lambda tensor: tf.reduce_sum(tensor, -1)

    def by_product(tensor: tf.Tensor) -> tf.Tensor:
        return tf.linalg.matvec(tensor, tf.ones(tf.shape(tensor)[-1:]))

    return by_product
