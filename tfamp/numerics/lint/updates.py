"""Rules on updates that half-precision weights and moments round away.

Keras casts rates, betas and gradients to the dtype of the weight and keeps the moments
in it; only the learning rate itself and the counter of updates are wider.
"""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.numerics.lint.rule import CannotTellError, Found, rule
from tfamp.numerics.lint.subject import Part, Subject
from tfamp.numerics.proof.causes import name_layers
from tfamp.records import formats
from tfamp.records.formats import HALF
from tfamp.records.units import format_share

_K = keras.optimizers
# Parts of the past that an optimizer keeps, if it has them.
_KEPT = ("beta_1", "beta_2", "momentum", "rho", "ema_momentum")
_SAFE = {"float16": 0.999, "bfloat16": 0.99}
# Their update is about the learning rate, whatever the gradient is.
_BY_RATE = (_K.Adam, _K.Nadam, _K.Adamax, _K.Lion, _K.RMSprop)
# Steps at which a schedule is asked; its largest rate counts.
_STEPS = (0, *(10**power for power in range(7)))
_MOST = 0.5


@rule("rounded-momentum", needs=("optimizer",))
def rounded_momentum(subject: Subject) -> Iterator[Found]:
    """Betas and momenta that are 1 in the dtype of the weights."""
    for inner, dtype, parts in _optimized(subject):
        spacing = formats.FORMATS[dtype].epsilon
        for name in _KEPT:
            value = getattr(inner, name, None)
            if name == "ema_momentum" and not getattr(inner, "use_ema", False):
                continue
            # Below 1 numbers lie half as far apart, and a tie goes to 1.
            if not isinstance(value, (int, float)) or not 1 - spacing / 4 <= value < 1:
                continue
            severity, effect = _effect(inner, name)
            yield Found(
                severity,  # type: ignore[arg-type]
                f"`{name}={value:g}` of {inner.name!r} is 1 in {dtype}, in which "
                f"{name_layers([part.path for part in parts])} are stored: {effect}.",
                f"Use the policy 'mixed_{dtype}', which keeps weights and moments in "
                f"float32, or pass `{name}={_SAFE[dtype]}`.",
                parts[0].path,
                value,
                {"dtype": dtype, "argument": name, "num_layers": len(parts)},
            )


def _effect(inner: Any, name: str) -> tuple[str, str]:
    """Returns severity and words of what a 1 in the place of a beta does."""
    if name == "beta_2" and isinstance(inner, (_K.Adam, _K.Lamb)):
        return "error", "its correction sqrt(1 - 1**t) is 0, and no weight ever moves"
    if name == "beta_2" and isinstance(inner, _K.Nadam):
        return "error", "it divides by 1 - 1**t, and every weight turns NaN"
    if name == "beta_1" and isinstance(inner, (_K.Adam, _K.Lamb, _K.Adamax)):
        return "error", "it divides by 1 - 1**t, and weights turn infinite or NaN"
    if name == "ema_momentum":
        return "warning", "the average stays what it was after the first update"
    if isinstance(inner, (_K.Nadam, _K.Lion)):
        return "warning", "new gradients do not count in its average"
    return "warning", "what it has gathered never decays"


@rule("lost-updates", needs=("optimizer",))
def lost_updates(subject: Subject) -> Iterator[Found]:
    """Updates and weight decay that half-precision weights round away."""
    for inner, dtype, parts in _optimized(subject):
        rate = _largest_rate(inner)
        if isinstance(inner, _BY_RATE):
            for part in parts:
                yield from _unmoved(part, dtype, rate, inner)
        yield from _undecayed(parts, dtype, rate, inner)


def _unmoved(part: Part, dtype: str, rate: float, inner: Any) -> Iterator[Found]:
    """Yields each weight of which most numbers stay where they are."""
    for weight in part.weights:
        if not weight.trainable or weight.dtype != dtype:
            continue
        share = _lost_share(keras.ops.convert_to_numpy(weight), dtype, rate)
        if share < _MOST:
            continue
        yield Found(
            "warning",
            f"{format_share(share)} of weight {weight.name!r} of {part.path!r} do not "
            f"move by updates of {rate:.2g}, the learning rate of {inner.name!r}: they "
            f"are stored in {dtype}, where that is less than half the distance to the "
            "next number.",
            f"Use the policy 'mixed_{dtype}', which keeps weights in float32, or raise "
            "the learning rate; Keras rounds to the nearest, never at random.",
            part.path,
            share,
            {"dtype": dtype, "weight": weight.name, "learning_rate": rate},
        )


def _lost_share(weight: Any, dtype: str, update: float) -> float:
    """Returns the part of numbers that an update moves neither up nor down."""
    exact = tf.cast(weight, "float32")
    if not exact.shape.num_elements():
        return 0.0
    stays = [
        tf.cast(tf.cast(exact + step, dtype), "float32") == exact
        for step in (update, -update)
    ]
    return float(np.mean(tf.logical_and(*stays).numpy()))


def _undecayed(
    parts: list[Part], dtype: str, rate: float, inner: Any
) -> Iterator[Found]:
    decay = getattr(inner, "weight_decay", None)
    if not isinstance(decay, (int, float)) or decay <= 0:
        return
    # A decay of half a spacing is lost; relative to a weight that is epsilon / 2 just
    # above a power of 2, and epsilon / 4 just below the next.
    spacing = formats.FORMATS[dtype].epsilon
    product = rate * decay
    if product >= spacing / 2:
        return
    whose = "any weight" if product < spacing / 4 else "part of the weights"
    yield Found(
        "warning",
        f"The weight decay of {inner.name!r} takes {product:.2g} of a weight in an "
        f"update ({decay:g} times the learning rate {rate:.2g}), which {dtype} rounds "
        f"away: it does not shrink {whose} of {name_layers([p.path for p in parts])}.",
        f"Use the policy 'mixed_{dtype}', which keeps weights in float32. In {dtype} "
        f"the product has to be at least {spacing / 2:.2g}.",
        parts[0].path,
        product,
        {"dtype": dtype, "weight_decay": decay, "learning_rate": rate},
    )


def _optimized(subject: Subject) -> Iterator[tuple[Any, str, list[Part]]]:
    """Yields each optimizer, a half-precision dtype and the layers stored in it."""
    for optimizer in subject.optimizers:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        for dtype in HALF:
            parts = [
                part
                for part in subject.parts
                if any(w.trainable and w.dtype == dtype for w in part.weights)
            ]
            if parts:
                yield inner, dtype, parts


def _largest_rate(inner: Any) -> float:
    """Returns the learning rate, of a schedule its largest.

    Raises:
        CannotTellError: The schedule does not answer.
    """
    rate = getattr(inner, "_learning_rate", None)
    if isinstance(rate, _K.schedules.LearningRateSchedule):
        try:
            return max(float(rate(tf.constant(step))) for step in _STEPS)
        except Exception as error:  # the user's own code, which may do anything
            name = type(rate).__name__
            why = f"the schedule {name} cannot be asked ({type(error).__name__})"
            raise CannotTellError(why) from error
    if rate is None:
        raise CannotTellError(f"{inner.name!r} tells no learning rate")
    return float(keras.ops.convert_to_numpy(rate))
