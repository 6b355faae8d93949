"""Replays a step, and finds where its first number that is not finite comes from."""

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
    """The layer or operation a bad number came from, and on which way."""

    path: str
    layer: Any
    way: Literal["forward", "backward"]


class _Made:
    """A call that made bad numbers of good ones.

    They are a mask where all are -inf, as what a softmax is to leave out, and taken up
    where a later call made good numbers of them again.
    """

    def __init__(self, origin: Origin, tensors: list[Any]) -> None:
        self.origin = origin
        self.is_mask = all(
            bool(tf.reduce_all(tf.math.is_finite(each) | (each == -math.inf)))
            for each in tensors
        )
        self.is_taken_up = False


class Health(Observer):
    """Watches for the first call that makes a bad number of good ones.

    `backward` is the first one on the way back, None if all were fine; `largest` has
    the largest finite magnitude of each layer's outputs, and of the gradients by them,
    by path and way.
    """

    wants_gradients = True

    def __init__(self) -> None:
        self.backward: Origin | None = None
        self.largest: dict[tuple[str, str], float] = {}
        self._made: list[_Made] = []
        self._num_made_at_start: list[int] = []
        self._came_back_bad: set[tuple[int, int]] = set()
        # The calls that one is inside of, and the one around each.
        self._open: list[Call] = []
        self._around: dict[tuple[int, int], Call | None] = {}
        self._first_back: tuple[int, int] | None = None

    @property
    def masks(self) -> frozenset[str]:
        """The paths of what made -inf that a later call took up."""
        taken = (made for made in self._made if made.is_mask and made.is_taken_up)
        return frozenset(made.origin.path for made in taken)

    def on_call(self, call: Call) -> None:
        """Notes what was bad ahead of a call."""
        self._num_made_at_start.append(len(self._made))
        self._around[_key(call)] = self._open[-1] if self._open else None
        self._open.append(call)

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Judges a call by its inputs and outputs; inner calls come first."""
        self._open.pop()
        tensors = floats(outputs)
        self._note(call, "forward", tensors)
        inside = self._made[self._num_made_at_start.pop() :]
        inputs_are_finite = _are_finite(floats((call.args, call.kwargs)))
        if _are_finite(tensors):
            for made in inside if inputs_are_finite or not tensors else self._made:
                made.is_taken_up = True
        elif inputs_are_finite and all(made.is_taken_up for made in inside):
            origin = Origin(call.site.path, call.site.layer, "forward")
            self._made.append(_Made(origin, tensors))

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        """Judges a call by what came to its outputs and leaves by its inputs."""
        if of == "outputs":
            self._note(call, "backward", [gradient])
        if self.backward is not None or _are_finite([gradient]):
            return
        if of == "outputs":
            self._came_back_bad.add(_key(call))
            self._first_back = self._first_back or _key(call)
        elif _key(call) not in self._came_back_bad:
            self.backward = Origin(call.site.path, call.site.layer, "backward")

    def origin(
        self,
        model: keras.Model,
        step: Step,
        masks: frozenset[str],
        *,
        is_exact: bool,
    ) -> Origin | None:
        """Returns where the first bad number came from that is no mask.

        Where it `is_exact`, in float32, no gradient becomes bad by being handed on.
        Where no layer was seen to make it, it is then the one around, whose own `call`
        did, or None, as for the loss.
        """
        origins = (made.origin for made in self._made)
        forward = next((o for o in origins if o.path not in masks), None)
        if forward is not None or step.is_finite:
            return forward
        if step.loss is not None and not bool(tf.math.is_finite(step.loss)):
            return None
        if is_exact and self.backward is None and self._first_back is not None:
            around = self._around[self._first_back]
            if around is None:
                return None
            return Origin(around.site.path, around.site.layer, "backward")
        return self.backward or _of_weights(model, step)

    def _note(self, call: Call, way: str, tensors: list[Any]) -> None:
        for tensor in tensors:
            values = np.abs(np.asarray(tf.cast(tensor, tf.float32)))
            largest = float(values.max(initial=0.0, where=np.isfinite(values)))
            key = call.site.path, way
            self.largest[key] = max(self.largest.get(key, 0.0), largest)


def _of_weights(model: keras.Model, step: Step) -> Origin | None:
    """Returns the last layer with a bad gradient of a weight, None if none has."""
    bad = {
        id(variable)
        for variable, gradient in step.gradients
        if gradient is not None and not _are_finite([gradient])
    }
    found = None
    for site in sites(model):
        if isinstance(site.layer, keras.layers.Layer):
            if any(id(weight) in bad for weight in structure.own_weights(site.layer)):
                found = Origin(site.path, site.layer, "backward")
    return found


class Examined(NamedTuple):
    """A replay of a step, what was seen in it, and where a bad number came from."""

    step: Step
    health: Health
    origin: Origin | None

    @property
    def loss(self) -> float | None:
        """The loss without a scale, None where the step told none."""
        return None if self.step.loss is None else float(self.step.loss)


def examine(
    model: keras.Model,
    batch: Any,
    *,
    loss_scale: float = 1.0,
    is_exact: bool = False,
    masks: frozenset[str] | None = None,
) -> Examined:
    """Runs the train step with every layer watched; `masks` are known ones."""
    health = Health()
    with tapped(model, health):
        step = run_step(model, batch, loss_scale=loss_scale)
    known = health.masks if masks is None else masks
    return Examined(step, health, health.origin(model, step, known, is_exact=is_exact))


def _key(call: Call) -> tuple[int, int]:
    return id(call.site.layer), call.number


def _are_finite(tensors: list[Any]) -> bool:
    """States whether tensors are finite, or were before they were rounded.

    What a layer in float32 hands over beyond the range of half precision is good: it is
    the one who takes it in half precision that makes it bad.
    """
    return all(
        bool(tf.reduce_all(tf.math.is_finite(unrounded(tensor)))) for tensor in tensors
    )
