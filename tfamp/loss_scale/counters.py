"""The variables of a loss-scale optimizer: scale, counters, history, accumulators."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.loss_scale.rule import ScaleState


class NonfiniteCounts:
    """Counts, for each variable, the skipped steps it had a part in."""

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


HISTORY_STEPS = 1024
# Codes of `ScaleState.is_frozen`. What was static by its constructor is told apart
# from what was frozen later, so that a file's scale goes to its own kind.
FROZEN = 1
STATIC, STATIC_SET, STATIC_RELEASED = 2, 3, -1
STATIC_BORN = (STATIC, STATIC_SET, STATIC_RELEASED)
# The whole numbers and the real ones of a `ScaleState`, in the order of files.
_WHOLE, _REAL = slice(2, 12), slice(12, None)
COUNTERS, LEVELS = ScaleState._fields[_WHOLE], ScaleState._fields[_REAL]


class ScaleVariables:
    """Two vectors, the scale and its counter, kept as few variables as can be.

    Each variable costs a step a read and a write, whatever its size. `add_variable`
    makes one from `shape`, `dtype`, `name` and `initializer`; the other two are Keras's
    own.
    """

    def __init__(
        self,
        step_counter: Any,
        dynamic_scale: Any,
        add_variable: Callable[..., Any],
        *,
        is_static: bool,
        is_probing: bool,
    ) -> None:
        start = ScaleState(
            scale=1.0,
            is_frozen=STATIC if is_static else 0,
            is_probing=int(is_probing),
        )
        self.step_counter = step_counter
        self.dynamic_scale = dynamic_scale
        self.counters = add_variable(
            shape=(len(COUNTERS),),
            dtype="int64",
            name="counters",
            initializer=lambda shape, dtype: tf.constant(start[_WHOLE], dtype),
        )
        self.levels = add_variable(
            shape=(len(LEVELS),), dtype="float32", name="levels", initializer="zeros"
        )
        self.recent = add_variable(
            shape=(HISTORY_STEPS, 3),
            dtype="float32",
            name="recent_steps",
            initializer="zeros",
        )

    def read(self) -> ScaleState:
        """Returns the present values as scalar tensors."""
        return ScaleState(
            tf.convert_to_tensor(self.dynamic_scale.value),
            tf.cast(self.step_counter.value, tf.int64),
            *tf.unstack(tf.convert_to_tensor(self.counters.value)),
            *tf.unstack(tf.convert_to_tensor(self.levels.value)),
        )

    def write(self, state: ScaleState) -> None:
        """Stores numbers, or what a step has made of those that were read."""
        self.dynamic_scale.assign(state.scale)
        self.step_counter.assign(state.good_steps)
        self.counters.assign(tf.stack([tf.cast(x, tf.int64) for x in state[_WHOLE]]))
        self.levels.assign(tf.stack([tf.cast(x, tf.float32) for x in state[_REAL]]))

    def remember(self, judged: tf.Tensor, *facts: Any) -> None:
        """Puts one step's scale, norm and verdict into the ring of recent steps."""
        slot = judged % HISTORY_STEPS
        row = tf.stack([tf.cast(x, tf.float32) for x in facts])
        recent = tf.convert_to_tensor(self.recent.value)
        self.recent.assign(tf.tensor_scatter_nd_update(recent, [[slot]], [row]))

    def numbers(self) -> ScaleState:
        """Returns the present values as plain numbers; reads from the device."""
        # Not `np.asarray`, which fails on a distributed scalar inside a scope.
        return ScaleState(
            float(self.dynamic_scale.numpy()),
            int(self.step_counter.numpy()),
            *self.counters.numpy().tolist(),
            *self.levels.numpy().tolist(),
        )
