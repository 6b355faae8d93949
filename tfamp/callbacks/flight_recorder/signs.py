"""By what a failure is known: the loss of a step, an error, and what it says."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

from tfamp.keras_hooks.patches import replaced
from tfamp.stepping.snapshots.names import tally_of


def before_late_error(
    optimizer: Any, write: Callable[[Exception], None]
) -> Callable[[], None] | None:
    """Has the error told that XLA could not raise in the step.

    Args:
        optimizer: The model's optimizer.
        write: Is told of the error ahead of its being raised.

    Returns:
        What takes that back; None where the optimizer raises no such error.
    """
    if tally_of(optimizer) is None:
        return None
    original = optimizer.late_stop_error

    def late_stop_error() -> Exception:
        error: Exception = original()
        write(error)
        return error

    stack = contextlib.ExitStack()
    stack.enter_context(replaced(optimizer, late_stop_error=late_stop_error))
    return stack.close


def loss_of(logs: Any) -> float | None:
    """Returns the loss in what a step returned, None where there is none."""
    try:
        return float(logs["loss"])
    except (KeyError, TypeError, ValueError):
        return None


def has_finite_loss(logs: Any) -> bool:
    """Returns whether the loss in what a step returned is finite, or absent."""
    loss = loss_of(logs)
    return loss is None or math.isfinite(loss)


def core_of(text: str) -> str:
    """Returns the line of an error's text that says what is wrong.

    TensorFlow puts the place in the user's code before it, and nodes after it.

    Example:
        >>> core_of(chr(10).join(["Graph execution error:", "at x", "is inf", "[[y"]))
        'is inf'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Graph execution error"):
        lines = [line for line in lines if not line.startswith("[[")][::-1]
    return lines[0] if lines else "An exception without a message."
