"""Chooses the policy of a model at its first `fit`, by timing."""

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.dtypes.settings import IN_FORCE
from tfamp.keras_hooks import trainer
from tfamp.keras_hooks.layers import policy_of
from tfamp.keras_hooks.patches import replaced
from tfamp.loss_scale.fit_hooks import AROUND_PASS, BEFORE_FIT
from tfamp.models import put_under
from tfamp.records.checks import first_line
from tfamp.tuning import joined_steps
from tfamp.tuning.measured_policies import Measurement, measure_policies

# The number of the settings for which a model has been through this.
_ASKED: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()
# Steps in a call by what was measured, of models whose `compile` says nothing.
_JOINED: weakref.WeakKeyDictionary[keras.Model, int] = weakref.WeakKeyDictionary()


def choose(model: keras.Model, arguments: Mapping[str, Any]) -> None:
    """Puts a model under the fastest policy, where that was left to its first `fit`."""
    _join_or_part(model, arguments)
    policy = policy_of(model)
    settings = None if policy is None else policy.settings
    if settings is None or not settings.is_measured or not model.compiled:
        return
    if _ASKED.get(model) == settings.number:
        return
    _ASKED[model] = settings.number
    # What `compile` was told of XLA, None where that was left to Keras.
    told = trainer.compile_arguments(model).get("jit_compile", "auto")
    told = None if told == "auto" else bool(told)
    found = _measured(model, arguments, told)
    if isinstance(found, str):
        logging.warning(
            "Model %r stays in float32: its policies cannot be measured, as %s. Name a "
            "policy in `tfamp.enable`, or pass `tfamp.measure_policies` other data.",
            *(model.name, found),
        )
        return
    logging.info("\n%s", found)
    chosen = settings.under(found.best.policy)
    chosen.evidence = {"measured": found.to_dict()}
    put_under(model, chosen)
    if told is None:
        chosen.jit_compile = found.best.jit_compile
        trainer.set_jit_compile(model, found.best.jit_compile)
    if found.steps_per_execution > 1:
        _JOINED[model] = found.steps_per_execution
        _join_or_part(model, arguments)
    reason = f"measured: {found.reason}"
    logging.info("Model %r trains under %s", model.name, reason)
    if IN_FORCE.settings is settings:
        IN_FORCE.present.why = reason


def _join_or_part(model: keras.Model, arguments: Mapping[str, Any]) -> None:
    """Joins steps as measured, unless something in this `fit` needs each of them."""
    if model not in _JOINED:
        return
    size, present = _JOINED[model], int(model.steps_per_execution or 1)
    if present not in (1, size):  # the user has set another
        del _JOINED[model]
        return
    why = joined_steps.obstacle(model, arguments, size)
    wanted = 1 if why else size
    if wanted != present:
        model.steps_per_execution = wanted
        trainer.drop_traced_functions(model)
    if why:
        logging.info("Model %r: its steps are run one by one, as %s.", model.name, why)
    else:
        logging.info("Model %r runs %d steps in a call, as measured.", model.name, size)


def _within_steps(
    model: keras.Model, name: str, arguments: Mapping[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """Has the steps of a pass run one by one where joined ones would go beyond `steps`.

    They are traced for each such pass: what is traced for joined steps stays as it is.
    """
    size = int(model.steps_per_execution or 1) if model in _JOINED else 1
    if not (arguments.get("steps") or 0) % size:
        return contextlib.nullcontext()
    function = "test_function" if name == "evaluate" else "predict_function"
    return replaced(model, steps_per_execution=1, **{function: None})


BEFORE_FIT.append(choose)
AROUND_PASS.append(_within_steps)


def _measured(
    model: keras.Model, arguments: Mapping[str, Any], jit_compile: bool | None
) -> Measurement | str:
    """Returns what a measurement found, or why there is none."""
    x, y = arguments.get("x"), arguments.get("y")
    if model.run_eagerly:
        return "it runs eagerly, where a step's time is that of Python"
    if isinstance(x, Iterator):
        return f"its data, of type {type(x).__name__}, can be read only once"
    weights = arguments.get("sample_weight")
    data = x if y is None else (x, y) if weights is None else (x, y, weights)
    size = arguments.get("batch_size") or 32  # as `fit` has it for arrays
    try:
        return measure_policies(model, data, jit_compile=jit_compile, batch_size=size)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        # `fit` may do without what a measurement needs, and else says it better.
        return f"a step outside `fit` fails: {first_line(error)}"
