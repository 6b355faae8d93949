"""Replays a step, and finds where its first number that is not finite comes from."""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.stepping.eager_step import Call, Step, floats, run_step, sites, tapped
from tfamp.stepping.layer_calls import Recorded, Recorder


class Origin(NamedTuple):
    """The layer or operation a bad number came from, and on which way."""

    path: str
    layer: Any
    way: Literal["forward", "backward"]


class _Calls(Recorder):
    """Keeps every call of every layer; losses take logits as in the step itself.

    What is traced, as a trial of a layer that tfamp manages, is no call of the step.
    """

    keeps_logits = True

    def on_call(self, call: Call) -> None:
        """Keeps what goes in."""
        if tf.executing_eagerly():
            super().on_call(call)

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Keeps what comes out."""
        if tf.executing_eagerly():
            super().on_outputs(call, outputs)

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        """Keeps what comes back."""
        if tf.executing_eagerly():
            super().on_gradient(call, of, at, gradient)


class Examined(NamedTuple):
    """A replay of a step, and where a bad number came from.

    `masks` are the paths of what made -inf that a later call made good numbers of, as
    what a softmax is to leave out.
    """

    step: Step
    calls: list[Recorded]
    origin: Origin | None
    masks: frozenset[str]

    @property
    def loss(self) -> float | None:
        """The loss without a scale, None where the step told none."""
        return None if self.step.loss is None else float(self.step.loss)

    def largest(self, path: str, way: str) -> float:
        """Returns the largest finite output of a layer, or gradient by one."""
        found = [0.0]
        for call in self.calls:
            if call.site.path == path:
                is_forward = way == "forward"
                given = floats(call.outputs) if is_forward else call.output_gradients
                arrays = [np.asarray(tf.cast(x, tf.float32)) for x in _known(given)]
                found += [
                    float(np.abs(a[np.isfinite(a)]).max(initial=0)) for a in arrays
                ]
        return max(found)


def examine(
    model: keras.Model,
    batch: Any,
    *,
    loss_scale: float = 1.0,
    is_exact: bool = False,
    masks: frozenset[str] | None = None,
) -> Examined:
    """Runs the train step with every layer watched.

    What made -inf is no fault where it is among the `masks`; None takes those of this
    step. Where it `is_exact`, in float32, no gradient becomes bad by being handed on.
    """
    seen = _Calls()
    with tapped(model, seen):
        step = run_step(model, batch, loss_scale=loss_scale)
    inside = {id(child) for call in seen.calls for child in call.inside}
    outermost = [call for call in seen.calls if id(call) not in inside]
    made: list[_Made] = []
    for call in outermost:
        _judge(call, made)
    own = frozenset(m.origin.path for m in made if m.is_mask and m.is_taken_up)
    masks = own if masks is None else masks
    origin = next((m.origin for m in made if m.origin.path not in masks), None)
    if origin is None and not step.is_finite:
        if step.loss is None or bool(tf.math.is_finite(step.loss)):
            origin = _backward(model, step, seen.calls, outermost if is_exact else [])
    return Examined(step, seen.calls, origin, own)


class _Made:
    """A call that made bad numbers of good ones: all -inf is a mask.

    It is taken up where a later call made good numbers of them again.
    """

    def __init__(self, call: Recorded) -> None:
        self.origin = Origin(call.site.path, call.site.layer, "forward")
        self.is_taken_up = False
        self.is_mask = all(
            bool(tf.reduce_all(tf.math.is_finite(each) | (each == -math.inf)))
            for each in floats(call.outputs)
        )


def _judge(call: Recorded, made: list[_Made]) -> None:
    """Judges a call by its inputs and outputs; the calls inside it come first."""
    num_before, outputs = len(made), floats(call.outputs)
    for child in call.inside:
        _judge(child, made)
    inside = made[num_before:]
    inputs_are_finite = _are_finite(call.float_inputs)
    if _are_finite(outputs):
        for each in inside if inputs_are_finite or not outputs else made:
            each.is_taken_up = True
    elif inputs_are_finite and all(each.is_taken_up for each in inside):
        made.append(_Made(call))


def _backward(
    model: keras.Model, step: Step, calls: list[Recorded], outermost: list[Recorded]
) -> Origin | None:
    """Returns where the first bad gradient came from, None for the loss.

    That is the last call with good gradients by its outputs and bad ones by its inputs;
    or else the layer around the call whose outputs it came to, whose own `call` made it
    between its layers; or else the last layer with a bad gradient of a weight.
    """
    for call in reversed(calls):  # inner ones ahead of those around them
        came_back_good = _are_finite(_known(call.output_gradients))
        if came_back_good and not _are_finite(_known(call.input_gradients)):
            return Origin(call.site.path, call.site.layer, "backward")
    for call, around in _from_the_last(outermost, None):
        if not _are_finite(_known(call.output_gradients)):
            if around is None:
                return None
            return Origin(around.site.path, around.site.layer, "backward")
    bad = {id(v) for v, g in step.gradients if not _are_finite(_known([g]))}
    found = None
    for site in sites(model):
        if isinstance(site.layer, keras.layers.Layer):
            if any(id(weight) in bad for weight in structure.own_weights(site.layer)):
                found = Origin(site.path, site.layer, "backward")
    return found


def _from_the_last(
    calls: list[Recorded], around: Recorded | None
) -> Iterator[tuple[Recorded, Recorded | None]]:
    """Yields calls with the one around each, as gradients come to their outputs."""
    for call in reversed(calls):
        yield call, around
        yield from _from_the_last(call.inside, call)


def _known(tensors: list[Any]) -> list[Any]:
    return [each for each in tensors if each is not None]


def _are_finite(tensors: list[Any]) -> bool:
    """States whether tensors are finite, or were before they were rounded.

    What a layer in float32 hands over beyond the range of half precision is good: it is
    the one who takes it in half precision that makes it bad.
    """
    return all(
        bool(tf.reduce_all(tf.math.is_finite(unrounded(tensor)))) for tensor in tensors
    )
