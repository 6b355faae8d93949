"""The tapped pass that all views read, and reruns of single layers after it.

A float32 step is recorded with every layer's calls. A rerun gives a layer the inputs it
had there, and the gradients that came to its outputs, in another dtype. Layers inside
hand over what they gave in float32, so that only its own operations are lowered.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import like, replaced
from tfamp.loss_scale.tape import scaled_by
from tfamp.models import LayerAssignment
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.formats import FORMATS
from tfamp.records.units import join_words
from tfamp.stepping.arguments import build, check_model, dataset_of, first_batch
from tfamp.stepping.eager_step import (
    Call,
    Observer,
    Site,
    Step,
    floats,
    is_float,
    run_step,
    tapped,
)
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    children_of,
    computing_in,
    in_float32,
    is_layer,
    own_losses,
    runs_whole,
    state_of,
    state_restored,
    units,
    watched_sites,
)
from tfamp.stepping.unchanged import same_draws, unchanged

_MAX_NAMED = 4
# What TensorFlow raises where a layer has no kernel for a dtype, or mixes two.
CANNOT_RUN = (
    TypeError,
    ValueError,
    NotImplementedError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.UnimplementedError,
)
# A spread of less than this part of the magnitude is that of a constant.
_CONSTANT = 1e-6
# An error of gradients from which it is asked whether they are 0 by their nature.
_WORTH_A_LOOK = 0.05
# A gradient below this part of the sum of its parts' magnitudes is, or below so many
# times the format's epsilon of the root of the sum of their squares.
_CANCELLED, _ROUNDED = 1e-4, 4.0
_SIGNS = np.array([-1, 1], np.float32)
# A layer that runs again on the same numbers gives the same up to this.
_REPEATED = 1e-3
_MORE_RUNS = 8  # that tell chance from error


class Ran(NamedTuple):
    """A train step without its update, and what the model gave in it, in float32."""

    step: Step
    outputs: list[np.ndarray]


class Recording(NamedTuple):
    """A float32 step: the state ahead of it, and the calls of the model's units."""

    batch: Any
    state: tuple[tuple[Any, np.ndarray], ...]
    ran: Ran
    calls: list[Recorded]


class _Outputs(Observer):
    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def on_outputs(self, call: Call, outputs: Any) -> None:
        self.kept += map(array_of, floats(outputs))


def check_is_model(model: Any) -> None:
    """Raises unless `model` is a Keras model, compiled or not."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r}, of type {type(model).__name__}; expected a "
            "`keras.Model`. Pass the model itself, not a function that builds it."
        )


def build_by_call(model: keras.Model, x: Any) -> None:
    """Builds a model as `fit` does; what fails is told by who calls it next."""
    if not model.built:
        with contextlib.suppress(Exception), model.distribute_strategy.scope():
            model(x, training=False)


def run(model: keras.Model, batch: Any, *, loss_scale: float = 1.0) -> Ran:
    """Runs a train step eagerly as the model computes now; nothing is updated."""
    outputs = _Outputs()
    with tapped(model, outputs, only=lambda site: site.layer is model):
        step = run_step(model, batch, loss_scale=loss_scale)
    return Ran(step, outputs.kept)


def record(model: keras.Model, chosen: Sequence[Site], batch: Any) -> Recording:
    """Runs a step inside `exactly`, and keeps the calls of the chosen sites."""
    state, recorder = state_of(model), Recorder()
    watched = watched_sites(model, chosen)
    wanted = {id(site.layer) for site in chosen}
    with tapped(model, recorder, only=lambda site: id(site.layer) in watched):
        ran = run(model, batch)
    calls = [each for each in recorder.calls if id(each.site.layer) in wanted]
    return Recording(batch, state, ran, calls)


@contextlib.contextmanager
def exactly(model: keras.Model) -> Iterator[list[Site]]:
    """Has a model compute in float32 without rules; yields what computes in it.

    Afterwards variables, seeds and dtypes are what they were.
    """
    with in_float32(model), unchanged(model), same_draws():
        yield units(model)


def batches_of(
    model: keras.Model, data: Any, num_batches: int, batch_size: int
) -> list[Any]:
    """Returns the first batches for a compiled model, which is built with them."""
    checks.positive_int("num_batches", num_batches)
    check_model(model)
    dataset = dataset_of(data, batch_size)
    build(model, first_batch(dataset))
    return list(dataset.take(num_batches))


def why_float32(row: LayerAssignment) -> str:
    """Returns what decided that a layer computes in float32, in words."""
    if row.rule == "not managed":
        return "its dtype policy says so, no rule of tfamp"
    return f"{row.rule}: {row.reason}" if row.reason else row.rule


def grouped(pairs: Iterable[tuple[str, str]]) -> str:
    """Returns paths with what is to say of them, each text once."""
    groups: dict[str, dict[str, None]] = {}
    for path, why in pairs:
        groups.setdefault(why, {})[path] = None
    return "; ".join(f"{name_layers([*ls])} ({why})" for why, ls in groups.items())


def name_layers(paths: Sequence[str]) -> str:
    """Returns the first of some paths in words, and how many more there are.

    Example:
        >>> name_layers(["a", "b", "c", "d", "e", ""])
        "'a', 'b', 'c', 'd' and 2 more"
    """
    words = [repr(path) if path else "no layer" for path in paths[:_MAX_NAMED]]
    if len(paths) > _MAX_NAMED:
        words.append(f"{len(paths) - _MAX_NAMED} more")
    return join_words(words)


def deviation(values: np.ndarray) -> float:
    """Returns the root mean square by which numbers differ over the batch.

    Where nothing differs, or there is one example, it is the magnitude.
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
    """
    unusable = ~np.isfinite(exact)
    if not (np.isfinite(low) | unusable).all():
        return math.inf
    low, exact = low.astype(np.float64), exact.astype(np.float64)
    if unusable.any():
        low, exact = np.where(unusable, 0.0, low), np.where(unusable, 0.0, exact)
    scale = deviation(exact)
    # Against outputs that are all 0 nothing can be said to be large.
    return _rms(low - exact) / scale if scale else 0.0


def gradient_error(
    low: Sequence[np.ndarray | None], exact: Sequence[np.ndarray | None]
) -> float:
    """Returns the error of a layer's gradients, all of them together.

    One that is 0 by its nature is noise on both sides and counts for nothing.
    """
    pairs = [
        (a, b)
        for a, b in zip(low, exact, strict=True)
        if a is not None and b is not None and np.isfinite(b).all()
    ]
    if not all(np.isfinite(a).all() for a, _ in pairs):
        return math.inf
    error = sum(_total(np.subtract(a, b, dtype=np.float64)) for a, b in pairs)
    size = sum(_total(b.astype(np.float64)) for _, b in pairs)
    return math.sqrt(error / size) if size else 0.0


def _total(values: np.ndarray) -> float:
    return float(np.vdot(values, values))  # of squares


def _rms(values: np.ndarray) -> float:
    return math.sqrt(_total(values) / values.size) if values.size else 0.0


class Rerun(NamedTuple):
    """What came out of a layer that ran alone, as float32 arrays.

    `outputs` has the losses that it adds too; `sources` came in for them: inputs,
    and what inner layers gave, `num_sources` of them before each output. Gradients are
    without the loss scale. `states` has what the variables of its state came to.
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
    loss_scales: Sequence[float] = (1.0,),
    changed: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    is_managed: bool = False,
    given_exact: Collection[int] = (),
) -> list[Rerun]:
    """Runs a recorded call again, with inputs in a dtype and the layer in it, too.

    A layer that `is_managed` computes as its own policy has it. Gradients go back once
    with each loss scale, all on the same way forward; `changed` is made of those that
    are sent back, such as their magnitudes.
    Inputs whose ids are `given_exact` are handed over as they are, without gradients.
    """
    layer, tape = recorded.site.layer, tf.GradientTape(persistent=len(loss_scales) > 1)
    # What inner layers are given, with the gradients by it, and what they hand over.
    given: list[tf.Tensor] = []
    sent: list[tf.Tensor | None] = []
    handed_over: list[tf.Tensor] = []
    num_before: list[int] = []

    def hand_over(x: Any) -> Any:
        if not is_float(x):
            return x
        source = tf.identity(x)
        tape.watch(source)
        handed_over.append(source)
        return structure.with_mask_of(x, tf.cast(source, dtype))

    def stand_in(child: Any) -> Any:
        original = child.call
        calls = iter([call for call in recorded.inside if call.site.layer is child])

        @like(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = structure.flatten((args, kwargs))
            if any(isinstance(x, keras.KerasTensor) for x in leaves) or any(
                map(tf.is_symbolic_tensor, leaves)
            ):
                return original(*args, **kwargs)  # in a trace that finds heads
            this, tensors = next(calls), floats((args, kwargs))
            given.extend(tensors)
            sent.extend(this.input_gradients)
            num_before.extend([len(inputs) + len(handed_over)] * len(tensors))
            return structure.map_structure(hand_over, this.outputs)

        return call

    def given_again(x: Any) -> Any:
        # As other layers would hand it over: operations and some layers cast nothing.
        if not is_float(x):
            return x
        source = next(rest)
        is_exact = id(source) in given_exact
        return structure.with_mask_of(x, source if is_exact else tf.cast(source, dtype))

    inputs = [
        tensor if id(tensor) in given_exact else tf.identity(tensor)
        for tensor in recorded.float_inputs
    ]
    rest, (lowered, weights) = iter(inputs), _lowered(layer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(state_restored(recorded.state))
        if not is_managed:
            stack.enter_context(computing_in(lowered, dtype))
        for child in () if runs_whole(layer) else children_of(layer):
            stack.enter_context(replaced(child, call=stand_in(child)))
        stack.enter_context(tape)
        tape.watch([tensor for tensor in inputs if id(tensor) not in given_exact])
        args, kwargs = structure.map_structure(
            given_again, (recorded.args, recorded.kwargs)
        )
        outputs = floats(layer(*args, **kwargs))
        outputs += own_losses(layer)[: len(recorded.losses)]
        states = [np.asarray(v.value).copy() for v, _ in recorded.state]
    results = [*outputs, *given]
    # A loss counts as much as the model's.
    ones = map(tf.ones_like, recorded.losses)
    gradients = [*recorded.output_gradients, *ones, *sent]
    pairs = [
        (result, changed(gradient))
        for result, gradient in zip(results, gradients, strict=True)
        if gradient is not None
    ]
    with tape:  # of numbers in float32, as a loss is
        targets = [tf.cast(result, tf.float32) for result, _ in pairs]
    sources = [*inputs, *handed_over, *weights]
    num_inputs = len(sources) - len(weights)
    forward = (
        [array_of(each) for each in results],
        [array_of(each) for each in sources[:num_inputs]],
        [num_inputs] * len(outputs) + num_before,
    )
    reruns = []
    for loss_scale in loss_scales:
        found: list[Any] = [None] * len(sources)
        if pairs:
            seeds = [gradient * loss_scale for _, gradient in pairs]
            with scaled_by():
                found = tape.gradient(targets, sources, output_gradients=seeds)
        unscaled = [None if g is None else array_of(g) / loss_scale for g in found]
        backward = unscaled[:num_inputs], unscaled[num_inputs:]
        reruns.append(Rerun(*forward, *backward, states))
    return reruns


def array_of(tensor: Any) -> np.ndarray:
    """Returns a tensor's numbers in float32."""
    return np.asarray(tf.cast(tf.convert_to_tensor(tensor), tf.float32))


def _lowered(layer: Any) -> tuple[list[Any], list[Any]]:
    """Returns the layers that are lowered, and their trained weights."""
    if not is_layer(layer):
        return [], []
    if runs_whole(layer):
        inside = [each for _, each, _ in structure.walk(layer)]
        return inside, list(layer.trainable_variables)
    return [layer], [w for w in structure.own_weights(layer) if w.trainable]


@dataclasses.dataclass(eq=False)
class Suspect:
    """What the reruns of one layer came to, the worst over batches and calls.

    `forward` is the error of its outputs, of the call `worst`, `backward` that of its
    gradients by loss scale, `state` that of what it assigns, relative to how far that
    moves; `failure` is what it raised. What `is_random` is not judged.
    """

    site: Site
    forward: float = 0.0
    backward: dict[float, float] = dataclasses.field(default_factory=dict)
    state: float = 0.0
    worst: Recorded | None = None
    failure: str = ""
    is_random: bool = False

    def measure(
        self,
        recorded: Recorded,
        dtype: str,
        loss_scales: Sequence[float],
        *,
        is_managed: bool = False,
        given_exact: Collection[int] = (),
    ) -> None:
        """Reruns a call with each loss scale, and takes in how far it is off."""
        if self.failure or self.is_random:
            return

        def exactly(**how: Any) -> Rerun:
            layer = self.site.layer
            with in_float32(layer) if is_managed else contextlib.nullcontext():
                how["given_exact"] = given_exact
                return rerun(recorded, "float32", **how)[0]

        exact = exactly()
        then = [array_of(x) for x in (*floats(recorded.outputs), *recorded.losses)]

        def is_repeated(by: Rerun) -> bool:
            pairs = zip(by.outputs, then, strict=False)
            return all(
                np.array_equal(a, b) or forward_error(a, b) <= _REPEATED
                for a, b in pairs
            )

        if not is_repeated(exact):
            self.is_random = True
            return
        kept: Rerun | None = None
        how: Any = {"is_managed": is_managed, "given_exact": given_exact}
        try:
            reruns = rerun(recorded, dtype, loss_scales=loss_scales, **how)
        except CANNOT_RUN as error:
            self.failure = first_line(error)
            return
        forward = _forward(reruns[0], exact)
        if is_managed and forward > _WORTH_A_LOOK:
            # What is drawn seldom may have been the same twice.
            self.is_random = not all(is_repeated(exactly()) for _ in range(_MORE_RUNS))
            if self.is_random:
                return
        if self.worst is None or forward > self.forward:
            self.forward, self.worst = forward, recorded
        self.state = max(self.state, _state(reruns[0], exact, recorded))
        for loss_scale, low in zip(loss_scales, reruns, strict=True):
            backward = _backward(low, exact)
            if backward > _WORTH_A_LOOK:
                kept = kept or _without_cancelled(exact, exactly, dtype)
                backward = _backward(low, kept)
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


def _state(low: Rerun, exact: Rerun, recorded: Recorded) -> float:
    worst = 0.0
    for a, b, (_, before) in zip(low.states, exact.states, recorded.state, strict=True):
        if np.issubdtype(before.dtype, np.floating) and not np.array_equal(b, before):
            worst = max(worst, gradient_error([a - before], [b - before]))
    return worst


def _without_cancelled(
    exact: Rerun, exactly: Callable[..., Rerun], dtype: str
) -> Rerun:
    """Returns a rerun in float32 but for gradients that are 0 by their nature.

    Of a bias ahead of a normalization all parts cancel, of a scale all but its epsilon.
    So a gradient is compared with the sum of its parts' magnitudes, and with about the
    root of the sum of their squares.
    """
    signs, rounded = np.random.default_rng(0), _ROUNDED * FORMATS[dtype].epsilon
    sums = exactly(changed=tf.abs)
    roots = exactly(changed=lambda each: each * signs.choice(_SIGNS, each.shape))

    def kept(gradient: Any, total: Any, root: Any) -> Any:
        if gradient is None or total is None or root is None:
            return gradient
        least = max(_CANCELLED * np.linalg.norm(total), rounded * np.linalg.norm(root))
        return gradient if np.linalg.norm(gradient) >= least else None

    names = ("input_gradients", "weight_gradients")
    sides = {n: [getattr(each, n) for each in (exact, sums, roots)] for n in names}
    return exact._replace(**{n: list(map(kept, *side)) for n, side in sides.items()})
