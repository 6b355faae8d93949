"""Keeps a user's layer in float32 whose own `call` cannot run in half precision.

It combines its inputs with float32 noise, constants or tensors cast by hand, or has no
kernel or gradient there. It computes in float32 itself, between sublayers that stay;
where that does not help these follow.
"""

import contextlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from tfamp.dtypes.layer_dtypes import begin_again, restored_on_error, take
from tfamp.dtypes.rules import HEADS, Rule
from tfamp.keras_hooks import structure, trials
from tfamp.keras_hooks.layers import CALLS, Kind, Policy, keep, policy_of, update
from tfamp.keras_hooks.patches import replaced
from tfamp.keras_hooks.structure import Layer
from tfamp.records.checks import first_line, kind_and_line

# What Keras and TensorFlow raise for want of a kernel, or where dtypes do not fit.
_DTYPE_ERRORS = (TypeError, ValueError, NotImplementedError, tf.errors.OpError)
# Operations say so that take float32 and float64 alone.
_WIDE_ONLY = re.compile(
    "list of allowed values|requires tf.float32|components have incorrect types"
)
_TRIED = "_tfamp_tried_in_float32"
_LIBRARIES = re.compile(r"[\\/](keras|tensorflow|tfamp)[\\/]|[\\/]contextlib\.py$")
RULE = "default: cannot run in half precision"


def remedy(
    layer: Layer, rule_before: str, error: Exception, again: Callable[[], Any]
) -> Any:
    """Returns what a layer's call gives in float32, after it failed in half precision.

    The error is raised again where it has another cause or float32 does not help.
    """
    policy = policy_of(layer)
    if policy is not None and policy.rule == RULE != rule_before:
        return again()  # it was found as the layer was built, on inputs cast before
    found, of_gradient = trials.failure(layer)
    if policy is None or CALLS.differentiated is layer:  # as it is tried in float32
        raise error
    is_of_memory = isinstance(error, tf.errors.ResourceExhaustedError)
    is_of_dtypes = isinstance(error, _DTYPE_ERRORS) and not is_of_memory
    broke_it = policy.is_kept and policy.rule in (*trials.FOUND, HEADS)
    if broke_it and is_of_dtypes:
        return _taken_back(layer, policy, error, again)
    # Elsewhere a layer's own code has effects, and has been traced before.
    is_harmless = found is not None or trials.is_of_keras(layer)
    is_new = not (policy.fails_in_float32 or getattr(error, _TRIED, False))
    may_help = is_harmless and is_new and is_of_dtypes
    if not (of_gradient or (may_help and trials.runs_in_half(layer, policy))):
        raise error
    reason, how = _reason(layer, found or error, of_gradient)
    was_cast, layer.autocast = layer.autocast, True  # what comes in may be half
    for applies_to in ("own", "all") if structure.children(layer) else ("own",):
        with contextlib.suppress(Exception), restored_on_error(layer):
            take(layer, policy.settings, Rule(RULE, reason, applies_to=applies_to))
            with replaced(CALLS, **({"differentiated": layer} if of_gradient else {})):
                outputs = again()
            _tell(layer, policy, reason, how)
            return outputs
    layer.autocast = was_cast
    if of_gradient:  # nobody may ask it, and it has none in float32, either
        trials.note_tried(layer)
        return again()
    update(layer, fails_in_float32=True)
    with contextlib.suppress(AttributeError):
        setattr(error, _TRIED, True)  # layers around need not be tried
    raise error


def _tell(layer: Layer, policy: Policy, reason: str, how: str) -> None:
    """Tells why a layer is in float32, of a class in two lines under one policy."""
    told, what = policy.settings.told, (type(layer), reason)
    told[what] += 1
    is_of_many = not (policy.made_in_call or trials.is_of_keras(layer))
    if told[what] == 1:
        known = layer.name, reason, how
        logging.warning("Layer %r computes in float32: %s. %s", *known)
    elif told[what] == 2 and is_of_many:
        logging.warning(
            "So does %r, as others of %s may; `tfamp.assignment(model)` lists them.",
            *(layer.name, type(layer).__name__),
        )


def _taken_back(
    layer: Layer, policy: Policy, error: Exception, again: Callable[[], Any]
) -> Any:
    """Returns what a call gives in half precision, after a default rule broke it."""
    settings, rule = policy.settings, policy.rule
    told = kind_and_line(error).rstrip(".")
    how = "" if trials.is_of_keras(layer) else " Cast to `self.compute_dtype` there."
    with contextlib.suppress(Exception), restored_on_error(layer):
        settings.taken_back.add(layer)
        for each in structure.layers_of(layer):
            inside = policy_of(each)
            if inside and (each is layer or inside.kind is Kind.SUBLAYER):
                begin_again(each, settings)
        if rule == HEADS:
            keep(layer, Kind.WIDE_OUTPUT, HEADS, f"in float32 it raises {told}")
        outputs = again()
        logging.warning(
            "Layer %r computes in %s: in float32, for rule %r, its `call` raises %s.%s",
            *(layer.name, settings.compute_dtype, rule, told, how),
        )
        return outputs
    settings.taken_back.discard(layer)
    raise error


def _reason(layer: Layer, error: Exception, of_gradient: bool) -> tuple[str, str]:
    """Returns why a layer computes in float32, and what its author may do."""
    dtype, kind = layer.compute_dtype, type(error).__name__
    is_kernel = isinstance(error, trials.MissingKernelError)
    told = str(error) if is_kernel else f"{kind}: {first_line(error)}"
    if of_gradient:
        how = "Return tensors and gradients in the dtype of the inputs to run it in "
        how += "half precision, or name it in `keep_float32`."
        return f"its gradient cannot be built in {dtype} ({told})", how
    how = "Name it in `keep_float32` to say that it is meant to be so."
    if is_kernel:
        return told, how
    place = _place(layer, error)
    is_theirs = trials.is_of_keras(layer) and place.endswith(".call`")
    if not (_WIDE_ONLY.search(str(error)) or is_theirs):
        is_own = not type(layer).__module__.startswith("keras.")
        one = "`self.compute_dtype`" if is_own else "the dtype of its inputs"
        how = f"Cast to {one} there to run it in half precision."
    return f"its `call` raises {kind} in {dtype} at {place}", how


def _place(layer: Layer, error: BaseException | None) -> str:
    """Returns the line of the user's code that raised, as far as it is known."""
    # Those of its classes: `call` may be that of a base class in another file.
    modules = (sys.modules.get(cls.__module__) for cls in type(layer).__mro__)
    files = {getattr(module, "__file__", None) for module in modules}
    files.add(inspect.unwrap(type(layer).call).__code__.co_filename)
    frames: list[traceback.FrameSummary] = []
    while error is not None:  # and those that it was raised for
        frames += traceback.extract_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
    # Not lines of Keras, where it calls a function of the user's.
    outside = [each for each in frames if not _LIBRARIES.search(each.filename)]
    own = [each for each in outside if each.filename in files] or outside
    if not own:
        return f"`{type(layer).__name__}.call`"
    last = own[-1]
    return f"`{(last.line or '').strip()}` ({Path(last.filename).name}:{last.lineno})"
