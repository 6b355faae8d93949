"""Replays a step, and finds where its first number that is not finite comes from."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.stepping.eager_step import Call, Step, floats, run_step, sites, tapped
from tfamp.stepping.layer_calls import Recorded, Recorder


class NoRowError(Exception):
    """Raised where an embedding is asked for rows it does not have; says which."""


class Origin(NamedTuple):
    """The layer or operation a bad number came from, and on which way."""

    path: str
    layer: Any
    way: Literal["forward", "backward"]


class Examined(NamedTuple):
    """A replay of a step, and where a bad number came from.

    `harmless` are the paths of what made numbers that are not finite of which a later
    call made good ones again, as a softmax does of -inf for what it is to leave out.
    """

    step: Step
    calls: list[Recorded]
    origin: Origin | None
    harmless: frozenset[str]

    @property
    def loss(self) -> float | None:
        """The loss without a scale, None where the step told none."""
        return None if self.step.loss is None else float(self.step.loss)

    def largest(self, path: str, way: str) -> float:
        """Returns the largest finite output of a layer, or gradient by one."""
        found = [0.0]
        for call in self.calls:
            outputs: Any = floats(call.outputs)
            given = outputs if way == "forward" else call.output_gradients
            for each in given if call.site.path == path else ():
                if each is not None:
                    values = np.abs(np.asarray(tf.cast(each, tf.float32)))
                    found.append(float(values[np.isfinite(values)].max(initial=0)))
        return max(found)


class _Calls(Recorder):
    """Keeps every call, with logits as in the step itself, and ids without a row.

    A CPU raises an error for such an id; a GPU gives rows of zeros, and says nothing.
    """

    keeps_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.lost: list[str] = []

    def on_call(self, call: Call) -> None:
        """Keeps what goes in."""
        super().on_call(call)
        if isinstance(call.site.layer, keras.layers.Embedding):
            given = (*call.args, *call.kwargs.values())[0]
            ids = np.asarray(getattr(given, "values", given))  # of a sparse tensor
            count = call.site.layer.input_dim
            outside = (ids < 0) | (ids >= count)
            if outside.any():
                self.lost.append(
                    f"{call.site.path!r} has rows 0 to {count - 1} and is asked for "
                    f"{int(outside.sum())} others, such as "
                    f"{int(ids[outside].flat[0])}, in {examples(outside)}."
                )


def examples(bad: np.ndarray) -> str:
    """Returns "2 of 16 examples (number 5, 9)" of where something is bad."""
    rows = sorted(set(np.argwhere(bad)[:, 0].tolist())) if bad.ndim else [0]
    shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"{len(rows)} of {len(bad) if bad.ndim else 1} examples (number {shown})"


def examine(
    model: keras.Model,
    batch: Any,
    *,
    loss_scale: float = 1.0,
    is_exact: bool = False,
    harmless: frozenset[str] = frozenset(),
) -> Examined:
    """Runs the train step with every layer watched; those `harmless` are at no fault.

    Where it `is_exact`, in float32, no gradient becomes bad by being handed on. A
    `NoRowError` says that ids have no row.
    """
    seen = _Calls()
    try:
        with tapped(model, seen):
            step = run_step(model, batch, loss_scale=loss_scale)
    except tf.errors.InvalidArgumentError:
        if not seen.lost:
            raise
    if seen.lost:
        raise NoRowError(seen.lost[0])
    inside = {id(child) for call in seen.calls for child in call.inside}
    outermost = [call for call in seen.calls if id(call) not in inside]
    made: list[Origin] = []
    taken_up: list[Origin] = []
    for call in outermost:
        _judge(call, made, taken_up)
    at_fault = (m for m in made if m not in taken_up and m.path not in harmless)
    origin = next(at_fault, None)
    has_bad_loss = step.loss is not None and not bool(tf.math.is_finite(step.loss))
    if origin is None and not step.is_finite and not has_bad_loss:
        origin = _backward(model, step, seen.calls, outermost if is_exact else [])
    return Examined(step, seen.calls, origin, frozenset(m.path for m in taken_up))


def _judge(call: Recorded, made: list[Origin], taken_up: list[Origin]) -> None:
    """Notes a call that made bad numbers of good ones; the calls inside come first."""
    num_before, outputs = len(made), floats(call.outputs)
    for child in call.inside:
        _judge(child, made, taken_up)
    inside = made[num_before:]
    inputs_are_finite = _are_finite(call.float_inputs)
    if _are_finite(outputs):
        taken_up += inside if inputs_are_finite or not outputs else made
    elif inputs_are_finite and all(each in taken_up for each in inside):
        made.append(Origin(call.site.path, call.site.layer, "forward"))


def _backward(
    model: keras.Model, step: Step, calls: list[Recorded], outermost: list[Recorded]
) -> Origin | None:
    """Returns where the first bad gradient came from, None for the loss.

    That is the last call with good gradients by its outputs and bad ones by its inputs;
    or else the layer around the call whose outputs it came to, whose own `call` made it
    between its layers; or else the last layer with a bad gradient of a weight.
    """
    for call in reversed(calls):  # inner ones ahead of those around them
        if _are_finite(call.output_gradients) and not _are_finite(call.input_gradients):
            return Origin(call.site.path, call.site.layer, "backward")
    for call, around in _from_the_last(outermost, None):
        if not _are_finite(call.output_gradients):
            site = None if around is None else around.site
            return None if site is None else Origin(site.path, site.layer, "backward")
    bad = {id(variable) for variable, g in step.gradients if not _are_finite([g])}
    found = None
    for path, layer in sites(model):
        if isinstance(layer, keras.layers.Layer):
            if any(id(weight) in bad for weight in structure.own_weights(layer)):
                found = Origin(path, layer, "backward")
    return found


def _from_the_last(
    calls: list[Recorded], around: Recorded | None
) -> Iterator[tuple[Recorded, Recorded | None]]:
    """Yields calls with the one around each, as gradients come to their outputs."""
    for call in reversed(calls):
        yield call, around
        yield from _from_the_last(call.inside, call)


def _are_finite(tensors: list[Any]) -> bool:
    """States whether tensors, but for None, are finite, or were ahead of rounding.

    What a layer in float32 hands over beyond the range of half precision is good: it is
    the one who takes it in half precision that makes it bad.
    """
    return all(
        bool(tf.reduce_all(tf.math.is_finite(unrounded(tensor))))
        for tensor in tensors
        if tensor is not None
    )
