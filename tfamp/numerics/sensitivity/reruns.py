"""Runs recorded calls of single layers again in another dtype, and measures them.

A layer gets the inputs it had in float32, and the gradients that came to its outputs.
What it calls inside is not run again: it hands over what it gave in float32, so that
only the layer's own operations are lowered. What goes into the inner layers counts
among the outputs of those operations.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import like, replaced
from tfamp.loss_scale.tape import scaled_by
from tfamp.numerics.sensitivity.errors import forward_error, gradient_error
from tfamp.records.checks import first_line
from tfamp.records.formats import FORMATS
from tfamp.stepping.eager_step import Site, floats, is_float
from tfamp.stepping.layer_calls import (
    Recorded,
    children_of,
    computing_in,
    own_losses,
    runs_whole,
    state_restored,
)

# What TensorFlow raises where a layer has no kernel for a dtype, or mixes two.
CANNOT_RUN = (
    TypeError,
    ValueError,
    NotImplementedError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)
# An error of gradients from which it is asked whether they are 0 by their nature.
_WORTH_A_LOOK = 0.05
# A gradient below this part of the sum of its parts' magnitudes is. So is one below so
# many times the format's epsilon, of the root of the sum of their squares: rounding the
# parts changes it by about epsilon of that, and another batch by all of it.
_CANCELLED, _ROUNDED = 1e-4, 4.0
_SIGNS = np.array([-1, 1], np.float32)
# A layer that runs again on the same numbers gives the same up to this.
REPEATED = 1e-3


class Rerun(NamedTuple):
    """What came out of a layer that ran alone, as float32 arrays.

    `outputs` has the losses that it adds too; `sources` came in for them: inputs,
    and what inner layers gave, `num_sources` of them before each output. Gradients are
    by floating-point inputs and trained weights, without the loss scale, None where
    there is none. `states` has what the variables of its state came to.
    """

    outputs: list[np.ndarray]
    sources: list[np.ndarray]
    num_sources: list[int]
    input_gradients: list[np.ndarray | None]
    weight_gradients: list[np.ndarray | None]
    states: list[np.ndarray]


def rerun(
    recorded: Recorded,
    dtype: str,
    *,
    loss_scale: float = 1.0,
    changed: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    is_managed: bool = False,
    given_exact: Collection[int] = (),
) -> Rerun:
    """Runs a recorded call again.

    Args:
        recorded: The call.
        dtype: What the layer computes in, and what others hand to it.
        loss_scale: What gradients are multiplied by on their way.
        changed: Is made of the gradients that are sent back, such as their magnitudes.
        is_managed: Whether the layer computes as its own policy has it, in place of
            `dtype`.
        given_exact: Ids of inputs that it is given as they are; no gradient by them.
    """
    layer = recorded.site.layer
    tape = tf.GradientTape()
    stand_ins = _StandIns(recorded, dtype, tape)
    tensors = [
        tensor if id(tensor) in given_exact else tf.identity(tensor)
        for tensor in recorded.float_inputs
    ]
    watched = [tensor for tensor in tensors if id(tensor) not in given_exact]
    lowered, weights = _lowered(layer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_restored(recorded.state))
        if not is_managed:
            stack.enter_context(computing_in(lowered, dtype))
        stack.enter_context(stand_ins.instead_of_children())
        stack.enter_context(tape)
        tape.watch(watched)
        # As other layers would hand it over: operations and some layers cast nothing.
        rest = iter([t if id(t) in given_exact else tf.cast(t, dtype) for t in tensors])
        args, kwargs = structure.map_structure(
            lambda x: structure.with_mask_of(x, next(rest)) if is_float(x) else x,
            (recorded.args, recorded.kwargs),
        )
        outputs = layer(*args, **kwargs)
        losses = own_losses(layer)[: len(recorded.losses)]
        results = [*floats(outputs), *losses, *stand_ins.given]
        states = [np.asarray(v.value).copy() for v, _ in recorded.state]
    gradients = [
        *recorded.output_gradients,
        *map(tf.ones_like, recorded.losses),  # each counts as much as the model's
        *stand_ins.gradients,
    ]
    with tape:  # of numbers in float32, as a loss is
        pairs = [
            (tf.cast(result, tf.float32), changed(gradient) * loss_scale)
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
    unscaled = [None if each is None else _array(each) / loss_scale for each in found]
    num_inputs = len(sources) - len(weights)
    num_before = [len(tensors) + number for number in stand_ins.num_handed_before]
    return Rerun(
        [_array(each) for each in results],
        [_array(each) for each in sources[:num_inputs]],
        [num_inputs] * (len(results) - len(num_before)) + num_before,
        unscaled[:num_inputs],
        unscaled[num_inputs:],
        states,
    )


def _array(tensor: Any) -> np.ndarray:
    return np.asarray(tf.cast(tf.convert_to_tensor(tensor), tf.float32))


class _StandIns:
    """Stands in for the layers inside a recorded call, and keeps what they are given.

    The tape watches what they hand over.
    """

    def __init__(self, recorded: Recorded, dtype: str, tape: tf.GradientTape) -> None:
        self._recorded, self._dtype, self._tape = recorded, dtype, tape
        self.given: list[tf.Tensor] = []
        self.gradients: list[tf.Tensor | None] = []
        self.handed_over: list[tf.Tensor] = []
        self.num_handed_before: list[int] = []

    @contextlib.contextmanager
    def instead_of_children(self) -> Iterator[None]:
        """Has the layers inside hand over what they gave in float32."""
        layer = self._recorded.site.layer
        with contextlib.ExitStack() as stack:
            for child in () if runs_whole(layer) else children_of(layer):
                stack.enter_context(replaced(child, call=self._stand_in(child)))
            yield

    def _stand_in(self, child: Any) -> Any:
        calls = iter([c for c in self._recorded.inside if c.site.layer is child])

        original = child.call

        @like(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(map(_is_symbolic, structure.flatten((args, kwargs)))):
                return original(*args, **kwargs)  # in a trace that finds heads
            this = next(calls)
            given = floats((args, kwargs))
            self.given += given
            self.num_handed_before += [len(self.handed_over)] * len(given)
            self.gradients += this.input_gradients
            return structure.map_structure(self._hand_over, this.outputs)

        return call

    def _hand_over(self, x: Any) -> Any:
        if not is_float(x):
            return x
        source = tf.identity(x)
        self._tape.watch(source)
        self.handed_over.append(source)
        return structure.with_mask_of(x, tf.cast(source, self._dtype))


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, keras.KerasTensor) or bool(tf.is_symbolic_tensor(x))


def _lowered(layer: Any) -> tuple[list[Any], list[Any]]:
    """Returns the layers that are lowered, and their trained weights."""
    if not isinstance(layer, keras.layers.Layer):
        return [], []
    if runs_whole(layer):
        inside = [each for _, each, _ in structure.walk(layer)]
        return inside, list(layer.trainable_variables)
    return [layer], [w for w in structure.own_weights(layer) if w.trainable]


@dataclasses.dataclass(eq=False)
class Suspect:
    """What the reruns of one layer came to, the worst over batches and calls.

    `forward` is the error of its outputs relative to their spread over the batch,
    `backward` that of its gradients by loss scale, `worst` and `worst_backward` the
    calls they are of; `failure` is what it raised instead of running. A layer that
    `is_random` gives something else each time and is not judged.
    """

    site: Site
    forward: float = 0.0
    backward: dict[float, float] = dataclasses.field(default_factory=dict)
    worst: Recorded | None = None
    worst_backward: Recorded | None = None
    failure: str = ""
    is_random: bool = False

    def measure(
        self, recorded: Recorded, dtype: str, loss_scales: Sequence[float]
    ) -> None:
        """Reruns a call with each loss scale, and takes in how far it is off."""
        if self.failure or self.is_random:
            return
        exact = rerun(recorded, "float32")
        then = map(_array, [*floats(recorded.outputs), *recorded.losses])
        pairs = zip(exact.outputs, then, strict=False)
        if not all(forward_error(a, b) <= REPEATED for a, b in pairs):
            self.is_random = True
            return
        kept: Rerun | None = None
        for loss_scale in loss_scales:
            try:
                low = rerun(recorded, dtype, loss_scale=loss_scale)
            except CANNOT_RUN as error:
                self.failure, self.worst = first_line(error), recorded
                return
            forward, backward = _forward(low, exact), _backward(low, exact)
            if backward > _WORTH_A_LOOK:
                kept = kept or _without_cancelled(recorded, exact, dtype)
                backward = _backward(low, kept)
            if self.worst is None or forward > self.forward:
                self.forward, self.worst = forward, recorded
            if backward > max(self.backward.values(), default=-1.0):
                self.worst_backward = recorded
            known = self.backward.get(loss_scale, 0.0)
            self.backward[loss_scale] = max(known, backward)


def _forward(low: Rerun, exact: Rerun) -> float:
    worst = 0.0
    outputs = zip(low.outputs, exact.outputs, exact.num_sources, strict=True)
    for a, b, num_sources in outputs:
        off = forward_error(a, b)
        # What only passes through is the affair of those who made and take it.
        sources = exact.sources[:num_sources]
        if off <= _WORTH_A_LOOK or not any(np.array_equal(b, s) for s in sources):
            worst = max(worst, off)
    return worst


def _backward(low: Rerun, exact: Rerun) -> float:
    """Returns the error of the gradients by inputs or by weights, the larger one."""
    return max(
        gradient_error(low.input_gradients, exact.input_gradients),
        gradient_error(low.weight_gradients, exact.weight_gradients),
    )


def _without_cancelled(recorded: Recorded, exact: Rerun, dtype: str) -> Rerun:
    """Returns a rerun in float32 but for gradients that are 0 by their nature.

    Of a bias ahead of a normalization all parts cancel, so what is left is rounding in
    every precision; of a scale ahead of one all but its epsilon. So a gradient is
    compared with the sum of its parts' magnitudes, and with about the root of the sum
    of their squares.
    """
    signs = np.random.default_rng(0)
    sums = rerun(recorded, "float32", changed=tf.abs)
    roots = rerun(
        recorded,
        "float32",
        changed=lambda each: each * signs.choice(_SIGNS, each.shape),
    )
    rounded = _ROUNDED * FORMATS[dtype].epsilon

    def kept(gradient: Any, total: Any, root: Any) -> Any:
        if gradient is None or total is None or root is None:
            return gradient
        least = max(_CANCELLED * np.linalg.norm(total), rounded * np.linalg.norm(root))
        return gradient if np.linalg.norm(gradient) >= least else None

    def all_kept(name: str) -> list[Any]:
        return list(map(kept, *(getattr(each, name) for each in (exact, sums, roots))))

    return exact._replace(
        input_gradients=all_kept("input_gradients"),
        weight_gradients=all_kept("weight_gradients"),
    )
