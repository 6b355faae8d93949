"""The error that ends training after too many skipped updates, and when it comes.

Eager steps raise it. A graph asserts; `fit` makes the same error of that. Under XLA
nothing can be raised in the graph, so that `fit` looks at the counters now and then.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks.optimizers import in_xla
from tfamp.records import checks

# How the text is found in an error that TensorFlow raises.
_MARK = "updates in a row, because their gradients were not finite"
# Filled in by `str.format` and by `tf.strings.format`, which knows only "{}".
_TEMPLATE = (
    f"Skipped {{}} {_MARK}, up to step {{}}: loss scale {{}}, gradient norm {{}}, last "
    "finite norm {}. "
)
_ADVICE = (
    "Lower the learning rate, clip gradients, keep the overflowing layer in float32, "
    "or look for NaN in the data: no loss scale mends this. Pass "
    "`max_consecutive_skips=None` to go on skipping."
)
_STATIC_ADVICE = "The scale is static: lower it, or pass `dynamic=True`. Else: "


class LossScaleError(ArithmeticError):
    """Training was stopped: too many updates in a row had non-finite gradients.

    No weight, slot or counter of updates was changed by the skipped steps, and the
    loss scale is again what it was before them. Raised by `fit`, `train_on_batch`
    and eager loops; inside a `tf.function` of your own TensorFlow raises
    `tf.errors.InvalidArgumentError` with the same text.
    """


def found_in(message: str) -> str | None:
    """Returns our text inside a longer `message`, None where it is not there."""
    if _MARK not in message:
        return None
    start = message.rfind("Skipped ", 0, message.index(_MARK))
    end = message.find("\n", start)
    return message[start : end if end > 0 else None].rstrip("]' ").rstrip()


def _template(optimizer: Any) -> str:
    """Returns the text with five places, for numbers of a `ScaleState`."""
    is_scaled_for_good = not optimizer.dynamic and optimizer.initial_scale != 1
    advice = f"{_STATIC_ADVICE if is_scaled_for_good else ''}{_ADVICE}"
    return f"{_TEMPLATE}{advice} {checks.see('failures/zero-scale')}"


def error_of(optimizer: Any) -> LossScaleError:
    """Returns the error for the present counters."""
    now, limit = optimizer.scale_variables.numbers(), optimizer.max_consecutive_skips
    facts = limit, now.judged, now.scale_before, now.norm, now.finite_norm
    return LossScaleError(_template(optimizer).format(*facts))


def forget(optimizer: Any) -> None:
    """Makes `late_error` look at what comes from here on."""
    optimizer.num_stops_seen = optimizer.scale_variables.numbers().num_stops


def late_error(optimizer: Any) -> LossScaleError | None:
    """Returns the error of a streak that came to its end since `forget`, if any.

    It takes back what steps since the stop did: they wrote nothing but counters and,
    where they were skipped too, the scale.
    """
    now = optimizer.scale_variables.numbers()
    if now.num_stops <= optimizer.num_stops_seen:
        return None
    error = error_of(optimizer)
    if now.streak and now.is_frozen <= 0:
        optimizer.put(now._replace(scale=now.scale_before, good_steps=0))
    return error


def stop_if_due(optimizer: Any, after: Sequence[tf.Operation] = ()) -> None:
    """Ends training after too many skipped steps in a row, unless `fit` does.

    The counters are up to date once the operations `after` have run.
    """
    limit = optimizer.max_consecutive_skips
    if limit is None or optimizer.leaves_stop_to_caller:
        return
    if tf.executing_eagerly():
        optimizer.raise_if_due()
    elif not in_xla():
        strategy = tf.distribute.get_strategy()
        # What every replica counts: an error overtakes later writes.
        counts = [
            part.read_value()
            for variable in optimizer.own_variables
            for part in strategy.experimental_local_results(variable.value)
        ]
        with tf.control_dependencies([*after, *counts]):
            now = optimizer.scale_variables.read()  # after the writes of this step
            facts = now.judged, now.scale_before, now.norm, now.finite_norm
            text = tf.strings.format(_template(optimizer), [now.streak, *facts])
            tf.debugging.Assert(now.streak < limit, [text], summarize=1)
