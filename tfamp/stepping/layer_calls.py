"""Keeps what went through every layer in a float32 step, to run layers again alone."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.stepping.taps import Call, Observer, Site, floats


@dataclasses.dataclass
class Recorded:
    """One call of a layer in a float32 step.

    Args:
        site: The layer or operation.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        state: Variables that are not trained, and their values ahead of the call.
        inside: The calls made by it directly, in order.

    Attributes:
        outputs: What it returned.
        output_gradients: The gradients of the loss by the floating-point outputs; None
            where there is none.
        input_gradients: Likewise by the floating-point inputs.
        losses: Losses that its `call` added itself, scalars.
    """

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: tuple[tuple[Any, np.ndarray], ...]
    inside: list["Recorded"] = dataclasses.field(default_factory=list)
    outputs: Any = None
    output_gradients: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    input_gradients: list[tf.Tensor | None] = dataclasses.field(default_factory=list)
    losses: list[tf.Tensor] = dataclasses.field(default_factory=list)

    @property
    def float_inputs(self) -> list[tf.Tensor]:
        """The floating-point inputs."""
        return floats((self.args, self.kwargs))


class Recorder(Observer):
    """Keeps every call of a step that runs eagerly.

    Losses see what a head returned, not the logits behind it: that link is lost where
    stock Keras casts a half-precision output for its loss.

    Attributes:
        calls: All calls, in the order they began.
    """

    wants_gradients = True
    keeps_logits = False

    def __init__(self) -> None:
        self.calls: list[Recorded] = []
        self._running: list[Recorded] = []
        self._num_losses: list[int] = []
        self._by_call: dict[tuple[int, int], Recorded] = {}

    def on_call(self, call: Call) -> None:
        """Keeps what goes in."""
        layer = call.site.layer
        state = state_of(layer) if isinstance(layer, keras.layers.Layer) else ()
        recorded = Recorded(call.site, call.args, call.kwargs, state)
        recorded.input_gradients = [None] * len(recorded.float_inputs)
        if self._running:
            self._running[-1].inside.append(recorded)
        self._running.append(recorded)
        self._num_losses.append(len(own_losses(layer)))
        self.calls.append(recorded)
        self._by_call[id(layer), call.number] = recorded

    def on_outputs(self, call: Call, outputs: Any) -> None:
        """Keeps what comes out."""
        recorded = self._running.pop()
        recorded.outputs = outputs
        recorded.losses = own_losses(call.site.layer)[self._num_losses.pop() :]
        recorded.output_gradients = [None] * len(floats(outputs))

    def on_gradient(
        self, call: Call, of: Literal["inputs", "outputs"], at: int, gradient: tf.Tensor
    ) -> None:
        """Keeps what comes back."""
        recorded = self._by_call[id(call.site.layer), call.number]
        kept = recorded.input_gradients if of == "inputs" else recorded.output_gradients
        before = kept[at]
        kept[at] = gradient if before is None else before + gradient


def own_losses(layer: Any) -> list[tf.Tensor]:
    """Returns the losses that a layer's last calls have added themselves."""
    is_layer = isinstance(layer, keras.layers.Layer)
    return structure.own_losses(layer) if is_layer else []


def state_of(layer: keras.layers.Layer) -> tuple[tuple[Any, np.ndarray], ...]:
    """Returns the variables a call may write, and copies of their values."""
    trained = {id(variable) for variable in layer.trainable_variables}
    # Copies: NumPy may look at the very memory that the step writes.
    return tuple(
        (variable, np.asarray(variable.value).copy())
        for variable in layer.variables
        if id(variable) not in trained
    )


def set_state(state: Iterable[tuple[Any, np.ndarray]]) -> None:
    """Gives variables the values that `state_of` kept; it may be called again."""
    for variable, value in state:
        # A copy, since TensorFlow may go on writing in the memory it is given.
        variable.assign(value.copy())


@contextlib.contextmanager
def state_restored(state: Sequence[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Runs with the state that `state_of` kept, and leaves it as it is."""
    held = [(v, np.asarray(v.value).copy()) for v, _ in state]
    set_state(state)
    try:
        yield
    finally:
        set_state(held)


def children_of(layer: Any) -> list[keras.layers.Layer]:
    """Returns the layers directly inside a layer; an operation has none."""
    if not isinstance(layer, keras.layers.Layer):
        return []
    return structure.children(layer)
