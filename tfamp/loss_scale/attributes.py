"""Attributes of a loss-scale optimizer: counters, and those of the one inside."""

from typing import Any

import tensorflow as tf

INNER = "inner_optimizer"
# Attributes that every Keras optimizer has, the wrapper too, and that only mean
# something on the one inside.
SHARED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "ema_momentum",
    "ema_overwrite_frequency",
)


def reported(field: str, doc: str) -> property:
    """Returns a getter of a `ScaleState`: a number, or a scalar tensor in a graph."""

    def get(self: Any) -> Any:
        stored = self.scale_variables
        now = stored.numbers() if tf.executing_eagerly() else stored.read()
        return getattr(now, field)

    return property(get, doc=doc)


def shared(name: str) -> property:
    """Returns an attribute that is the inner optimizer's."""

    def get(self: Any) -> Any:
        inner = vars(self).get(INNER)
        return None if inner is None else getattr(inner, name)

    def put(self: Any, value: Any) -> None:
        inner = vars(self).get(INNER)
        if inner is not None:  # Keras sets its defaults before there is one
            setattr(inner, name, value)

    return property(get, put, doc=f"`{name}` of the inner optimizer.")


def refused(name: str, instead: str) -> property:
    """Returns an attribute that is None; `instead` says what sets it."""

    def put(self: Any, value: Any) -> None:
        if value is not None and INNER in vars(self):
            raise ValueError(
                f"`{name}` is {value!r}, but a LossScaleOptimizer has none of its own; "
                f"expected None. {instead}"
            )

    return property(lambda self: None, put, doc=f"None: {instead}")


def only_eager(name: str) -> None:
    """Raises where what is no number is asked for inside a graph."""
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"`{name}` was read inside a `tf.function`, or a `train_step` that is "
            "traced; expected eager code, as it is no number. Read it between steps or "
            "in a callback."
        )
