"""Computes gradients with a scale on their way, and takes it off again."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import optimizers
from tfamp.loss_scale.gradients import multiplied, sums_of_squares
from tfamp.loss_scale.tape.scalings import Scaling

_HALF = (tf.float16, tf.bfloat16)
# A target in float16 cannot be given more.
_MAX_HALF_SCALE = 2.0**15
_Compute = Callable[[list[Any], Any], list[Any]]  # of targets and their seeds


class ScaledGradients:
    """How one call of a tape is scaled, by the smallest of possible scales.

    `scalings` are told whether the gradients are finite. `is_judged` says that somebody
    looks at the gradients, so that an overflow may be left to see.
    """

    def __init__(
        self, scales: Sequence[Any], scalings: Sequence[Scaling], *, is_judged: bool
    ) -> None:
        self._scales = [tf.convert_to_tensor(scale) for scale in scales]
        self._scalings = scalings
        self._is_judged = is_judged
        self._is_nested = not is_judged and optimizers.is_recording()

    def gradients(
        self, compute: _Compute, target: Any, sources: list[Any], seeds: Any
    ) -> list[Any]:
        """Returns the true gradients, in float32 for variables."""
        targets = tf.nest.flatten(target)
        factor = self._factor(targets)
        given = [None] * len(targets) if seeds is None else tf.nest.flatten(seeds)
        scaled_seeds = [
            (tf.ones_like(target) if seed is None else tf.convert_to_tensor(seed))
            * tf.cast(factor, target.dtype)
            for target, seed in zip(targets, given, strict=True)
        ]
        scaled = compute(targets, scaled_seeds)
        true = [
            _unscaled(gradient, source, 1 / factor)
            for gradient, source in zip(scaled, sources, strict=True)
        ]
        if self._is_judged:
            self._tell(true)
            return true
        return _or_as_they_are(true, sources, lambda: compute(targets, seeds))

    def _factor(self, targets: Sequence[Any]) -> tf.Tensor:
        scales = list(self._scales)
        if any(target.dtype in _HALF for target in targets):
            scales.append(tf.constant(_MAX_HALF_SCALE))
        least = scales[0] if len(scales) == 1 else tf.reduce_min(tf.stack(scales))
        # What flows back through this gradient is divided by its scale, so that it and
        # the gradient share what the tape around gives.
        return tf.sqrt(least) if self._is_nested else least

    def _tell(self, gradients: Sequence[Any]) -> None:
        """Notes whether the gradients are finite: what follows may hide it."""
        gradients = [g for g in gradients if g is not None]
        if not (gradients and self._scalings):
            return
        verdict = tf.math.is_finite(tf.reduce_sum(sums_of_squares(gradients)))
        for scaling in self._scalings:
            scaling.add(gradients, verdict)


def can_be_scaled(target: Any) -> bool:
    """Returns whether all targets are tensors with gradients of their own dtype."""
    targets = tf.nest.flatten(target)
    return bool(targets) and all(
        isinstance(t, tf.Tensor) and (t.dtype.is_floating or t.dtype.is_complex)
        for t in targets
    )


def _unscaled(gradient: Any, source: Any, factor: Any) -> Any:
    if gradient is None:
        return None
    true = multiplied(gradient, factor)
    if isinstance(source, keras.Variable | tf.Variable) or true.dtype == gradient.dtype:
        return true
    # The code around it may combine it with the source, as without a scale.
    return tf.cast(true, gradient.dtype)


def _or_as_they_are(
    true: list[Any], sources: list[Any], again: Callable[[], list[Any]]
) -> list[Any]:
    """Returns gradients of no variable, or those without a scale if they overflowed.

    No optimizer judges them and lowers the scale.
    """
    known = [i for i, gradient in enumerate(true) if gradient is not None]
    if not known:
        return true
    dense = [tf.convert_to_tensor(true[i]) for i in known]

    def without_a_scale() -> list[tf.Tensor]:
        plain = again()
        return [
            tf.convert_to_tensor(_unscaled(plain[i], sources[i], 1.0)) for i in known
        ]

    is_finite = tf.math.is_finite(tf.reduce_sum(sums_of_squares(dense)))
    chosen = tf.cond(is_finite, lambda: dense, without_a_scale)
    found = dict(zip(known, chosen, strict=True))
    return [found.get(i) for i in range(len(true))]
