"""Checks a user's own layers at a model's first `fit`, and keeps what half spoils.

Rules know Keras's layers and operations; what a layer of the user's computes itself can
only be tried. On some examples of the first batch the model runs eagerly in float32,
then each such layer again, as it is managed, on the inputs and with the gradients it
had there; layers inside it hand over what they gave. Outputs, gradients and variables
that it assigns are compared. Nothing of it is left but the layers that are kept.
"""

import contextlib
import math
import re
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.dtypes import layer_dtypes, own_operations
from tfamp.dtypes.rules import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import backend, structure, trainer, trials
from tfamp.keras_hooks.layers import Kind, policy_of
from tfamp.loss_scale.fit_hooks import BEFORE_FIRST_BATCH
from tfamp.loss_scale.tape import scaled_by
from tfamp.numerics.sensitivity import BACKWARD_LIMIT, FORWARD_LIMIT
from tfamp.numerics.sensitivity.errors import forward_error, gradient_error
from tfamp.numerics.sensitivity.reruns import REPEATED, Rerun, rerun
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping.eager_step import floats, tapped
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    in_float32,
    units,
    watched_sites,
)
from tfamp.stepping.unchanged import same_draws, seeds_put_back

RULE = "check"
_NUM_EXAMPLES = 16
_NUM_CALLS = 2  # of each layer
# Error of what a layer assigns, relative to how far the variable moves.
_STATE_LIMIT = 0.5
# Largest gradients that are sent back: a layer may stand one and not the other.
_SIZES = (1.0, 2.0**-8)
_EFFECTS = re.compile(
    "Print|PyFunc|Summary|WriteFile|Save|Generator|Queue|Lookup.*Insert"
)
# The settings under which a model has been through this.
_ASKED: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


class _Error(NamedTuple):
    """How far a layer is off: outputs, gradients, variables, each over its limit."""

    outputs: float = 0.0
    gradients: float = 0.0
    variables: float = 0.0

    @property
    def is_guilty(self) -> bool:
        return max(self) > 1.0

    def text(self, dtype: str) -> str:
        """Returns what is wrong, in words."""
        limits = (FORWARD_LIMIT[dtype], BACKWARD_LIMIT[dtype], _STATE_LIMIT)
        place = max(range(3), key=self.__getitem__)
        off = self[place] * limits[place]
        what = (
            ("outputs", "their spread over the batch"),
            ("gradients", "their size"),
            ("assigned variables", "how far they move"),
        )[place]
        if math.isinf(off):
            return f"in {dtype} its {what[0]} are not finite, on the first batch"
        return (
            f"in {dtype} its {what[0]} are off by {off:.0%} of {what[1]}, on the first "
            "batch"
        )


def is_due(model: keras.Model) -> bool:
    """Returns whether a model is one to check that has not been through it."""
    policy = policy_of(model)
    return (
        policy is not None
        and policy.settings.check is not None
        and policy.settings.has_defaults
        and _ASKED.get(model) != policy.settings.number
        and any(_is_own(layer) for _, layer, _ in structure.walk(model))
    )


def check_first(model: keras.Model, batch: Any) -> None:
    """Keeps layers in float32, or warns of them, ahead of a model's first step.

    `batch` is as `train_step` is given it, None where it cannot be had.
    """
    policy = policy_of(model)
    if policy is None:
        return
    settings = policy.settings
    _ASKED[model] = settings.number
    if batch is None:
        _not_checked(model, "its batches are on several replicas")
        return
    is_kept, guilty, failure = settings.check == "keep", {}, ""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    with _without_a_trace(model):
        try:
            x = tf.nest.map_structure(lambda part: part[:_NUM_EXAMPLES], x)
            guilty = _Check(model, x, settings).run()
        except Exception as error:  # a `call` that is never called so, for one
            failure = f"{type(error).__name__}: {first_line(error)}"
    if failure:
        _not_checked(model, failure)
        return
    if guilty:
        trainer.drop_traced_functions(model, but_training=True)
    for layer, reason in guilty.items():
        _tell(layer, reason, is_kept=is_kept)


BEFORE_FIRST_BATCH.append((is_due, check_first))


def _is_own(layer: keras.layers.Layer) -> bool:
    """States whether a layer runs code of the user's in half precision."""
    policy = policy_of(layer)
    return (
        policy is not None
        and not trials.is_of_keras(layer)
        and not structure.only_calls_others(layer)
        and policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and layer.compute_dtype in HALF
    )


def _not_checked(model: keras.Model, because: str) -> None:
    logging.info(
        "The layers of model %r are not checked at its first training: %s. Call "
        "`tfamp.check(model, data)`.",
        model.name,
        because.rstrip("."),
    )


def _tell(layer: Any, reason: str, *, is_kept: bool) -> None:
    if is_kept:
        logging.warning(
            "Layer %r computes in float32: %s. Name it in `keep_float32`, or pass "
            "`check=None` to leave it.",
            layer.name,
            reason,
        )
        return
    message = (
        f"Layer {layer.name!r} is spoiled by half precision: {reason}. Keep it by "
        f"`keep_float32=[{layer.name!r}]`, or by `check='keep'`."
    )
    warnings.warn(message, UserWarning, stacklevel=2)


@contextlib.contextmanager
def _without_a_trace(model: keras.Model) -> Iterator[None]:
    """Puts back what running a model's layers changes, and drops what they print."""
    with (
        model.distribute_strategy.scope(),
        trials.without_python_effects(model),
        warnings.catch_warnings(),
        seeds_put_back(),
        same_draws(),
    ):
        warnings.simplefilter("ignore")
        yield


class _Check:
    """The check of one model on some examples."""

    def __init__(self, model: keras.Model, x: Any, settings: PolicySettings) -> None:
        self._model, self._settings = model, settings
        self._x = tf.nest.map_structure(backend.convert_to_tensor, x)
        self._exact_inputs = {id(leaf) for leaf in floats(self._x)}

    def run(self) -> dict[keras.layers.Layer, str]:
        """Returns the layers that are spoiled, with what is wrong."""
        if not self._model.built:
            trials.trace_ahead(self._model, (self._x,), {"training": True})
        with own_operations.switched_off():
            function = tf.function(self._model, autograph=False)
            graph = function.get_concrete_function(self._x, training=True).graph
            effects = _effects_in(graph)
            if effects:
                raise ValueError(f"its layers run {', '.join(effects)} in their `call`")
            held = [(v, v.numpy()) for v in graph.variables]
            try:
                return self._guilty()
            finally:
                for variable, value in held:
                    variable.assign(value)

    def _guilty(self) -> dict[keras.layers.Layer, str]:
        chosen = [s for s in units(self._model) if _is_own_site(s.layer)]
        if not chosen:
            return {}
        calls = self._recorded(chosen)
        guilty = {}
        # Those inside began later, and come first.
        for layer in reversed(list(calls)):
            error, dtype = self._error(calls[layer]), layer.compute_dtype
            if not error.is_guilty:
                continue
            reason = error.text(dtype)
            before = layer_dtypes.Before(part for _, part, _ in structure.walk(layer))
            rule = Rule(RULE, reason, applies_to="own")
            own_operations.take(layer, self._settings, rule)
            is_cured = not self._error(calls[layer], dtype).is_guilty
            if not (is_cured and self._settings.check == "keep"):
                before.put_back()
            if is_cured:
                guilty[layer] = reason
        return guilty

    def _recorded(self, chosen: Sequence[Any]) -> dict[Any, list[Recorded]]:
        """Returns the first calls of each chosen layer in a float32 run."""
        recorder = Recorder()
        watched = watched_sites(self._model, chosen)
        with (
            in_float32(self._model),
            tapped(self._model, recorder, only=lambda s: id(s.layer) in watched),
            scaled_by(1.0),
        ):
            with tf.GradientTape() as tape:
                outputs = floats(self._model(self._x, training=True))
                seeds = [_signs(output) for output in outputs]
            tape.gradient(outputs, self._model.trainable_variables, seeds)
        ids = {id(site.layer) for site in chosen}
        calls: dict[Any, list[Recorded]] = {}
        for each in recorder.calls:
            _without_nonfinite(each)
            if id(each.site.layer) in ids:
                calls.setdefault(each.site.layer, []).append(each)
        return {layer: found[:_NUM_CALLS] for layer, found in calls.items()}

    def _error(self, calls: Sequence[Recorded], dtype: str | None = None) -> _Error:
        """Returns how far a layer as it computes now is from float32."""
        found = [self._error_of(call, dtype) for call in calls]
        return _Error(*map(max, zip(*found, strict=True)))

    def _error_of(self, call: Recorded, dtype: str | None) -> _Error:
        layer = call.site.layer
        dtype = dtype or layer.compute_dtype
        with in_float32(layer):
            exact = rerun(call, "float32", given_exact=self._exact_inputs)
        pairs = zip(exact.outputs, floats(call.outputs), strict=False)
        if any(forward_error(a, _array(b)) > REPEATED for a, b in pairs):
            return _Error()
        errors = []
        for scale in _scales(call):
            low = rerun(
                call,
                dtype,
                loss_scale=scale,
                is_managed=True,
                given_exact=self._exact_inputs,
            )
            errors.append(_compared(low, exact, call, dtype))
        return min(errors, key=max)


def _is_own_site(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Layer) and _is_own(layer)


def _effects_in(graph: Any) -> list[str]:
    """Returns the operations of a graph that are seen outside of the model."""
    written = graph.as_graph_def()
    functions = [node for f in written.library.function for node in f.node_def]
    names = {node.op for node in [*written.node, *functions]}
    return sorted(name for name in names if _EFFECTS.search(name))


def _without_nonfinite(call: Recorded) -> None:
    """Drops gradients that are not finite in float32: they are nobody's fault here."""
    for kept in (call.input_gradients, call.output_gradients):
        for place, gradient in enumerate(kept):
            if gradient is not None and not bool(
                tf.reduce_all(tf.math.is_finite(gradient))
            ):
                kept[place] = None


def _scales(call: Recorded) -> list[float]:
    """Returns what brings the largest gradient sent back to each of `_SIZES`."""
    sent = [g for c in call.inside for g in c.input_gradients]
    sizes = [
        float(tf.reduce_max(tf.abs(gradient)))
        for gradient in [*call.output_gradients, *sent]
        if gradient is not None and tf.size(gradient)
    ]
    largest = max(sizes, default=0.0)
    return [size / largest for size in _SIZES] if largest else [1.0]


def _compared(low: Rerun, exact: Rerun, call: Recorded, dtype: str) -> _Error:
    outputs = map(forward_error, low.outputs, exact.outputs)
    moved = [0.0]
    states = zip(low.states, exact.states, call.state, strict=True)
    for after, aim, (_, before) in states:
        if np.issubdtype(before.dtype, np.floating) and not np.array_equal(aim, before):
            moved.append(gradient_error([after - before], [aim - before]))
    gradients = (
        [*each.input_gradients, *each.weight_gradients] for each in (low, exact)
    )
    return _Error(
        max(outputs, default=0.0) / FORWARD_LIMIT[dtype],
        gradient_error(*gradients) / BACKWARD_LIMIT[dtype],
        max(moved) / _STATE_LIMIT,
    )


def _signs(x: tf.Tensor) -> tf.Tensor:
    """Returns numbers like a loss's gradients: of both signs, the same each time."""
    draws = np.random.default_rng(0).standard_normal(x.shape)
    return tf.cast(draws, x.dtype)


def _array(x: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(x, tf.float32))
