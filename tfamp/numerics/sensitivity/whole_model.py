"""Compares a step of the whole model in low precision with the float32 one."""

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.sensitivity.deviation import forward_error, gradient_error
from tfamp.stepping.eager_step import Step
from tfamp.stepping.taps import Call, Observer, Site, floats

# Errors that are no worse: so many times what is there anyway, or too small to see.
_NO_WORSE, _NOTICEABLE = 1.5, 0.01


class Outputs(Observer):
    """Keeps what the model itself gives.

    Args:
        model: The model.
    """

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

    Args:
        gradients: The error of all gradients together, relative to their size.
        outputs: That of the model's outputs, relative to their spread over the batch.
        loss: That of the loss, relative to it.
        of_layers: That of the gradients of each layer's own weights, by path.
    """

    gradients: float = 0.0
    outputs: float = 0.0
    loss: float = 0.0
    of_layers: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def of_all(self) -> dict[str, float]:
        """The errors of the whole, by what is off."""
        return {
            "gradients": self.gradients,
            "outputs": self.outputs,
            "loss": self.loss,
        }

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
        its own, and by what the model gives.

        Args:
            than: The errors of the other.
            forward: Error of outputs, and of the loss, that does no harm.
            backward: That of a layer's gradients.
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

    Args:
        model: The model.
        low: The step in low precision, and the model's outputs in it.
        exact: Likewise in float32.
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
