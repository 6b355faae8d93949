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
_ADVICE = (
    "Lower the learning rate, clip gradients, keep the overflowing layer in float32, "
    "or look for NaN in the data: no loss scale mends this. Pass "
    "`max_consecutive_skips=None` to go on skipping."
)


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


def _text(optimizer: Any, now: Any, fill: Any) -> Any:
    """Returns the text for counters, numbers or tensors, which `fill` puts in."""
    is_static = not optimizer.dynamic and optimizer.initial_scale != 1
    advice = "The scale is static: lower it, or pass `dynamic=True`. " * is_static
    template = (  # with the places that `tf.strings.format` knows
        f"Skipped {optimizer.max_consecutive_skips} {_MARK}, up to step {{}}: loss "
        "scale {}, gradient norm {}, last finite norm {}. "
        f"{advice}{_ADVICE} {checks.see('failures/zero-scale')}"
    )
    return fill(template, [now.judged, now.scale_before, now.norm, now.finite_norm])


def error_of(optimizer: Any) -> LossScaleError:
    """Returns the error for the present counters."""
    now = optimizer.scale_variables.numbers()
    return LossScaleError(_text(optimizer, now, lambda text, x: text.format(*x)))


def late_error(optimizer: Any) -> LossScaleError | None:
    """Returns the error of a streak that came to its end since `num_stops_seen`.

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
            text = _text(optimizer, now, tf.strings.format)
            tf.debugging.Assert(now.streak < limit, [text], summarize=1)
