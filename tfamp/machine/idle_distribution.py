"""Keras's own distribution, which its TensorFlow backend takes and does not follow."""

import warnings
import weakref
from typing import Any

import keras

from tfamp.records import checks

_TOLD: "weakref.WeakSet[Any]" = weakref.WeakSet()
REMEDY = (
    "Take it away by `keras.distribution.set_distribution(None)`, and make the model "
    "in the scope of `tfamp.distribute.strategy()`, which trains with the same weights "
    "on all devices; for a model that is too large for one, use `tfamp.remat`, "
    "accumulation, or Keras on JAX."
)


def idle_distribution() -> str | None:
    """Returns what a distribution that is set does not do, None where none is set."""
    found = keras.distribution.distribution()
    if found is None:
        return None
    return (
        f"`keras.distribution` is set to {type(found).__name__}, which Keras does not "
        "follow on TensorFlow: every variable and every step stays on the first "
        "device, as if it were not set."
    )


def warn_of_idle_distribution(*_: Any) -> None:
    """Warns once of each distribution that is set."""
    text, found = idle_distribution(), keras.distribution.distribution()
    if text is not None and found not in _TOLD:
        _TOLD.add(found)
        warnings.warn(
            f"{text} {REMEDY} {checks.see('lint#idle-distribution')}",
            UserWarning,
            stacklevel=2,
        )
