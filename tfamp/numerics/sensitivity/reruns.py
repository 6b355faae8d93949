"""Runs a recorded call of one layer again, alone, in another dtype.

The layer gets the inputs it had in float32, and the gradients that came to its outputs.
What a layer calls inside is not run again: it hands over what it gave in float32, so
that only the layer's own operations are lowered. What goes into the inner layers
counts among the outputs of those operations.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import like, replaced
from tfamp.loss_scale.tape import scaled_by
from tfamp.stepping.eager_step import floats, is_float
from tfamp.stepping.layer_calls import (
    Recorded,
    children_of,
    computing_in,
    own_losses,
    runs_whole,
    state_restored,
)


class Rerun(NamedTuple):
    """What came out of a layer that ran alone.

    `outputs` has the losses that it adds itself too; `sources` came in for them, in
    float32: inputs, and what inner layers gave, `num_sources` of them before each
    output. Gradients are by floating-point inputs and trained weights, in float32 and
    without the loss scale, None where there is none.
    """

    outputs: list[tf.Tensor]
    sources: list[tf.Tensor]
    num_sources: list[int]
    input_gradients: list[tf.Tensor | None]
    weight_gradients: list[tf.Tensor | None]


def rerun(
    recorded: Recorded,
    dtype: str,
    *,
    loss_scale: float = 1.0,
    rounded_only: bool = False,
    changed: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
) -> Rerun:
    """Runs a recorded call again.

    `rounded_only` computes in float32 on inputs and weights rounded to `dtype`, which
    tells what rounding alone does. `changed` is made of the gradients that are sent
    back, such as their magnitudes.
    """
    layer = recorded.site.layer
    compute = "float32" if rounded_only else dtype
    tape = tf.GradientTape()
    stand_ins = _StandIns(recorded, compute, tape)
    tensors = [tf.identity(tensor) for tensor in recorded.float_inputs]
    lowered, weights = _lowered(layer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_rounded(weights, dtype, rounded_only))
        stack.enter_context(state_restored(recorded.state))
        stack.enter_context(computing_in(lowered, compute))
        stack.enter_context(stand_ins.instead_of_children())
        stack.enter_context(tape)
        tape.watch(tensors)
        given = [_round(t, dtype) for t in tensors] if rounded_only else tensors
        # As other layers would hand it over: operations and some layers cast nothing.
        given = [tf.cast(tensor, compute) for tensor in given]
        rest = iter(given)
        args, kwargs = structure.map_structure(
            lambda x: structure.with_mask_of(x, next(rest)) if is_float(x) else x,
            (recorded.args, recorded.kwargs),
        )
        outputs = layer(*args, **kwargs)
        losses = own_losses(layer)[: len(recorded.losses)]
        results = [*floats(outputs), *losses, *stand_ins.given_to_children]
    gradients = [
        *recorded.output_gradients,
        *map(tf.ones_like, recorded.losses),  # each counts as much as the model's
        *stand_ins.gradients_of_given,
    ]
    pairs = [
        (result, tf.cast(changed(gradient) * loss_scale, result.dtype))
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None
    ]
    sources = [*tensors, *stand_ins.handed_over, *weights]
    found: list[Any] = [None] * len(sources)
    if pairs:
        with scaled_by(loss_scale) as scale:
            scale.is_by_hand = True
            found = tape.gradient(
                [result for result, _ in pairs],
                sources,
                output_gradients=[gradient for _, gradient in pairs],
            )
    unscaled = [
        None
        if gradient is None
        else tf.cast(tf.convert_to_tensor(gradient), tf.float32) / loss_scale
        for gradient in found
    ]
    num_inputs = len(sources) - len(weights)
    num_last = len(results) - len(stand_ins.given_to_children)
    num_before = [len(tensors) + number for number in stand_ins.num_handed_before]
    return Rerun(
        results,
        sources[:num_inputs],
        [num_inputs] * num_last + num_before,
        unscaled[:num_inputs],
        unscaled[num_inputs:],
    )


class _StandIns:
    """Stands in for the layers inside a recorded call, and keeps what they are given.

    The tape watches what they hand over.
    """

    def __init__(self, recorded: Recorded, dtype: str, tape: tf.GradientTape) -> None:
        self._recorded, self._dtype, self._tape = recorded, dtype, tape
        self.given_to_children: list[tf.Tensor] = []
        self.gradients_of_given: list[tf.Tensor | None] = []
        self.handed_over: list[tf.Tensor] = []
        self.num_handed_before: list[int] = []
        self._next: dict[int, int] = {}

    @contextlib.contextmanager
    def instead_of_children(self) -> Iterator[None]:
        """Has the layers inside hand over what they gave in float32."""
        layer = self._recorded.site.layer
        with contextlib.ExitStack() as stack:
            for child in () if runs_whole(layer) else children_of(layer):
                stack.enter_context(replaced(child, call=self._stand_in(child)))
            yield

    def _stand_in(self, child: Any) -> Any:
        calls = [each for each in self._recorded.inside if each.site.layer is child]

        @like(child.call)
        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._next.get(id(child), 0)
            self._next[id(child)] = number + 1
            this = calls[number]
            given = floats((args, kwargs))
            self.given_to_children += given
            self.num_handed_before += [len(self.handed_over)] * len(given)
            self.gradients_of_given += this.input_gradients
            return structure.map_structure(self._hand_over, this.outputs)

        return call

    def _hand_over(self, x: Any) -> Any:
        if not is_float(x):
            return x
        source = tf.identity(x)
        self._tape.watch(source)
        self.handed_over.append(source)
        return structure.with_mask_of(x, tf.cast(source, self._dtype))


def _lowered(layer: Any) -> tuple[list[Any], list[Any]]:
    """Returns the layers that are lowered, and their trained weights."""
    if not isinstance(layer, keras.layers.Layer):
        return [], []
    if runs_whole(layer):
        inside = [each for _, each, _ in structure.walk(layer)]
        return inside, list(layer.trainable_variables)
    return [layer], [w for w in structure.own_weights(layer) if w.trainable]


@contextlib.contextmanager
def _rounded(weights: list[Any], dtype: str, is_wanted: bool) -> Iterator[None]:
    """Rounds the weights of a layer to a dtype, inside the block."""
    held = [np.asarray(v.value).copy() for v in weights] if is_wanted else []
    try:
        for variable, value in zip(weights, held, strict=False):
            variable.assign(_round(tf.constant(value), dtype))
        yield
    finally:
        for variable, value in zip(weights, held, strict=False):
            variable.assign(value)


def _round(tensor: tf.Tensor, dtype: str) -> tf.Tensor:
    """Returns what is left of float32 numbers in a dtype; gradients pass unrounded."""
    low = tf.cast(tf.cast(tensor, dtype), tensor.dtype)
    return tensor + tf.stop_gradient(low - tensor)
