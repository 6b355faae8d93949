"""Chooses the policy of a model at its first `fit`, by timing."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import trainer
from tfamp.keras_hooks.layers import policy_of
from tfamp.loss_scale.fit_hooks import BEFORE_FIT
from tfamp.models import put_under
from tfamp.records.checks import first_line
from tfamp.tuning.measured_policies import measure_policies
from tfamp.tuning.measurement import Measurement

# As `fit` has it for arrays.
_BATCH_SIZE = 32
# The number of the settings for which a model has been through this; the others of a
# program share them.
_ASKED: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


def choose(model: keras.Model, arguments: Mapping[str, Any]) -> None:
    """Puts a model under the fastest policy, where that was left to its first `fit`.

    `arguments` are those of that `fit`, by name.
    """
    policy = policy_of(model)
    settings = None if policy is None else policy.settings
    if settings is None or not settings.is_measured or not model.compiled:
        return
    if _ASKED.get(model) == settings.number:
        return
    _ASKED[model] = settings.number
    found = _measured(model, arguments)
    if found is not None:
        _put_under(model, settings, found)


BEFORE_FIT.append(choose)


def _measured(model: keras.Model, arguments: Mapping[str, Any]) -> Measurement | None:
    if model.run_eagerly:
        _stay(model, "it runs eagerly, where a step's time is that of Python")
        return None
    data = _data_of(arguments)
    if data is None:
        kind = type(arguments.get("x")).__name__
        _stay(model, f"its data, of type {kind}, can be read only once")
        return None
    try:
        found = measure_policies(
            model,
            data,
            jit_compile=_xla_as_told(model),
            batch_size=arguments.get("batch_size") or _BATCH_SIZE,
        )
    except (ValueError, TypeError, tf.errors.OpError) as error:
        # `fit` may do without what a measurement needs, and else says it better.
        _stay(model, f"a step outside `fit` fails: {first_line(error)}")
        return None
    logging.info("\n%s", found)
    return found


def _put_under(
    model: keras.Model, settings: PolicySettings, found: Measurement
) -> None:
    best = found.best
    chosen = settings.under(best.policy)
    chosen.evidence = {"measured": found.to_dict()}
    told = _xla_as_told(model)
    put_under(model, chosen)
    if told is None:
        chosen.jit_compile = best.jit_compile
        trainer.set_jit_compile(model, best.jit_compile)
    reason = f"measured: {found.reason}"
    logging.info("Model %r trains under %s", model.name, reason)
    if IN_FORCE.settings is settings:
        IN_FORCE.present.why = reason


def _xla_as_told(model: keras.Model) -> bool | None:
    """Returns what `compile` was told of XLA, None where that was left to Keras."""
    told = trainer.compile_arguments(model).get("jit_compile", "auto")
    return None if told == "auto" else bool(told)


def _data_of(arguments: Mapping[str, Any]) -> Any:
    """Returns the data of `fit`, None where reading it would use it up."""
    x, y = arguments.get("x"), arguments.get("y")
    if isinstance(x, Iterator) or hasattr(x, "__next__"):
        return None
    if y is None:
        return x
    weights = arguments.get("sample_weight")
    return (x, y) if weights is None else (x, y, weights)


def _stay(model: keras.Model, because: str) -> None:
    logging.warning(
        "Model %r stays in float32: its policies cannot be measured, as %s. Name a "
        "policy in `tfamp.enable`, or pass `tfamp.measure_policies` other data.",
        model.name,
        because,
    )
