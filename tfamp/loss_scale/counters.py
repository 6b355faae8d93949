"""The variables of a loss-scale optimizer: scale, counters, history, accumulators."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
# Codes of `Counters.is_frozen`. What was static by its constructor is told apart
# from what was frozen later, so that a file's scale goes to its own kind.
FROZEN = 1
STATIC, STATIC_SET, STATIC_RELEASED = 2, 3, -1
STATIC_BORN = (STATIC, STATIC_SET, STATIC_RELEASED)


def select(condition: Any, yes: Any, no: Any) -> tf.Tensor:
    """Returns `tf.where`, with a plain number taking the dtype of the other value."""
    dtypes = [x.dtype for x in (yes, no) if tf.is_tensor(x)]
    if dtypes:
        yes, no = (tf.convert_to_tensor(x, dtypes[0]) for x in (yes, no))
    return tf.where(condition, yes, no)


class Counters(NamedTuple):
    """Whole numbers of a `ScaleVariables`, in the order in which they are stored."""

    judged: Any = 0  # steps, or microbatches, finite or not
    applied: Any = 0  # updates
    skipped: Any = 0  # steps, or microbatches, with non-finite gradients
    streak: Any = 0
    overflows: Any = 0
    num_stops: Any = 0
    is_frozen: Any = 0  # above 0 where the scale stays; one of the codes below
    is_probing: Any = 0
    microbatches: Any = 0  # in the present window of accumulation
    dropped: Any = 0  # windows in a row whose sum was not finite


class Levels(NamedTuple):
    """Real numbers of a `ScaleVariables`, in the order in which they are stored."""

    good_scale: Any = 0.0
    peak: Any = 0.0
    scale_before: Any = 0.0
    norm: Any = 0.0  # of the last step's unscaled gradients
    finite_norm: Any = 0.0  # the last one that was finite
    weight: Any = 0.0  # of the microbatches in the present window


class Snapshot(NamedTuple):
    """All that a step reads and writes, as tensors or as numbers."""

    scale: Any
    good_steps: Any
    counters: Counters
    levels: Levels

    @property
    def state(self) -> ScaleState:
        """The part that the scale rule goes by."""
        counters, levels = self.counters, self.levels
        return ScaleState(
            scale=self.scale,
            good_steps=self.good_steps,
            overflows=counters.overflows,
            streak=counters.streak,
            good_scale=levels.good_scale,
            peak=levels.peak,
            scale_before=levels.scale_before,
            num_stops=counters.num_stops,
            is_frozen=counters.is_frozen > 0,
        )

    def with_state(self, state: ScaleState) -> "Snapshot":
        """Returns the snapshot after the rule has been applied."""
        counters = self.counters._replace(
            overflows=state.overflows, streak=state.streak, num_stops=state.num_stops
        )
        levels = self.levels._replace(
            good_scale=state.good_scale,
            peak=state.peak,
            scale_before=state.scale_before,
        )
        return Snapshot(state.scale, state.good_steps, counters, levels)


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
        counters = Counters(
            is_frozen=STATIC if is_static else 0, is_probing=int(is_probing)
        )
        self.step_counter = step_counter
        self.dynamic_scale = dynamic_scale
        self.counters = add_variable(
            shape=(len(counters),),
            dtype="int64",
            name="counters",
            initializer=lambda shape, dtype: tf.constant(counters, dtype),
        )
        self.levels = add_variable(
            shape=(len(Levels()),), dtype="float32", name="levels", initializer="zeros"
        )
        self.recent = add_variable(
            shape=(HISTORY_STEPS, 3),
            dtype="float32",
            name="recent_steps",
            initializer="zeros",
        )

    def read(self) -> Snapshot:
        """Returns the present values as scalar tensors."""
        return Snapshot(
            tf.convert_to_tensor(self.dynamic_scale.value),
            tf.cast(self.step_counter.value, tf.int64),
            Counters(*tf.unstack(tf.convert_to_tensor(self.counters.value))),
            Levels(*tf.unstack(tf.convert_to_tensor(self.levels.value))),
        )

    def write(self, values: Snapshot) -> None:
        """Stores what a step has made of the values."""
        self.dynamic_scale.assign(values.scale)
        self.step_counter.assign(values.good_steps)
        self.counters.assign(tf.stack([tf.cast(x, tf.int64) for x in values.counters]))
        self.levels.assign(tf.stack([tf.cast(x, tf.float32) for x in values.levels]))

    def put(self, values: Snapshot) -> None:
        """Stores plain numbers."""
        self.dynamic_scale.assign(values.scale)
        self.step_counter.assign(values.good_steps)
        self.counters.assign(values.counters)
        self.levels.assign(values.levels)

    def remember(self, counters: Counters, *facts: Any) -> None:
        """Puts one step's scale, norm and verdict into the ring of recent steps."""
        slot = counters.judged % HISTORY_STEPS
        row = tf.stack([tf.cast(x, tf.float32) for x in facts])
        recent = tf.convert_to_tensor(self.recent.value)
        self.recent.assign(tf.tensor_scatter_nd_update(recent, [[slot]], [row]))

    def numbers(self) -> Snapshot:
        """Returns the present values as plain numbers; reads from the device."""
        # Not `np.asarray`, which fails on a distributed scalar inside a scope.
        counters = self.counters.numpy().tolist()
        levels = self.levels.numpy().tolist()
        return Snapshot(
            float(self.dynamic_scale.numpy()),
            int(self.step_counter.numpy()),
            Counters(*counters),
            Levels(*levels),
        )
