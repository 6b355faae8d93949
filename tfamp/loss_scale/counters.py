"""The variables of a loss-scale optimizer: scale, counters and its last steps.

It keeps totals and a ring of its last steps. Read now and then, the two give what each
step since the last reading added to the totals.
"""

import collections
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.loss_scale.rule import ScaleState

HISTORY_STEPS = 1024
# Of `ScaleState.is_frozen`: by `freeze`, or by the constructor.
FROZEN, STATIC = 1, 2
# The whole numbers and the real ones of a `ScaleState`, in the order of files.
_WHOLE, _REAL = slice(2, 11), slice(11, None)
COUNTERS, LEVELS = ScaleState._fields[_WHOLE], ScaleState._fields[_REAL]
# A rate in thousandths wants as many steps to be taken over.
RATE_STEPS = 1000
_RATE_DIGITS = 3


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
    ) -> None:
        start = ScaleState(
            scale=1.0,
            is_frozen=STATIC if is_static else 0,
        )
        self.step_counter = step_counter
        self.dynamic_scale = dynamic_scale
        # Scales of traced functions, which have a variable of their own.
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()
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
        for follower in tuple(self.followers):
            follower.follow()

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


class Step(NamedTuple):
    """One step, and the totals just after it."""

    step: int  # its number, from 1; under accumulation each microbatch is a step
    loss_scale: float  # the scale it was computed with
    applied_steps: int  # updates so far
    skipped_steps: int
    consecutive_skips: int  # skipped steps in a row up to this one
    gradient_norm: float | None  # unscaled; None where it is not finite
    overflow_rate: float  # skipped steps per 1,000, over the last `RATE_STEPS`


class Reading(NamedTuple):
    """What one reading brought."""

    steps: list[Step]  # since the last reading, oldest first
    num_lost: int  # further ones, older than what the optimizer holds
    logs: dict[str, float | int]  # the present values, all finite, for `fit`
    last_skip: int | None  # number of the last skipped step
    num_skips: int  # steps skipped since the last reading
    nonfinite: tuple[str, ...]  # paths of the variables to blame for them


class StepReader:
    """Reads the counters of an optimizer; steps that it took before are not told."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self._seen: ScaleState
        self._counts: dict[str, int]
        self._recent: collections.deque[bool]
        self._begin()

    def read(self) -> Reading:
        """Returns what happened since the last reading; waits for the device."""
        now = self.optimizer.scale_variables.numbers()
        if now.judged < self._seen.judged:
            self._begin()  # older weights were loaded
            now = self._seen
        history = self.optimizer.history()
        is_new = history["step"] > self._seen.judged
        history = {name: values[is_new] for name, values in history.items()}
        num_new = now.judged - self._seen.judged
        num_lost = num_new - len(history["step"])
        steps = self._steps(history, now, num_lost)
        skips = history["step"][history["skipped"]]
        nonfinite: tuple[str, ...] = ()
        if len(skips):
            before, self._counts = self._counts, self.optimizer.nonfinite_counts
            grown = (k for k, v in self._counts.items() if v > before.get(k, 0))
            nonfinite = tuple(grown)
        reading = Reading(
            steps=steps,
            num_lost=num_lost,
            logs=self._logs(now),
            last_skip=int(skips[-1]) if len(skips) else None,
            num_skips=now.skipped - self._seen.skipped,
            nonfinite=nonfinite,
        )
        self._seen = now
        return reading

    def _begin(self) -> None:
        self._seen = self.optimizer.scale_variables.numbers()
        self._counts = self.optimizer.nonfinite_counts
        skipped = self.optimizer.history()["skipped"].tolist()
        self._recent = collections.deque(skipped, maxlen=RATE_STEPS)

    def _logs(self, now: ScaleState) -> dict[str, float | int]:
        return {
            "loss_scale": now.scale,
            "applied_steps": now.applied,
            "skipped_steps": now.skipped,
            "consecutive_skips": now.streak,
            "gradient_norm": now.finite_norm,
            "overflow_rate": self._rate(),
        }

    def _rate(self) -> float:
        num_steps = max(len(self._recent), 1)
        return round(1000 * sum(self._recent) / num_steps, _RATE_DIGITS)

    def _steps(
        self, history: dict[str, np.ndarray], now: ScaleState, num_lost: int
    ) -> list[Step]:
        """Returns the steps of `history`, with totals that end in those of `now`."""
        seen, limit = self._seen, self.optimizer.max_consecutive_skips
        skips = history["skipped"].tolist()
        updates = self._updates(skips)
        applied, skipped, streak = seen.applied, seen.skipped, seen.streak
        if num_lost:  # then count back from the end
            applied = now.applied - sum(updates)
            skipped, streak = now.skipped - sum(skips), 0
            self._recent.extend([False] * num_lost)
        steps = []
        for position, is_skip in enumerate(skips):
            applied += updates[position]
            skipped += is_skip
            if limit is not None and streak >= limit:
                streak = 0  # training was stopped there, and begun again
            streak = streak + 1 if is_skip else 0
            self._recent.append(is_skip)
            norm = float(history["gradient_norm"][position])
            steps.append(
                Step(
                    step=int(history["step"][position]),
                    loss_scale=_shortened(history["scale"][position]),
                    applied_steps=applied,
                    skipped_steps=skipped,
                    consecutive_skips=streak,
                    gradient_norm=_shortened(norm) if np.isfinite(norm) else None,
                    overflow_rate=self._rate(),
                )
            )
        if steps:  # the end of an epoch applies a window that is not full
            steps[-1] = steps[-1]._replace(applied_steps=now.applied)
        return steps

    def _updates(self, skips: list[bool]) -> list[bool]:
        """Returns for each step whether it completed an update."""
        in_window, found = self._seen.microbatches, []
        for is_skip in skips:
            in_window += not is_skip
            found.append(in_window >= self.optimizer.accumulation_steps)
            if found[-1]:
                in_window = 0
        return found


def _shortened(value: float) -> float:
    """Returns a float32 with the nine digits that tell it apart from the others."""
    return float(f"{value:.9g}")
