"""What is done to gradients: multiplied in float32, and measured."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.optimizers import in_xla

# Under XLA each reduction is a kernel of its own, which 200 small variables make slow
# to compile; gradients of one size up to this are reduced together.
_MAX_STACKED_ELEMENTS = 2**16


def multiplied(gradient: Any, factor: Any, dtype: Any = None) -> Any:
    """Returns `gradient` times a float32 scalar, in float32 at least or in `dtype`."""
    if isinstance(gradient, tf.IndexedSlices):
        values = multiplied(gradient.values, factor, dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    wide = tf.cast(gradient, tf.float32) if gradient.dtype.size < 4 else gradient
    return tf.cast(wide * tf.cast(factor, wide.dtype), dtype or wide.dtype)


def sums_of_squares(gradients: Sequence[Any]) -> tf.Tensor:
    """Returns the sum of the squares of each gradient: shape (gradients,), float32.

    A sum is non-finite where an element is, or where the sum leaves float32. Rows of
    `tf.IndexedSlices` with the same index are added up first.

    Example:
        >>> sums_of_squares([tf.constant([3.0, 4.0]), tf.constant([[2.0]])]).numpy()
        array([25.,  4.], dtype=float32)
    """
    is_compiled = in_xla()
    tensors = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices) and not is_compiled:
            rows = multiplied(gradient, 1.0)
            unique, at = tf.unique(rows.indices)
            gradient = tf.math.unsorted_segment_sum(rows.values, at, tf.size(unique))
        tensors.append(tf.cast(tf.convert_to_tensor(gradient), tf.float32))
    if not is_compiled:
        return tf.stack([2 * tf.nn.l2_loss(tensor) for tensor in tensors])
    by_size: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        is_large = size is None or size > _MAX_STACKED_ELEMENTS
        by_size.setdefault(-position - 1 if is_large else size, []).append(position)
    parts, order = [], list[int]()
    for positions in by_size.values():
        if len(positions) == 1:
            tensor = tensors[positions[0]]
            has_rows = (tensor.shape.rank or 0) > 1
            sums = _sum_of_last(tensor) if has_rows else tf.square(tensor)
            parts.append(tf.reduce_sum(sums)[None])
        else:
            rows = [tf.reshape(tensors[p], [-1]) for p in positions]
            parts.append(_sum_of_last(tf.stack(rows)))
        order += positions
    inverse = [order.index(position) for position in range(len(tensors))]
    return tf.gather(tf.concat(parts, 0), inverse)


def _sum_of_last(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the sums of squares over the last axis.

    On CPUs XLA multiplies matrices on all cores and sums on one.
    """
    squares = tf.square(tensor)
    if tf.config.list_physical_devices("GPU"):
        return tf.reduce_sum(squares, -1)
    return tf.linalg.matvec(squares, tf.ones(tf.shape(squares)[-1:]))
