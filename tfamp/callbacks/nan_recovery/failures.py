"""How a training that has failed shows it."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.callbacks._batch_ring import BatchRing, ring_in_use
from tfamp.callbacks._timed_iterator import ITERATORS
from tfamp.loss_scale import interface
from tfamp.stepping.snapshots.names import optimizers_of, tally_of


class LastBatches:
    """Holds the batches of the last call of a training function, for the triage.

    In `fit` the traced function draws its batches out of Python's sight, so they are
    held on their way. A `FlightRecorder` in the same `fit` holds them already.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._steps = int(model.steps_per_execution or 1)
        self._ring: BatchRing | None = None
        self._num_calls = 0

    def through(self, iterator: Any, *, is_held: bool) -> Any:
        """Returns what the training function draws from in place of an iterator."""
        if is_held or not isinstance(iterator, ITERATORS):
            return iterator
        if self._ring is None:
            strategy = self._model.distribute_strategy
            self._ring = BatchRing(strategy, keep=self._steps)
        # Older batches are let go every few calls: all at once, as that is cheapest.
        if not self._num_calls:
            self._ring.clear()
        elif not self._ring.num_drawn:
            self._ring.fetch()  # it learns their size, and so how many may pile up
        self._num_calls += 1
        if self._num_calls > max(1, self._ring.calls_between // self._steps):
            self._num_calls = 0
        return self._ring.around(iterator)

    def failing(self) -> Any:
        """Returns the last batch with NaN or inf in it, else the last; None without."""
        ring = self._ring or ring_in_use(self._model)
        kept = ring.batches() if ring is not None else []
        batches = [_whole(each.parts) for each in kept[-self._steps :]]
        bad = [batch for batch in batches if _holds_nonfinite(batch)]
        return (bad or batches or [None])[-1]

    def clear(self) -> None:
        """Lets all batches go."""
        if self._ring is not None:
            self._ring.release()


def _whole(parts: tuple[Any, ...]) -> Any:
    """Returns a batch of all replicas as one."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts
    )


def _holds_nonfinite(batch: Any) -> bool:
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
    )


# A scale at its floor is at fault no more after so many skips.
STALLED_SKIPS = 8
# Of Keras's own wrapper, which has no floor.
_STOCK_MIN_SCALE = 2.0**-14
# How `tf.debugging.enable_check_numerics` words its error.
_CHECKED = ("Tensor had NaN", "Tensor had Inf", "!!! Detected Infinity or NaN")


@dataclasses.dataclass(frozen=True)
class Sign:
    """One sign of failure.

    Attributes:
        kind: "logs", "weights" or "loss scale".
        text: What was seen, for people.
    """

    kind: str
    text: str


def plain(logs: Any) -> dict[str, Any]:
    """Returns a training function's logs with numbers as Python's own.

    Reading them waits for the device, as `fit` does for its callbacks.
    """
    if not isinstance(logs, Mapping):
        return {}
    return {name: _plain(value) for name, value in logs.items()}


def of_logs(logs: Mapping[str, Any], *, ignored: Collection[str] = ()) -> Sign | None:
    """Returns the sign where a loss or metric is NaN or inf.

    Example:
        >>> of_logs({"loss": 1.0, "auc": float("nan")})
        Sign(kind='logs', text='auc is nan')
        >>> of_logs({"loss": 1.0, "auc": float("nan")}, ignored=["auc"]) is None
        True
    """
    for name, value in logs.items():
        if name in ignored:
            continue
        if isinstance(value, Mapping):
            inner = of_logs(value, ignored=ignored)
            if inner is not None:
                return Sign(inner.kind, f"{name}/{inner.text}")
        elif isinstance(value, float):
            if not math.isfinite(value):
                return Sign("logs", f"{name} is {value}")
        elif _has_nonfinite(value):
            return Sign("logs", f"{name} has values that are not finite")
    return None


def of_error(error: BaseException) -> Sign | None:
    """Returns the sign where an error of a training step says that numbers failed."""
    if isinstance(error, interface.LossScaleError):
        return Sign("loss scale", _first_sentence(str(error)))
    if isinstance(error, tf.errors.InvalidArgumentError):
        text = interface.found_in(error.message)
        if text is not None:
            return Sign("loss scale", _first_sentence(text))
        for mark in _CHECKED:
            if mark in error.message:
                return Sign("logs", f"a checked tensor failed: {mark.lower()}")
    return None


def of_weights(model: keras.Model) -> Sign | None:
    """Returns the sign where a weight or moving statistic is NaN or inf.

    One sum a variable on the device, looked at once; only where that is not finite are
    the values looked at one by one, for a sum may overflow.
    """
    strategy = model.distribute_strategy
    sums, parts = [], []
    for variable in model.variables:
        for part in strategy.experimental_local_results(variable.value):
            if not part.dtype.is_floating:
                continue
            parts.append((variable.path, part))
            sums.append(tf.cast(tf.reduce_sum(part), tf.float64))
    if not sums or np.isfinite(float(tf.add_n(sums))):
        return None
    for path, part in parts:
        if not bool(tf.reduce_all(tf.math.is_finite(part))):
            return Sign("weights", f"{path} holds values that are not finite")
    return None


def of_scale(model: keras.Model) -> Sign | None:
    """Returns the sign where the loss scale stands at its floor and steps are skipped.

    It reads from the device.
    """
    for optimizer in optimizers_of(model):
        stored = tally_of(optimizer)
        if stored is not None:
            now = stored.numbers()
            is_stuck = now.is_frozen > 0 or now.scale <= optimizer.rule.min_scale
            if is_stuck and now.streak >= STALLED_SKIPS:
                return Sign(
                    "loss scale",
                    f"the loss scale stands at {now.scale:g} after "
                    f"{now.streak} skipped steps in a row",
                )
        elif isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = float(optimizer.dynamic_scale.numpy())
            if scale < _STOCK_MIN_SCALE:
                return Sign("loss scale", f"the loss scale has fallen to {scale:g}")
    return None


def was_skipped(model: keras.Model) -> bool:
    """Returns whether the last step of a `tfamp.LossScaleOptimizer` was skipped."""
    tallies = [tally_of(optimizer) for optimizer in optimizers_of(model)]
    return any(t is not None and t.numbers().streak for t in tallies)


def num_updates(model: keras.Model) -> int:
    """Returns how many updates all optimizers of a model have made."""
    return sum(int(o.iterations.numpy()) for o in optimizers_of(model))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    # Not `shape`, which takes ten times as long to ask a tensor for.
    is_number = isinstance(value, (float, int)) or getattr(value, "ndim", None) == 0
    return float(value) if is_number else value


def _has_nonfinite(value: Any) -> bool:
    """Returns whether a value that is no number holds NaN or inf."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):  # ragged, or no numbers
        return False
    return not np.all(np.isfinite(array))


def _first_sentence(text: str) -> str:
    return text.split(". ")[0][:200]
