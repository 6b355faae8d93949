"""Finds where the first number of a step that is not finite comes from."""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.stepping.eager_step import (
    Call,
    Observer,
    Step,
    floats,
    run_step,
    sites,
    tapped,
)


class Origin(NamedTuple):
    """Where a bad number came from.

    A layer or operation, on the way "forward" or "backward".
    """

    path: str
    layer: Any
    way: Literal["forward", "backward"]


@dataclasses.dataclass
class _Made:
    """A call that made bad numbers of good ones.

    They are a mask where all are -inf, as what a softmax is to leave out, and taken up
    where a later call made good numbers of them again.
    """

    origin: Origin
    is_mask: bool
    is_taken_up: bool = False


# A layer's identity, and the number of its call.
_Key = tuple[int, int]


def _key(call: Call) -> _Key:
    return id(call.site.layer), call.number


class Health(Observer):
    """Watches for the first call that makes a bad number of good ones.

    `backward` is the first one on the way back, None if all were fine; `largest` and
    `largest_gradient` are the largest finite magnitudes of each layer's outputs and of
    the gradients by them, by path.
    """

    wants_gradients = True

    def __init__(self) -> None:
        self.backward: Origin | None = None
        self.largest: dict[str, float] = {}
        self.largest_gradient: dict[str, float] = {}
        self._came_back_bad: set[_Key] = set()
        self._made: list[_Made] = []
        self._num_made_at_start: list[int] = []
        # The calls that one is inside of, and the one around each.
        self._open: list[Call] = []
        self._around: dict[_Key, Call | None] = {}
        self._first_back: _Key | None = None

    @property
    def masks(self) -> frozenset[str]:
        """The paths of what made -inf that a later call took up."""
        return frozenset(
            made.origin.path for made in self._made if made.is_mask and made.is_taken_up
        )

    def forward(self, masks: frozenset[str]) -> Origin | None:
        """Returns the first one on the way forward that is no mask, if any."""
        origins = (made.origin for made in self._made)
        return next((o for o in origins if o.path not in masks), None)

    def on_call(self, call: Call) -> None:
        """Notes what was bad ahead of a call."""
        self._num_made_at_start.append(len(self._made))
        self._around[_key(call)] = self._open[-1] if self._open else None
        self._open.append(call)

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Judges a call by its inputs and outputs; inner calls come first."""
        self._open.pop()
        tensors = floats(outputs)
        self._note(self.largest, call.site.path, tensors)
        inside = self._made[self._num_made_at_start.pop() :]
        inputs_are_finite = _are_finite(floats((call.args, call.kwargs)))
        if _are_finite(tensors):
            taken = inside if inputs_are_finite or not tensors else self._made
            for made in taken:
                made.is_taken_up = True
        elif inputs_are_finite and all(made.is_taken_up for made in inside):
            origin = Origin(call.site.path, call.site.layer, "forward")
            is_mask = all(
                bool(tf.reduce_all(tf.math.is_finite(each) | (each == -math.inf)))
                for each in tensors
            )
            self._made.append(_Made(origin, is_mask))

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        """Judges a call by what came to its outputs and leaves by its inputs."""
        key = _key(call)
        is_finite = _are_finite([gradient])
        if of == "outputs":
            self._note(self.largest_gradient, call.site.path, [gradient])
            if not is_finite:
                self._came_back_bad.add(key)
                if self._first_back is None and self.backward is None:
                    self._first_back = key
        elif not is_finite and self.backward is None:
            if key not in self._came_back_bad:
                self.backward = Origin(call.site.path, call.site.layer, "backward")

    @property
    def came_from_outside(self) -> bool:
        """Whether the first bad gradient came from none of the layers watched.

        Then what a layer gives is used past other layers, as in a train step or in the
        `call` of a model.
        """
        return self.backward is None and self._first_back is not None

    def between(self) -> Origin | None:
        """Returns the layer whose own `call` the first bad gradient came from.

        None where it came from outside of all layers, as from the loss.
        """
        around = None if self._first_back is None else self._around[self._first_back]
        if around is None:
            return None
        return Origin(around.site.path, around.site.layer, "backward")

    def of_weights(self, model: keras.Model, step: Step) -> Origin | None:
        """Returns the last layer with a bad gradient of a weight, None if none has."""
        bad = {
            id(variable)
            for variable, gradient in step.gradients
            if gradient is not None and not _are_finite([gradient])
        }
        found = None
        for site in sites(model):
            if isinstance(site.layer, keras.layers.Layer):
                weights = structure.own_weights(site.layer)
                if any(id(weight) in bad for weight in weights):
                    found = Origin(site.path, site.layer, "backward")
        return found

    def _note(self, kept: dict[str, float], path: str, tensors: list[Any]) -> None:
        for tensor in tensors:
            values = np.abs(np.asarray(tf.cast(tensor, tf.float32)))
            values = values[np.isfinite(values)]
            if values.size:
                kept[path] = max(kept.get(path, 0.0), float(values.max()))


class Examined(NamedTuple):
    """A replay of a step, what was seen in it, and where a bad number came from."""

    step: Step
    health: Health
    origin: Origin | None
    is_exact: bool = False

    def knowing(self, model: keras.Model, masks: frozenset[str]) -> "Examined":
        """Returns it with the origin among all that is no mask."""
        origin = _origin(model, self.step, self.health, masks, is_exact=self.is_exact)
        return self._replace(origin=origin)


def examine(
    model: keras.Model, batch: Any, *, loss_scale: float, is_exact: bool = False
) -> Examined:
    """Runs the train step with every layer watched.

    Where it `is_exact`, in float32, no gradient becomes bad by being handed on: what
    comes back bad to a layer was bad when it left the one before.
    """
    health = Health()
    with tapped(model, health):
        step = run_step(model, batch, loss_scale=loss_scale)
    origin = _origin(model, step, health, health.masks, is_exact=is_exact)
    return Examined(step, health, origin, is_exact)


def _origin(
    model: keras.Model,
    step: Step,
    health: Health,
    masks: frozenset[str],
    *,
    is_exact: bool,
) -> Origin | None:
    origin = health.forward(masks)
    if origin is None and not step.is_finite:
        loss_is_fine = step.loss is None or bool(tf.math.is_finite(step.loss))
        if loss_is_fine and is_exact and health.came_from_outside:
            return health.between()
        if loss_is_fine:
            origin = health.backward or health.of_weights(model, step)
    return origin


def _are_finite(tensors: list[Any]) -> bool:
    """States whether tensors are finite, or were before they were rounded.

    What a layer in float32 hands over beyond the range of half precision is good: it is
    the one who takes it in half precision that makes it bad.
    """
    return all(
        bool(tf.reduce_all(tf.math.is_finite(unrounded(tensor)))) for tensor in tensors
    )
