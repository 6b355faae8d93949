"""Layers that compute, what went through them, and how to run them in other dtypes."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.dtypes.resolution import count_as_met
from tfamp.keras_hooks import exact_values, structure
from tfamp.keras_hooks.exact_values import source_of
from tfamp.keras_hooks.layers import policy_of, put, put_back, snapshot
from tfamp.keras_hooks.patches import like, replaced
from tfamp.stepping.eager_step import Call, Observer, Site, floats, sites

# What is inside these runs with them: a cell belongs to its layer, and what is wrapped
# runs in the wrapper's dtype.
_WHOLE = (keras.layers.RNN, keras.layers.TimeDistributed)
_FLOATS = ("float16", "bfloat16", "float32")


def units(model: keras.Model) -> list[Site]:
    """Returns what computes by itself, without the inside of recurrent layers."""
    found = sites(model)
    whole = (site.layer for site in found if isinstance(site.layer, _WHOLE))
    parts = [each for layer in whole for each in structure.walk(layer)]
    inside = {id(child) for _, child, parent in parts if parent is not None}
    return [s for s in found if id(s.layer) not in inside and computes_itself(s)]


def computes_itself(site: Site) -> bool:
    """States whether a layer has a call of its own, rather than a graph of others."""
    return not is_layer(site.layer) or not (
        isinstance(site.layer, keras.layers.InputLayer)
        or structure.only_calls_others(site.layer)
    )


def is_layer(layer: Any) -> bool:
    """States whether something is a layer, and no operation of a Functional graph."""
    return isinstance(layer, keras.layers.Layer)


def how_to_keep(found: Sequence[Site]) -> str:
    """Returns what keeps layers and operations in float32, as a sentence for people."""
    layers = ", ".join(repr(s.path) for s in found if is_layer(s.layer))
    operations = ", ".join(repr(s.path) for s in found if not is_layer(s.layer))
    text = f"Keep them in float32: `keep_float32=[{layers}]`. " * bool(layers)
    if operations:
        text += (
            f"Operations of a Functional graph have no dtype: put {operations} into a "
            "layer of your own and make that with `dtype='float32'`."
        )
    return text.strip()


def children_of(layer: Any) -> list[keras.layers.Layer]:
    """Returns the layers directly inside a layer; an operation has none."""
    return structure.children(layer) if is_layer(layer) else []


def runs_whole(layer: Any) -> bool:
    """States whether what is inside a layer is lowered together with it."""
    return isinstance(layer, _WHOLE) or not children_of(layer)


def watched_sites(model: keras.Model, chosen: Sequence[Site]) -> set[int]:
    """Returns the ids of the layers to record: the units and what they call."""
    inside = (s.layer for s in chosen if not runs_whole(s.layer))
    children = (child for layer in inside for child in children_of(layer))
    return {*(id(site.layer) for site in chosen), *map(id, children)}


@dataclasses.dataclass
class Recorded:
    """One call of a layer in a float32 step; a gradient is None where there is none."""

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
    """Keeps every call of an eager step, in the order they began.

    Losses see what a head returned, not the logits behind it, as in stock Keras.
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
        state = state_of(layer) if is_layer(layer) else ()
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
    return structure.own_losses(layer) if is_layer(layer) else []


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


@contextlib.contextmanager
def computing_in(layers: Iterable[keras.layers.Layer], dtype: str) -> Iterator[None]:
    """Has layers of floats compute in a dtype, without rules of tfamp's."""
    name = dtype if dtype == "float32" else f"mixed_{dtype}"
    policy = keras.DTypePolicy(name)
    before = []
    try:
        for layer in filter(is_layer, layers):
            is_quantized = layer.quantization_mode is not None
            if is_quantized or layer.compute_dtype not in _FLOATS:
                continue
            before.append((layer, snapshot(layer)))
            if policy_of(layer) is not None:
                count_as_met(layer)  # nobody is to be told that it is not managed
            put(layer, policy)
        yield
    finally:
        for layer, known in reversed(before):
            put_back(layer, known)


@contextlib.contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Has a whole model compute in float32, without rules, inside the block."""
    layers = [layer for _, layer, _ in structure.walk(model)]
    with computing_in(layers, "float32"):
        yield


@contextlib.contextmanager
def as_islands(layers: Iterable[keras.layers.Layer], dtype: str) -> Iterator[None]:
    """Has layers compute in float32, hand that on, and return another dtype."""
    chosen = list(layers)
    parts = (structure.walk(layer) for layer in filter(is_layer, chosen))
    inside = [each for part in parts for _, each, _ in part]
    with computing_in(inside, "float32"), contextlib.ExitStack() as stack:
        for layer in chosen:
            stack.enter_context(exact_values.in_float32(layer, dtype))
        yield


@contextlib.contextmanager
def giving_unrounded(model: keras.Model) -> Iterator[None]:
    """Has a model give what its last layers computed in float32, as heads do."""
    original = model.call

    @like(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return structure.map_structure(source_of, original(*args, **kwargs))

    with replaced(model, call=call):
        yield


@contextlib.contextmanager
def adding_in_float32(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Has layers add losses in float32: Keras adds up none of several dtypes."""

    def widened(original: Callable[..., Any]) -> Callable[..., Any]:
        @like(original)
        def add_loss(loss: Any) -> Any:
            return original(structure.map_structure(exact_values.widened, loss))

        return add_loss

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced(layer, add_loss=widened(layer.add_loss)))
        yield
