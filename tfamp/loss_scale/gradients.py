"""Sums of gradients: their squares for check, norm and clipping, and over replicas.

Replicas add up their gradients in a dtype that can be chosen. A loss that is weighted
by the examples of a replica gives gradients that already are the replica's part of the
whole batch's, and float16 takes them at the loss scale. So their sum leaves its range
only where one device's gradient of the whole batch would.
"""

import functools
from collections.abc import Callable, Sequence
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
    inverse = [order.index(position) for position in range(len(tensors))]
    return tf.gather(tf.concat(parts, 0), inverse)


def multiplied(gradient: Any, factor: tf.Tensor) -> Any:
    """Returns `gradient` times a float32 scalar, in float32 at least."""

    def multiply(values: tf.Tensor) -> tf.Tensor:
        wide = tf.cast(values, tf.float32) if values.dtype.size < 4 else values
        return wide * tf.cast(factor, wide.dtype)

    return _of_values(multiply, gradient)


def _of_values(change: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return change(gradient)
    values = change(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _elements(gradient: Any) -> tf.Tensor:
    """Returns a tensor with the elements that count, in any shape."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    wide = multiplied(gradient, tf.constant(1.0))
    if in_xla():  # `tf.unique` has no static shape
        return tf.convert_to_tensor(wide)
    unique, positions = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(wide.values, positions, tf.size(unique))


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


def check_reduce_dtype(dtype: Any) -> None:
    """Raises where gradients cannot be sent in a dtype."""
    if dtype not in REDUCE_DTYPES:
        raise ValueError(
            f"Unknown `reduce_dtype` {dtype!r}; expected one of {REDUCE_DTYPES}. Pass "
            "'auto' for the dtype that each layer computes in."
        )


def reduced(
    dtype: str | None,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    numbers: Sequence[tf.Tensor],
    *,
    scale: tf.Tensor | None,
) -> tuple[list[Any], list[Any]]:
    """Returns the sums over all replicas of gradients and of numbers beside them.

    Gradients may be None, and come out in the dtype that they have; those in float32
    are sent in `dtype`. `variables` has None for those to leave alone. `scale` is the
    loss scale where it is not in the gradients, else None.
    """
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        if dtype is not None:
            _say_once(
                "`reduce_dtype=%r` has no effect: one replica trains, which sends no "
                "gradients. Make and compile the model in `with "
                "tfamp.distribute.strategy().scope():`.",
                dtype,
            )
        return list(gradients), list(numbers)
    narrow = _dtypes_sent(dtype, gradients, variables)
    present = [place for place, g in enumerate(gradients) if g is not None]

    def sent(place: int) -> Any:
        gradient, to = gradients[place], narrow[place]
        if to is None:
            return gradient
        if to == tf.float16 and scale is not None:
            gradient = multiplied(gradient, scale)
        return _of_values(lambda values: tf.cast(values, to), gradient)

    def received(place: int, total: Any) -> Any:
        if narrow[place] is None:
            return total
        factor = 1 / scale if total.dtype == tf.float16 and scale is not None else 1.0
        return multiplied(total, factor)

    found = summed(context, [*map(sent, present), *numbers])
    sums = list(gradients)
    for place, total in zip(present, found[: len(present)], strict=True):
        sums[place] = received(place, total)
    return sums, found[len(present) :]


def _dtypes_sent(
    dtype: str | None, gradients: Sequence[Any], variables: Sequence[Any]
) -> list[tf.DType | None]:
    """Returns the dtype that each gradient is sent in, None for its own."""
    found: list[tf.DType | None] = [None] * len(gradients)
    unseen = []
    for place, (gradient, variable) in enumerate(
        zip(gradients, variables, strict=True)
    ):
        is_left = dtype is None or gradient is None or variable is None
        if is_left or gradient.dtype != tf.float32:
            continue
        dtypes = dtypes_read(variable) if dtype == "auto" else {dtype}
        if not dtypes:
            unseen.append(variable.path)
        if len(dtypes) == 1 and not dtypes.isdisjoint(REDUCE_DTYPES):
            found[place] = tf.as_dtype(*dtypes)
    has_half = any(g is not None and g.dtype.size < 4 for g in gradients)
    if dtype == "auto" and not (has_half or any(found)):
        _say_once(
            "`reduce_dtype='auto'` leaves gradients in float32: none of %d variables "
            "was read by a layer that computes in half precision.",
            len(gradients),
        )
    elif unseen:
        _say_once(
            "`reduce_dtype='auto'` leaves gradients of %r in float32, since no layer "
            "was seen to read it.",
            unseen[0],
        )
    return found


@functools.cache
def _say_once(text: str, *values: Any) -> None:
    logging.warning(text, *values)
