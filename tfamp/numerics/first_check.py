"""Checks a user's own layers at a model's first `fit`, and keeps what half spoils.

Rules know Keras's layers and operations; what a layer of the user's computes itself can
only be tried. On some examples of the first batch the model runs eagerly in float32,
then each such layer again, as it is managed. Outputs, gradients and variables that it
assigns are compared. Nothing of it is left but the layers that are kept.
"""

import contextlib
import math
import re
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import backend, structure, trainer, trials
from tfamp.keras_hooks.layers import Kind, policy_of
from tfamp.loss_scale.fit_hooks import BEFORE_FIRST_BATCH
from tfamp.loss_scale.tape import scaled_by
from tfamp.numerics.reruns import (
    REPEATED,
    Rerun,
    forward_error,
    gradient_error,
    rerun,
)
from tfamp.numerics.sensitivity import BACKWARD_LIMIT, FORWARD_LIMIT
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
# How far a layer is off, over the limit: outputs, gradients, assigned variables.
_Error = tuple[float, float, float]
_OFF = (
    ("outputs", "their spread over the batch"),
    ("gradients", "their size"),
    ("assigned variables", "how far they move"),
)
# The settings under which a model has been through this.
_ASKED: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


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
    guilty: dict[keras.layers.Layer, str] = {}
    failure = "its batches are on several replicas" if batch is None else ""
    if batch is not None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with _without_a_trace(model):
            try:
                x = tf.nest.map_structure(lambda part: part[:_NUM_EXAMPLES], x)
                guilty = _Check(model, x, settings).run()
            except Exception as error:  # a `call` that is never called so, for one
                failure = f"{type(error).__name__}: {first_line(error)}".rstrip(".")
    if failure:
        logging.info(
            "The layers of model %r are not checked at its first training: %s. Call "
            "`tfamp.check(model, data)`.",
            model.name,
            failure,
        )
    if guilty:
        trainer.drop_traced_functions(model, but_training=True)
    for layer, reason in guilty.items():
        if settings.check == "keep":
            logging.warning(
                "Layer %r computes in float32: %s. Name it in `keep_float32`, or pass "
                "`check=None` to leave it.",
                layer.name,
                reason,
            )
        else:
            warnings.warn(
                f"Layer {layer.name!r} is spoiled by half precision: {reason}. Keep it "
                f"by `keep_float32=[{layer.name!r}]`, or by `check='keep'`.",
                UserWarning,
                stacklevel=2,
            )


BEFORE_FIRST_BATCH.append((is_due, check_first))


def _is_own(layer: Any) -> bool:
    """States whether a layer runs code of the user's in half precision."""
    policy = policy_of(layer) if isinstance(layer, keras.layers.Layer) else None
    return (
        policy is not None
        and not trials.is_of_keras(layer)
        and not structure.only_calls_others(layer)
        and policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and layer.compute_dtype in HALF
    )


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
        with layer_dtypes.errors_left_alone():
            function = tf.function(self._model, autograph=False)
            graph = function.get_concrete_function(self._x, training=True).graph
            # What is seen outside of the model is not done a second time.
            written = graph.as_graph_def()
            functions = [node for f in written.library.function for node in f.node_def]
            names = {node.op for node in [*written.node, *functions]}
            effects = sorted(name for name in names if _EFFECTS.search(name))
            if effects:
                raise ValueError(f"its layers run {', '.join(effects)} in their `call`")
            held = [(v, v.numpy()) for v in graph.variables]
            try:
                return self._guilty()
            finally:
                for variable, value in held:
                    variable.assign(value)

    def _guilty(self) -> dict[keras.layers.Layer, str]:
        chosen = [site for site in units(self._model) if _is_own(site.layer)]
        calls = self._recorded(chosen) if chosen else {}
        guilty = {}
        # Those inside began later, and come first.
        for layer in reversed(list(calls)):
            error, dtype = self._error(calls[layer]), layer.compute_dtype
            if max(error) <= 1.0:
                continue
            reason = _words(error, dtype)
            before = layer_dtypes.Before(part for _, part, _ in structure.walk(layer))
            rule = Rule(RULE, reason, applies_to="own")
            layer_dtypes.take(layer, self._settings, rule)
            is_cured = max(self._error(calls[layer], dtype)) <= 1.0
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
                # Like a loss's gradients: of both signs, the same each time.
                seeds = [
                    tf.cast(np.random.default_rng(0).standard_normal(x.shape), x.dtype)
                    for x in outputs
                ]
            tape.gradient(outputs, self._model.trainable_variables, seeds)
        ids = {id(site.layer) for site in chosen}
        calls: dict[Any, list[Recorded]] = {}
        for call in recorder.calls:
            # What is not finite in float32 is nobody's fault here.
            for kept in (call.input_gradients, call.output_gradients):
                kept[:] = [None if g is None or not _is_finite(g) else g for g in kept]
            if id(call.site.layer) in ids:
                calls.setdefault(call.site.layer, []).append(call)
        return {layer: found[:_NUM_CALLS] for layer, found in calls.items()}

    def _error(self, calls: Sequence[Recorded], dtype: str | None = None) -> _Error:
        """Returns how far a layer as it computes now is from float32."""
        found = [self._error_of(call, dtype) for call in calls]
        outputs, gradients, variables = map(max, zip(*found, strict=True))
        return outputs, gradients, variables

    def _error_of(self, call: Recorded, dtype: str | None) -> _Error:
        layer = call.site.layer
        dtype = dtype or layer.compute_dtype
        with in_float32(layer):
            exact = rerun(call, "float32", given_exact=self._exact_inputs)
        pairs = zip(exact.outputs, floats(call.outputs), strict=False)
        if any(forward_error(a, _array(b)) > REPEATED for a, b in pairs):
            return 0.0, 0.0, 0.0
        sent = [g for inner in call.inside for g in inner.input_gradients]
        known = [g for g in (*call.output_gradients, *sent) if g is not None]
        sizes = [float(tf.reduce_max(tf.abs(g))) for g in known if tf.size(g)]
        largest = max(sizes, default=0.0)
        errors = [
            _compared(
                rerun(
                    call,
                    dtype,
                    loss_scale=size / largest if largest else 1.0,
                    is_managed=True,
                    given_exact=self._exact_inputs,
                ),
                exact,
                call,
                dtype,
            )
            for size in (_SIZES if largest else _SIZES[:1])
        ]
        return min(errors, key=max)


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
    return (
        max(outputs, default=0.0) / FORWARD_LIMIT[dtype],
        gradient_error(*gradients) / BACKWARD_LIMIT[dtype],
        max(moved) / _STATE_LIMIT,
    )


def _words(error: _Error, dtype: str) -> str:
    """Returns what is wrong, in words."""
    limits = (FORWARD_LIMIT[dtype], BACKWARD_LIMIT[dtype], _STATE_LIMIT)
    worst = max(range(3), key=error.__getitem__)
    what, of = _OFF[worst]
    off = f"off by {error[worst] * limits[worst]:.0%} of {of}"
    if math.isinf(error[worst]):
        off = "not finite"
    return f"in {dtype} its {what} are {off}, on the first batch"


def _is_finite(x: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(x)))


def _array(x: tf.Tensor) -> np.ndarray:
    return np.asarray(tf.cast(x, tf.float32))
