"""Compares a step of the whole model in low precision with the float32 one."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.stepping.eager_step import Step
from tfamp.stepping.taps import Call, Observer, Site, floats

# A spread of less than this part of the magnitude is that of a constant.
_CONSTANT = 1e-6


# Errors that are no worse: so many times what is there anyway, or too small to see.
_NO_WORSE, _NOTICEABLE = 1.5, 0.01


def deviation(values: np.ndarray) -> float:
    """Returns how much numbers of shape (batch, ...) differ over the batch.

    That root mean square is what the next layers learn from: of values around 1000 that
    differ by 1 an error of 1 is all of it. Where nothing differs, or there is one
    example, it is the magnitude.

    Example:
        >>> deviation(np.array([[999.0], [1001.0]]))
        1.0
        >>> deviation(np.array([[3.0, 4.0]])) == (12.5 ** 0.5)
        True
    """
    magnitude = _rms(values)
    if values.ndim < 1 or len(values) < 2:
        return magnitude
    around = _rms(values - values.mean(axis=0))
    return around if around > _CONSTANT * magnitude else magnitude


def forward_error(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns the error of outputs relative to their spread over the batch.

    inf where a number is not finite that is so in float32, 0 where nothing is wrong;
    numbers that are not finite in float32 either are left out.

    Example:
        >>> exact = np.array([[999.0], [1001.0]])
        >>> forward_error(exact + 0.5, exact), forward_error(exact * np.inf, exact)
        (0.5, inf)
    """
    low, exact = low.astype(np.float64), exact.astype(np.float64)
    usable = np.isfinite(exact)
    if not np.isfinite(low[usable]).all():
        return math.inf
    if not usable.all():
        low, exact = np.where(usable, low, 0.0), np.where(usable, exact, 0.0)
    scale = deviation(exact)
    error = _rms(low - exact)
    # Against outputs that are all 0 nothing can be said to be large.
    return error / scale if scale else 0.0


def gradient_error(
    low: Sequence[np.ndarray | None], exact: Sequence[np.ndarray | None]
) -> float:
    """Returns the error of a layer's gradients, all of them together.

    A gradient that is 0 by its nature, such as that of a bias ahead of a
    normalization, is rounding noise on both sides and counts for nothing beside the
    others.

    Example:
        >>> noise, real = np.array([1e-9]), np.array([3.0, 4.0])
        >>> gradient_error([noise, real], [-noise, real]) < 1e-9
        True
        >>> gradient_error([real * np.nan], [real])
        inf
    """
    pairs = [
        (a.astype(np.float64), b.astype(np.float64))
        for a, b in zip(low, exact, strict=True)
        if a is not None and b is not None and np.isfinite(b).all()
    ]
    if not all(np.isfinite(a).all() for a, _ in pairs):
        return math.inf
    error = sum(float(np.square(a - b).sum()) for a, b in pairs)
    size = sum(float(np.square(b).sum()) for _, b in pairs)
    return math.sqrt(error / size) if size else 0.0


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


class Outputs(Observer):
    """Keeps what the model itself gives."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.kept: list[np.ndarray] = []

    def watches(self, site: Site) -> bool:
        """States whether a site is the model itself."""
        return site.layer is self._model

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Keeps the outputs of a call."""
        self.kept += [np.asarray(tf.cast(x, tf.float32)) for x in floats(outputs)]


@dataclasses.dataclass(frozen=True)
class Errors:
    """How far a step of the whole model is off, or the worst of several.

    `gradients` is the error of all gradients together relative to their size, `outputs`
    that of the outputs relative to their spread over the batch, `loss` relative to it;
    `of_layers` has the gradients of each layer's own weights by path.
    """

    gradients: float = 0.0
    outputs: float = 0.0
    loss: float = 0.0
    of_layers: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def of_all(self) -> dict[str, float]:
        """The errors of the whole, by what is off."""
        return {name: getattr(self, name) for name in ("gradients", "outputs", "loss")}

    def worst(self, other: "Errors") -> "Errors":
        """Returns the larger errors of the two."""
        paths = {*self.of_layers, *other.of_layers}
        return Errors(
            max(self.gradients, other.gradients),
            max(self.outputs, other.outputs),
            max(self.loss, other.loss),
            {p: max(self.of_layer(p), other.of_layer(p)) for p in paths},
        )

    def of_layer(self, path: str) -> float:
        """Returns the error of the gradients of a layer's own weights, 0 if none."""
        return self.of_layers.get(path, 0.0)

    def is_no_worse(self, than: "Errors", *, forward: float, backward: float) -> bool:
        """States whether a step does as well as one with a layer more in float32.

        A layer with a small part of the gradients may be wholly wrong, so it counts by
        its own, and by what the model gives. Errors of outputs and loss up to
        `forward`, and of a layer's gradients up to `backward`, do no harm.
        """
        gradients = max(_NO_WORSE * than.gradients, than.gradients + _NOTICEABLE)
        return (
            self.gradients <= gradients
            and self.outputs <= max(_NO_WORSE * than.outputs, forward)
            and self.loss <= max(_NO_WORSE * than.loss, forward)
            and all(
                error <= max(_NO_WORSE * than.of_layer(path), backward)
                for path, error in self.of_layers.items()
            )
        )


def errors_of(
    model: keras.Model,
    low: tuple[Step, list[np.ndarray]],
    exact: tuple[Step, list[np.ndarray]],
) -> Errors:
    """Returns how far a step is off.

    `low` and `exact` are steps with the model's outputs.
    """
    found = {id(variable): gradient for variable, gradient in low[0].gradients}
    pairs = {
        id(variable): (_array(found.get(id(variable))), _array(gradient))
        for variable, gradient in exact[0].gradients
    }
    of_layers = {}
    for path, layer, _ in structure.walk(model):
        own = [pairs[id(w)] for w in structure.own_weights(layer) if id(w) in pairs]
        if own:
            of_layers[path] = _gradient_error(own)
    outputs = [forward_error(a, b) for a, b in zip(low[1], exact[1], strict=False)]
    losses = [each[0].loss for each in (low, exact)]
    loss = 0.0
    if losses[0] is not None and losses[1] is not None:
        loss = forward_error(*(np.asarray(each) for each in losses))
    return Errors(
        _gradient_error(list(pairs.values())),
        max(outputs, default=0.0),
        loss,
        of_layers,
    )


def _array(gradient: Any) -> np.ndarray | None:
    return None if gradient is None else np.asarray(tf.convert_to_tensor(gradient))


def _gradient_error(pairs: list[tuple[np.ndarray | None, np.ndarray | None]]) -> float:
    return gradient_error([a for a, _ in pairs], [b for _, b in pairs])
