"""Which variables had non-finite gradients, written down when a step is skipped."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class Blame:
    """Counts, for each variable, the skipped steps it had a part in.

    Args:
        variables: The variables of the optimizer.
        key_of: Gives what tells a variable apart.
        add_variable: Makes a variable from `shape`, `dtype` and `name`.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        key_of: Callable[[Any], Any],
        add_variable: Callable[..., Any],
    ) -> None:
        self._names = [getattr(v, "path", v.name) for v in variables]
        self._positions = {key_of(v): i for i, v in enumerate(variables)}
        self._key_of = key_of
        # Row 0: in how many skipped steps. Row 1: whether in the last one.
        shape = (2, len(self._names))
        self.counts = add_variable(shape=shape, dtype="int64", name="blame")

    def note(self, variables: Sequence[Any], squares: tf.Tensor) -> None:
        """Stores whose sum of squares is not finite; shape (variables,)."""
        if not variables:
            return
        indices = [[self._positions[self._key_of(v)]] for v in variables]
        flags = tf.cast(~tf.math.is_finite(squares), tf.int64)
        last = tf.scatter_nd(indices, flags, [len(self._names)])
        counts = tf.convert_to_tensor(self.counts.value)[0] + last
        self.counts.assign(tf.stack([counts, last]))

    def last(self) -> tuple[str, ...]:
        """Returns the paths of the variables to blame for the last skipped step."""
        flags = np.asarray(self.counts.value)[1]
        return tuple(n for n, flag in zip(self._names, flags, strict=True) if flag)

    def total(self) -> dict[str, int]:
        """Returns the number of skipped steps for each variable that had any."""
        counts = np.asarray(self.counts.value)[0].tolist()
        return {n: c for n, c in zip(self._names, counts, strict=True) if c}
