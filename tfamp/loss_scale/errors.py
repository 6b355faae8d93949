"""The error that ends training in which no step can be applied, and its text."""

from tfamp.records import pages

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
    return f"{_TEMPLATE}{advice} {pages.see('failures/zero-scale')}"


def found_in(message: str) -> str | None:
    """Returns our text inside a longer `message`, None where it is not there."""
    if MARK not in message:
        return None
    start = message.rfind("Skipped ", 0, message.index(MARK))
    end = message.find("\n", start)
    return message[start : end if end > 0 else None].rstrip("]' ").rstrip()
