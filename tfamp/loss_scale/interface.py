"""What training code asks a loss-scale optimizer, and the error that ends training."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks.backend import HALF
from tfamp.loss_scale.counters import (
    FROZEN,
    HISTORY_STEPS,
    ScaleVariables,
)
from tfamp.loss_scale.gradients import multiplied
from tfamp.loss_scale.rule import ScaleState
from tfamp.loss_scale.scales import note_unscaled, scaled_by_hand
from tfamp.records import checks

SCALING_IS_NOT_THE_CAUSE = (
    "Lower the learning rate, clip gradients, keep the overflowing layer in float32, "
    "or look for NaN in the data: no loss scale mends this. Pass "
    "`max_consecutive_skips=None` to go on skipping."
)
STATIC_SCALE = (
    "The scale is static: lower it, or pass `dynamic=True`. Else lower the learning "
    "rate, clip gradients, or look for NaN in the data."
)
NO_SCALE = (
    "Lower the learning rate, clip gradients, or look for NaN in the data. Pass "
    "`max_consecutive_skips=None` to go on skipping."
)
# Filled in by `str.format` and by `tf.strings.format`, which knows only "{}".
_TEMPLATE = (
    "Skipped {} updates in a row, because their gradients were not finite, up to step "
    "{}: loss scale {}, gradient norm {}, last finite norm {}. "
)
# How the text is found in an error that TensorFlow raises.
MARK = "updates in a row, because their gradients were not finite"


class LossScaleError(ArithmeticError):
    """Training was stopped: too many updates in a row had non-finite gradients.

    No weight, slot or counter of updates was changed by the skipped steps, and the
    loss scale is again what it was before them. Raised by `fit`, `train_on_batch`
    and eager loops; inside a `tf.function` of your own TensorFlow raises
    `tf.errors.InvalidArgumentError` with the same text.
    """


def template(*, is_dynamic: bool, is_scaled: bool) -> str:
    """Returns the text of the error with five places for numbers.

    They are: updates skipped in a row, step, loss scale, gradient norm, last finite
    gradient norm. `is_scaled` says whether the loss is scaled at all.

    Example:
        >>> text = template(is_dynamic=True, is_scaled=True)
        >>> text.format(64, 412, 2.0**-14, "nan", 3.5)[:40]
        'Skipped 64 updates in a row, because the'
    """
    advice = STATIC_SCALE if is_scaled else NO_SCALE
    if is_dynamic:
        advice = SCALING_IS_NOT_THE_CAUSE
    return f"{_TEMPLATE}{advice} {checks.see('failures/zero-scale')}"


def found_in(message: str) -> str | None:
    """Returns our text inside a longer `message`, None where it is not there."""
    if MARK not in message:
        return None
    start = message.rfind("Skipped ", 0, message.index(MARK))
    end = message.find("\n", start)
    return message[start : end if end > 0 else None].rstrip("]' ").rstrip()


class ScalingLosses(keras.optimizers.LossScaleOptimizer):
    """What a training loop calls before it has gradients."""

    def scale_loss(self, loss: Any) -> Any:
        """Returns `loss` times the loss scale; a half-precision loss as float32.

        Args:
            loss: A number or tensor of any shape.
        """
        loss = tf.convert_to_tensor(loss)
        if loss.dtype in HALF:
            loss = tf.cast(loss, tf.float32)
        scale = tf.convert_to_tensor(self.dynamic_scale.value)
        self.has_scaled_loss = True
        if not loss.dtype.is_floating:
            return loss * tf.cast(scale, loss.dtype)
        return scaled_by_hand(loss, scale, is_ours=True)

    def get_scaled_loss(self, loss: Any) -> Any:
        """As `scale_loss`; takes a callable too and returns one, as legacy Keras."""
        if callable(loss):
            return lambda: self.scale_loss(loss())
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients of a scaled loss divided by the scale.

        The next `apply` or `apply_gradients` takes what came through here as it is, as
        legacy Keras did.

        Args:
            grads: Tensors, `tf.IndexedSlices` or None.
        """
        self.was_unscaled = True
        note_unscaled()
        factor = 1 / tf.convert_to_tensor(self.dynamic_scale.value)
        return [None if g is None else multiplied(g, factor) for g in grads]

    def minimize(
        self, loss: Any, var_list: Any, tape: tf.GradientTape | None = None
    ) -> Any:
        """Computes the gradients of a loss and applies them, as legacy Keras.

        Args:
            loss: A callable without arguments, or a tensor computed under `tape`.
            var_list: The variables, or a callable that returns them.
            tape: The tape of `loss` where that is a tensor.

        Returns:
            The `iterations` of the inner optimizer, or what its own `minimize` returns
            where it has one.
        """
        if tape is None and not callable(loss):
            raise ValueError(
                f"`loss` is {loss!r} and `tape` is None; expected a callable or the "
                "tape that recorded the loss. Pass `tape=tape`."
            )
        own = getattr(self.inner_optimizer, "minimize", None)  # of a subclass
        if own is not None:
            return own(loss, var_list) if tape is None else own(loss, var_list, tape)
        with tape if tape is not None else tf.GradientTape() as tape:
            scaled = self.scale_loss(loss() if callable(loss) else loss)
        variables = list(var_list() if callable(var_list) else var_list)
        raw = [v.value if isinstance(v, keras.Variable) else v for v in variables]
        gradients = tape.gradient(scaled, raw)
        return self.apply_gradients(zip(gradients, variables, strict=True))


def _present(optimizer: Any) -> ScaleState:
    """Returns the present state: numbers in eager code, else scalar tensors."""
    stored: ScaleVariables = optimizer.scale_variables
    return stored.numbers() if tf.executing_eagerly() else stored.read()


def _only_eager(name: str) -> None:
    """Raises where what is no number is asked for inside a graph."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{name}` was read inside a `tf.function`, or a `train_step` that is "
            "traced; expected eager code, as it is no number. Read it between steps or "
            "in a callback."
        )


def _reported(name: str, doc: str) -> property:
    return property(lambda self: getattr(_present(self), name), doc=doc)


class Reporting(keras.optimizers.LossScaleOptimizer):
    """The counters of a `LossScaleOptimizer`.

    In eager code each is a plain number, read from the device; inside a
    `tf.function` a scalar tensor.
    """

    @property
    def scale(self) -> Any:
        """The present loss scale."""
        return _present(self).scale

    applied_steps = _reported("applied", "Updates that were applied.")
    skipped_steps = _reported(
        "skipped", "Steps, or microbatches, that were skipped for non-finite gradients."
    )
    judged_steps = _reported(
        "judged", "Steps, or microbatches, applied, added up or skipped."
    )
    consecutive_skips = _reported(
        "streak", "Steps skipped in a row up to now, 0 after a finite one."
    )
    num_stops = _reported(
        "num_stops", "How often training was stopped for too many skips in a row."
    )
    gradient_norm = _reported(
        "norm",
        """Norm of the last step's unscaled gradients, before any clipping.

        Under accumulation that of the last update, or of the last microbatch since.
        """,
    )

    @property
    def last_step_skipped(self) -> Any:
        """Whether the last step was skipped."""
        return _present(self).streak > 0

    @property
    def is_frozen(self) -> Any:
        """Whether the scale is static now."""
        return _present(self).is_frozen > 0

    @property
    def nonfinite_variables(self) -> tuple[str, ...]:
        """Paths of the variables whose gradients the last skipped step failed on."""
        _only_eager("nonfinite_variables")
        return self.nonfinite.last() if self.nonfinite is not None else ()

    @property
    def nonfinite_counts(self) -> dict[str, int]:
        """For each variable that had any, its number of non-finite gradients."""
        _only_eager("nonfinite_counts")
        return self.nonfinite.total() if self.nonfinite is not None else {}

    def history(self) -> dict[str, np.ndarray]:
        """Returns the last 1024 steps, oldest first; reads from the device.

        Returns:
            Arrays of shape (steps,): "step", counted from 1; "scale", the loss scale
            it was computed with; "gradient_norm", unscaled; "skipped".

        Example:
            >>> import keras, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), 8.0)
            >>> optimizer.apply([tf.constant([8.0])], [keras.Variable([1.0])])
            >>> {k: v.tolist() for k, v in optimizer.history().items()}
            {'step': [1], 'scale': [8.0], 'gradient_norm': [1.0], 'skipped': [False]}
        """
        _only_eager("history")
        judged = self.scale_variables.numbers().judged
        first = max(0, judged - HISTORY_STEPS)
        steps = np.arange(first, judged)
        rows = np.asarray(self.scale_variables.recent.value)[steps % HISTORY_STEPS]
        return {
            "step": steps + 1,
            "scale": rows[:, 0],
            "gradient_norm": rows[:, 1],
            "skipped": rows[:, 2] > 0,
        }

    def freeze(self, value: float | None = None) -> None:
        """Makes the scale static from here on, in functions traced before as well.

        Args:
            value: The scale to keep, or None for the present one.

        Raises:
            ValueError: `value` is not a positive finite number.
        """
        if value is not None:
            value = checks.positive("value", value)
        self._set(is_frozen=FROZEN, scale=value)

    def unfreeze(self) -> None:
        """Makes the scale dynamic from here on."""
        self._set(is_frozen=0)

    def stop_template(self) -> str:
        """Returns the text of the error that ends training, with five places."""
        return template(
            is_dynamic=self.dynamic,
            is_scaled=self.dynamic or self.initial_scale != 1,
        )

    def stop_error(self) -> LossScaleError:
        """Returns the error for the present counters."""
        now = self.scale_variables.numbers()
        return LossScaleError(
            self.stop_template().format(
                self.max_consecutive_skips,
                now.judged,
                now.scale_before,
                now.norm,
                now.finite_norm,
            )
        )

    def raise_if_due(self) -> None:
        """Raises `LossScaleError` where the last step completed a streak."""
        limit = self.max_consecutive_skips
        if limit is not None and self.scale_variables.numbers().streak >= limit:
            raise self.stop_error()

    def late_stop_error(self) -> LossScaleError:
        """Returns the error, and takes back what steps since the stop did.

        They wrote nothing but counters and, where they were skipped too, the scale.
        """
        error = self.stop_error()
        now = self.scale_variables.numbers()
        if now.streak and now.is_frozen <= 0:
            self._set(scale=now.scale_before)
        return error

    def was_stopped(self) -> bool:
        """Returns whether a streak came to its end since `forget_stops`."""
        return bool(self.scale_variables.numbers().num_stops > self._num_stops_seen)

    def forget_stops(self) -> None:
        """Makes `was_stopped` look at what comes from here on."""
        self._num_stops_seen = self.scale_variables.numbers().num_stops

    def _set(self, *, scale: float | None = None, **flags: int) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                "The loss scale is frozen or released inside a `tf.function`; expected "
                "eager code, between steps. Call it from a callback or the loop."
            )
        now = self.scale_variables.numbers()
        self._put(
            now._replace(
                scale=now.scale if scale is None else scale,
                good_steps=0,
                **flags,
            )
        )
