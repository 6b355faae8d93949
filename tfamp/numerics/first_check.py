"""Checks a user's own layers at a model's first `fit`, and keeps what half spoils.

Rules know Keras's layers; what a layer of the user's computes itself can only be tried.
On some examples of the first batch the model runs eagerly in float32, then each such
layer again, as it is managed. Where a feature goes beyond float16, so do layers of
Keras's that are given it. Nothing of it is left but the layers that are kept.
"""

import collections
import contextlib
import functools
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
from tfamp.keras_hooks import backend, exact_values, structure, trainer, trials
from tfamp.keras_hooks.layers import IN_HALF, policy_of
from tfamp.loss_scale.fit_hooks import BEFORE_FIRST_BATCH
from tfamp.loss_scale.tape import scaled_by
from tfamp.numerics.passes import Suspect
from tfamp.numerics.sensitivity import BACKWARD_LIMIT, FORWARD_LIMIT
from tfamp.records.checks import kind_and_line
from tfamp.records.formats import HALF
from tfamp.stepping.eager_step import Site, floats, tapped
from tfamp.stepping.layer_calls import (
    Recorded,
    Recorder,
    in_float32,
    is_layer,
    units,
    watched_sites,
)
from tfamp.stepping.unchanged import same_draws, seeds_put_back

RULE = "check"
_NUM_EXAMPLES = 16
_NUM_CALLS = 2  # of each layer
_LARGEST = float(np.finfo("float16").max)
# What such a feature becomes inside grows in training.
_MARGIN = 1 / 16
# Error of what a layer assigns, relative to how far the variable moves.
_STATE_LIMIT = 0.5
# Largest gradients that are sent back: a layer may stand one and not the other.
_SIZES = (1.0, 2.0**-8)
_EFFECTS = re.compile(
    "Print|PyFunc|Summary|WriteFile|Save|Generator|Queue|Lookup.*Insert"
)
# How far a layer is off, over the limit: outputs, gradients, assigned variables.
_Errors = list[float]
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
        and (policy.settings.compute_dtype == "float16" or _has_own(model))
    )


def _has_own(model: keras.Model) -> bool:
    return any(_is_own(layer) for _, layer, _ in structure.walk(model))


def check_first(model: keras.Model, batch: Any, spec: Any) -> None:
    """Keeps layers in float32, or warns of them, ahead of a model's first step.

    `batch` is as `train_step` is given it, None where it cannot be had; `spec` has the
    shapes and dtypes that it is traced for.
    """
    policy = policy_of(model)
    if policy is None:
        return
    settings = policy.settings
    _ASKED[model] = settings.number
    guilty: dict[keras.layers.Layer, str] = {}
    told: list[str] = []
    failure, beyond = "", _beyond(batch) if settings.compute_dtype == "float16" else {}
    if not (beyond or _has_own(model)):
        return
    if batch is None:
        failure = "its batches are on several replicas"
    else:
        # What running a model's layers changes is put back, what they print dropped.
        with (
            model.distribute_strategy.scope(),
            trials.without_python_effects(model),
            warnings.catch_warnings(),
            seeds_put_back(),
            same_draws(),
        ):
            warnings.simplefilter("ignore")
            try:
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                traced, _, _ = keras.utils.unpack_x_y_sample_weight(spec)
                parts, some = _models_of(model, x), _examples(x)
                for part in parts:
                    ahead = functools.partial(
                        trials.trace_ahead, part, (traced,), {"training": True}
                    )
                    if not part.built:
                        ahead()
                    try:
                        guilty |= _guilty_layers(part, some, settings)
                    except Exception:  # of a layer that fails in training alone
                        ahead()
                        guilty |= _guilty_layers(part, some, settings)
                    if beyond:
                        found, lost = _given_too_much(part, some, settings)
                        guilty |= found
                        told += [f"{k} up to {v:g}" for k, v in beyond.items()] * lost
                if not parts:
                    failure = "it has no `call`, and no model in it takes its batches"
            except Exception as error:  # a `call` that is never called so, for one
                failure = kind_and_line(error).rstrip(".")
                if type(model).train_step is not keras.Model.train_step:
                    failure = f"its `train_step` may call it otherwise ({failure})"
    if told:
        warnings.warn(
            f"Model {model.name!r} is given {', '.join(told)} in its first batch, and "
            f"float16 ends at {_LARGEST:g}: its outputs are not finite, and such steps "
            "are skipped. Scale these features, as by `keras.layers.Normalization`, or "
            "use 'mixed_bfloat16'.",
            UserWarning,
            stacklevel=2,
        )
    if failure:
        text = "The layers of model %r are not checked at its first training: %s. Call "
        logging.info(f"{text}`tfamp.check(model, data)`.", model.name, failure)
    if guilty:
        trainer.drop_traced_functions(model, but_training=True)
    if settings.check == "keep":
        _tell_of_kept(guilty)
        return
    for layer, reason in guilty.items():
        warnings.warn(
            f"Layer {layer.name!r} is spoiled by half precision: {reason}. Keep it "
            f"by `keep_float32=[{layer.name!r}]`, or by `check='keep'`.",
            UserWarning,
            stacklevel=2,
        )


def _tell_of_kept(guilty: dict[keras.layers.Layer, str]) -> None:
    """Tells of layers that are kept in float32, of a class in two lines."""
    names: dict[type, list[str]] = collections.defaultdict(list)
    for layer, reason in guilty.items():
        names[type(layer)].append(layer.name)
        if len(names[type(layer)]) == 1:
            text = "Layer %r computes in float32: %s. Name it in `keep_float32`, or "
            logging.warning(f"{text}pass `check=None` to leave it.", layer.name, reason)
    for cls, (_, *others) in names.items():
        if others:
            logging.warning(
                "So do %d others of %s, as %r; see `tfamp.assignment(model)` for why.",
                *(len(others), cls.__name__, others[0]),
            )


BEFORE_FIRST_BATCH.append((is_due, check_first))


def _models_of(model: keras.Model, x: Any) -> list[keras.Model]:
    """Returns the model; of one without a `call`, as a GAN, those that take `x`."""
    if type(model).call is not keras.Model.call:
        return [model]
    shapes = [part.shape for part in tf.nest.flatten(x)]

    def takes_it(part: Any) -> bool:
        graph = structure.graph_of(part) if isinstance(part, keras.Model) else None
        asked = [] if graph is None else [tf.TensorShape(t.shape) for t in graph.inputs]
        fits = map(tf.TensorShape.is_compatible_with, asked, shapes)
        return len(asked) == len(shapes) and all(fits)

    return [part for part in structure.children(model) if takes_it(part)]


def _is_in_half(layer: Any) -> bool:
    """States whether a layer runs in half precision, and the user has not said so."""
    policy = policy_of(layer) if is_layer(layer) else None
    return policy is not None and policy.kind in IN_HALF and layer.compute_dtype in HALF


def _is_own(layer: Any) -> bool:
    """States whether a layer runs code of the user's in half precision."""
    return (
        _is_in_half(layer)
        and not trials.is_of_keras(layer)
        and not structure.only_calls_others(layer)
    )


def _guilty_layers(
    model: keras.Model, x: Any, settings: PolicySettings
) -> dict[keras.layers.Layer, str]:
    """Returns the layers that are spoiled, with what is wrong; it keeps them."""
    with layer_dtypes.errors_left_alone(), _variables_put_back(model, x):
        chosen = [site for site in units(model) if _is_own(site.layer)]
        calls = _recorded(model, x, chosen) if chosen else {}
        exact_inputs = {id(leaf) for leaf in floats(x)}
        guilty = {}
        # Those inside began later, and come first.
        for layer, recorded in reversed(calls.items()):
            dtype = layer.compute_dtype
            errors = _errors(recorded, dtype, exact_inputs)
            if max(errors) <= 1.0:
                continue
            worst = max(range(len(errors)), key=errors.__getitem__)
            what, of = _OFF[worst]
            off = f"off by {errors[worst] * _limits(dtype)[worst]:.0%} of {of}"
            off = "not finite" if math.isinf(errors[worst]) else off
            reason = f"in {dtype} its {what} are {off}, on the first batch"
            before = layer_dtypes.Before(part for _, part, _ in structure.walk(layer))
            layer_dtypes.take(layer, settings, Rule(RULE, reason, applies_to="own"))
            is_cured = max(_errors(recorded, dtype, exact_inputs)) <= 1.0
            if not (is_cured and settings.check == "keep"):
                before.put_back()
            if is_cured:
                guilty[layer] = reason
        return guilty


def _beyond(batch: Any) -> dict[str, float]:
    """Returns the largest values of features that float16 has not, by their names."""
    found: dict[str, float] = {}
    try:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    except ValueError:  # only a `train_step` of the user's knows what it is
        return found
    for path, leaf in keras.tree.flatten_with_path(x):
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating:
            sizes = np.abs(leaf.numpy().astype("float32"))
            largest = np.max(sizes, where=np.isfinite(sizes), initial=0.0)
            if largest > _LARGEST:
                found["/".join(map(repr, path)) or "inputs"] = float(largest)
    return found


def _examples(x: Any) -> Any:
    """Returns some examples: the first, and those whose numbers are beyond float16."""
    rows = {*range(_NUM_EXAMPLES)}
    for leaf in tf.nest.flatten(x):
        if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating and leaf.shape.rank:
            flat = tf.abs(tf.reshape(leaf, (len(leaf), -1)))
            large = np.flatnonzero(tf.reduce_any(flat > _LARGEST, 1))
            rows.update(large[:_NUM_EXAMPLES].tolist())

    def chosen(part: Any) -> Any:
        part = backend.convert_to_tensor(part)
        return tf.gather(part, sorted(row for row in rows if row < len(part)))

    return tf.nest.map_structure(chosen, x)


def _given_too_much(
    model: keras.Model, x: Any, settings: PolicySettings
) -> tuple[dict[keras.layers.Layer, str], bool]:
    """Returns the layers that are given what float16 has not, now in float32.

    And whether the outputs are not finite all the same: then all is left as it was.
    """
    with layer_dtypes.errors_left_alone(), _variables_put_back(model, x):
        if all(map(_is_finite, floats(model(x, training=False)))):
            return {}, False
        before = layer_dtypes.Before(layer for _, layer, _ in structure.walk(model))
        kept, guilty = exact_values.kept_in(model), {}
        for each, calls in _recorded(model, x, units(model)).items():
            given = [tf.abs(value) for call in calls for value in call.float_inputs]
            largest = max((float(tf.reduce_max(value)) for value in given), default=0.0)
            if largest <= _LARGEST * _MARGIN:
                continue
            reason = f"it is given values up to {largest:g}, and float16 ends at 65504"
            if not is_layer(each):
                exact_values.keep(each, "float16", RULE, reason)
            elif _is_in_half(each):
                # What a user's layer calls is in this list itself.
                how = "own" if _is_own(each) else "all"
                rule = Rule(RULE, reason, applies_to=how)
                layer_dtypes.take(each, settings, rule)
                guilty[each] = reason
        is_cured = all(map(_is_finite, floats(model(x, training=False))))
        if not (is_cured and settings.check == "keep"):
            before.put_back()
            exact_values.keep_only(model, kept)
        return (guilty, False) if is_cured else ({}, True)


@contextlib.contextmanager
def _variables_put_back(model: keras.Model, x: Any) -> Iterator[None]:
    """Puts back the variables of a call; refuses effects outside, not done twice."""
    function = tf.function(model, autograph=False)
    graph = function.get_concrete_function(x, training=True).graph
    written = graph.as_graph_def()
    inside = [node for f in written.library.function for node in f.node_def]
    names = {node.op for node in [*written.node, *inside]}
    if effects := sorted(name for name in names if _EFFECTS.search(name)):
        raise ValueError(f"its layers run {', '.join(effects)} in their `call`")
    held = [(variable, variable.numpy()) for variable in graph.variables]
    try:
        yield
    finally:
        for variable, value in held:
            variable.assign(value)


def _recorded(
    model: keras.Model, x: Any, chosen: Sequence[Site]
) -> dict[Any, list[Recorded]]:
    """Returns the first calls of each chosen layer in a float32 run."""
    recorder, watched = Recorder(), watched_sites(model, chosen)
    with (
        in_float32(model),
        tapped(model, recorder, only=lambda site: id(site.layer) in watched),
        scaled_by(1.0),
    ):
        with tf.GradientTape() as tape:
            outputs = floats(model(x, training=True))
            # Like a loss's gradients: of both signs, the same each time.
            seeds = [
                tf.cast(
                    np.random.default_rng(0).standard_normal(each.shape), each.dtype
                )
                for each in outputs
            ]
        tape.gradient(outputs, model.trainable_variables, seeds)
    ids = {id(site.layer) for site in chosen}
    calls: dict[Any, list[Recorded]] = {}
    for call in recorder.calls:
        # What is not finite in float32 is nobody's fault here.
        for kept in (call.input_gradients, call.output_gradients):
            kept[:] = [None if g is None or not _is_finite(g) else g for g in kept]
        if id(call.site.layer) in ids:
            calls.setdefault(call.site.layer, []).append(call)
    return {layer: found[:_NUM_CALLS] for layer, found in calls.items()}


def _errors(calls: Sequence[Recorded], dtype: str, exact_inputs: set[int]) -> _Errors:
    """Returns how far a layer as it computes now is from float32, at its worst."""
    errors = [0.0] * len(_OFF)
    for call in calls:
        sent = [g for inner in call.inside for g in inner.input_gradients]
        known = [g for g in (*call.output_gradients, *sent) if g is not None]
        sizes = [float(tf.reduce_max(tf.abs(g))) for g in known if tf.size(g)]
        largest = max(sizes, default=0.0)
        scales = [size / largest for size in _SIZES] if largest else [1.0]
        suspect = Suspect(call.site)
        how: Any = {"is_managed": True, "given_exact": exact_inputs}
        suspect.measure(call, dtype, scales, **how)
        backward = min(suspect.backward.values(), default=0.0)
        found = zip(
            (suspect.forward, backward, suspect.state), _limits(dtype), strict=True
        )
        errors = [
            max(a, b / limit) for a, (b, limit) in zip(errors, found, strict=True)
        ]
    return errors


def _limits(dtype: str) -> tuple[float, float, float]:
    return FORWARD_LIMIT[dtype], BACKWARD_LIMIT[dtype], _STATE_LIMIT


def _is_finite(x: tf.Tensor) -> bool:
    return bool(tf.reduce_all(tf.math.is_finite(x)))
