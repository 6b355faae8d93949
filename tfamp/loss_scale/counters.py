"""The variables of a loss-scale optimizer: scale, counters, blame and last steps.

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


class ScaleVariables:
    """A `ScaleState` in as few variables as can be, and what is only reported.

    Each variable costs a step a read and a write, whatever its size. `add_variable` is
    the optimizer's; the first two variables are those of Keras's class.
    """

    def __init__(
        self, add_variable: Callable[..., Any], start: float, *, is_static: bool
    ) -> None:
        first = ScaleState(scale=start, is_frozen=STATIC if is_static else 0)

        def add(name: str, dtype: str, value: Any, shape: tuple[int, ...] = ()) -> Any:
            def initializer(shape: Any, dtype: Any) -> tf.Tensor:
                return tf.broadcast_to(tf.constant(value, dtype), shape)

            return add_variable(
                shape=shape, dtype=dtype, name=name, initializer=initializer
            )

        self.step_counter = add("step_counter", "int", 0)
        self.dynamic_scale = add("dynamic_scale", "float32", start)
        self.counters = add("counters", "int64", first[_WHOLE], (len(COUNTERS),))
        self.levels = add("levels", "float32", first[_REAL], (len(LEVELS),))
        self.recent = add("recent_steps", "float32", 0.0, (HISTORY_STEPS, 3))
        # Row 0: in how many skipped steps a variable had a part. Row 1: in the last.
        self.blame: Any = None
        self._paths: list[str] = []
        # Scales of traced functions, which have a variable of their own.
        self.followers: weakref.WeakSet[Any] = weakref.WeakSet()

    def build(self, variables: Sequence[Any], add_variable: Callable[..., Any]) -> None:
        """Makes what counts the skipped steps of each variable."""
        self._paths = [getattr(v, "path", v.name) for v in variables]
        shape = (2, len(variables))
        self.blame = add_variable(shape=shape, dtype="int64", name="blame")

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

    def numbers(self) -> ScaleState:
        """Returns the present values as plain numbers; reads from the device."""
        # Not `np.asarray`, which fails on a distributed scalar inside a scope.
        return ScaleState(
            float(self.dynamic_scale.numpy()),
            int(self.step_counter.numpy()),
            *self.counters.numpy().tolist(),
            *self.levels.numpy().tolist(),
        )

    def remember(self, judged: tf.Tensor, *facts: Any) -> None:
        """Puts one step's scale, norm and verdict into the ring of recent steps."""
        slot = judged % HISTORY_STEPS
        row = tf.stack([tf.cast(x, tf.float32) for x in facts])
        recent = tf.convert_to_tensor(self.recent.value)
        self.recent.assign(tf.tensor_scatter_nd_update(recent, [[slot]], [row]))

    def history(self) -> dict[str, np.ndarray]:
        """Returns the steps that the ring holds, oldest first."""
        judged = self.numbers().judged
        steps = np.arange(max(0, judged - HISTORY_STEPS), judged)
        rows = np.asarray(self.recent.value)[steps % HISTORY_STEPS]
        return {
            "step": steps + 1,
            "scale": rows[:, 0],
            "gradient_norm": rows[:, 1],
            "skipped": rows[:, 2] > 0,
        }

    def note(self, positions: Sequence[int], squares: tf.Tensor) -> None:
        """Blames the variables at `positions` whose sum of squares is not finite."""
        if not positions:
            return
        flags = tf.cast(~tf.math.is_finite(squares), tf.int64)
        indices = [[position] for position in positions]
        last = tf.scatter_nd(indices, flags, [len(self._paths)])
        total = tf.convert_to_tensor(self.blame.value)[0] + last
        self.blame.assign(tf.stack([total, last]))

    def blamed(self, row: int) -> dict[str, int]:
        """Returns what a row of `blame` has for each variable that has any."""
        counts = [] if self.blame is None else np.asarray(self.blame.value)[row]
        pairs = zip(self._paths, map(int, counts), strict=True)
        return {path: count for path, count in pairs if count}


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
        num_lost = now.judged - self._seen.judged - len(history["step"])
        steps = self._steps(history, now, num_lost)
        skips = history["step"][history["skipped"]]
        nonfinite: tuple[str, ...] = ()
        if len(skips):
            before, self._counts = self._counts, self.optimizer.nonfinite_counts
            grown = (k for k, v in self._counts.items() if v > before.get(k, 0))
            nonfinite = tuple(grown)
        logs = {
            "loss_scale": now.scale,
            "applied_steps": now.applied,
            "skipped_steps": now.skipped,
            "consecutive_skips": now.streak,
            "gradient_norm": now.finite_norm,
            "overflow_rate": self._rate(),
        }
        last_skip = int(skips[-1]) if len(skips) else None
        num_skips = now.skipped - self._seen.skipped
        self._seen = now
        return Reading(steps, num_lost, logs, last_skip, num_skips, nonfinite)

    def _begin(self) -> None:
        self._seen = self.optimizer.scale_variables.numbers()
        self._counts = self.optimizer.nonfinite_counts
        skipped = self.optimizer.history()["skipped"].tolist()
        self._recent = collections.deque(skipped, maxlen=RATE_STEPS)

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
