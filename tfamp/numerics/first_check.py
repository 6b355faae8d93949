"""Checks a user's own layers at a model's first `fit`, and keeps what half spoils.

Rules know Keras's layers; what a layer of the user's computes itself can only be tried.
On some examples of the first batch the model runs eagerly in float32, then each such
layer again, as it is managed. Layers of Keras's are kept, too, where a feature is not
held by half precision. Nothing of it is left but the layers that are kept.
"""

import collections
import functools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.dtypes import layer_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import structure, trainer, trials
from tfamp.keras_hooks.layers import policy_of
from tfamp.loss_scale.fit_hooks import BEFORE_FIRST_BATCH
from tfamp.numerics import first_features, first_runs
from tfamp.numerics.first_features import RULE, Guilty
from tfamp.numerics.passes import Suspect
from tfamp.numerics.sensitivity import BACKWARD_LIMIT, FORWARD_LIMIT
from tfamp.records.checks import kind_and_line
from tfamp.stepping.eager_step import floats
from tfamp.stepping.layer_calls import Recorded, units
from tfamp.stepping.unchanged import same_draws, seeds_put_back

# Error of what a layer assigns, relative to how far the variable moves.
_STATE_LIMIT = 0.5
# Largest gradients that are sent back: a layer may stand one and not the other.
_SIZES = (1.0, 2.0**-8)
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
        and policy.settings.is_half
        and _ASKED.get(model) != policy.settings.number
    )


def _has_own(model: keras.Model) -> bool:
    return any(first_runs.is_own(layer) for _, layer, _ in structure.walk(model))


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
    guilty: Guilty = {}
    left: list[first_features.Features] = []
    failure, features = "", first_features.not_held(batch, settings.compute_dtype)
    if not (any(features) or _has_own(model)):
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
                parts, some = _models_of(model, x), first_runs.examples(x)
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
                    if any(features):
                        found, still = first_features.keep(
                            part, some, settings, features
                        )
                        guilty |= found
                        left.append(still)
                if not parts:
                    failure = "it has no `call`, and no model in it takes its batches"
            except Exception as error:  # a `call` that is never called so, for one
                failure = kind_and_line(error).rstrip(".")
                if type(model).train_step is not keras.Model.train_step:
                    failure = f"its `train_step` may call it otherwise ({failure})"
    for each in left:
        first_features.warn(model, settings.compute_dtype, each)
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


def _tell_of_kept(guilty: Guilty) -> None:
    """Tells of layers that are kept in float32, of a class in two lines."""
    names: dict[type, list[str]] = collections.defaultdict(list)
    for layer, reason in guilty.items():
        names[type(layer)].append(layer.name)
        if len(names[type(layer)]) == 1:
            text = "Layer %r computes in float32: %s. Name it in `keep_float32`, or "
            logging.warning(f"{text}pass `check=None` to leave it.", layer.name, reason)
    for cls, (_, *others) in names.items():
        if others:
            do, more = ("does", "other") if len(others) == 1 else ("do", "others")
            logging.warning(
                "So %s %d %s of %s, as %r; see `tfamp.assignment(model)` for why.",
                *(do, len(others), more, cls.__name__, others[0]),
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


def _guilty_layers(model: keras.Model, x: Any, settings: PolicySettings) -> Guilty:
    """Returns the layers that are spoiled, with what is wrong; it keeps them."""
    with layer_dtypes.errors_left_alone(), first_runs.variables_put_back(model, x):
        chosen = [site for site in units(model) if first_runs.is_own(site.layer)]
        calls = first_runs.recorded(model, x, chosen) if chosen else {}
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
