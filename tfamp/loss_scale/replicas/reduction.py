"""In which dtypes, and in how large packs, replicas add up their gradients.

A loss that is weighted by the examples of a replica gives gradients that already are
the replica's part of the whole batch's, and float16 takes them at the loss scale. So
their sum leaves its range only where one device's gradient of the whole batch would.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.keras_hooks.variables import dtypes_read
from tfamp.keras_hooks.workers import summed
from tfamp.loss_scale.gradients import multiplied

REDUCE_DTYPES = (None, "auto", "float16", "bfloat16")


def check_reduction(reduce_dtype: Any, bytes_per_pack: Any) -> None:
    """Raises where one of two arguments of `LossScaleOptimizer` is out of range."""
    if reduce_dtype not in REDUCE_DTYPES:
        raise ValueError(
            f"Unknown `reduce_dtype` {reduce_dtype!r}; expected one of {REDUCE_DTYPES}."
            " Pass 'auto' for the dtype that each layer computes in."
        )
    is_int = isinstance(bytes_per_pack, int) and not isinstance(bytes_per_pack, bool)
    if not is_int or bytes_per_pack < 0:
        raise ValueError(
            f"`bytes_per_pack` is {bytes_per_pack!r}; expected a number of bytes, or 0 "
            "for one pack of all. Pass 2**25, which is 32 MiB."
        )


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients of replicas are added up.

    Attributes:
        dtype: What gradients in float32 are sent in; None for as they are.
        bytes_per_pack: The size above which a pack of gradients is closed, 0 for one
            pack of all.
    """

    dtype: str | None = None
    bytes_per_pack: int = 0

    @property
    def is_default(self) -> bool:
        """Whether gradients are added up as TensorFlow does it."""
        return self.dtype is None and not self.bytes_per_pack

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
        reduced = self._summed(context, [*sent, *numbers])
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

    def _summed(self, context: Any, values: Sequence[Any]) -> list[Any]:
        if not self.bytes_per_pack:
            return summed(context, values)
        options = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=self.bytes_per_pack
        )
        return summed(context, values, options)

    def say_unused(self, num_replicas: int) -> None:
        """Says once that there is nothing to add up."""
        if num_replicas == 1 and not self.is_default:
            _say_once(
                "`reduce_dtype=%r` and `bytes_per_pack=%r` have no effect: one replica "
                "trains, which sends no gradients. Make and compile the model in "
                "`with tfamp.distribute.strategy().scope():`.",
                self.dtype,
                self.bytes_per_pack,
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
