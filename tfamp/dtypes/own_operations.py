"""Takes what a layer computes itself into float32, between sublayers that stay.

The layer's inputs come unrounded, and what its sublayers return is widened: its own
operations meet float32 alone. That is done to a layer whose own `call` raises in half
precision, as it combines its inputs with float32 noise, constants or tensors cast by
hand (where that does not help, its sublayers follow), and to a model whose last product
is one of its own operations.
"""

import contextlib
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.dtypes import heads, layer_dtypes
from tfamp.dtypes.rules import Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import calls, half_kernels, structure, trials
from tfamp.keras_hooks.layers import CALLS, Kind, Policy, policy_of, update
from tfamp.keras_hooks.patches import replaced
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF

# What Keras and TensorFlow raise for want of a kernel, or where dtypes do not fit.
_DTYPE_ERRORS = (TypeError, ValueError, NotImplementedError, tf.errors.OpError)
_TRIED = "_tfamp_tried_in_float32"
_LIBRARIES = re.compile(r"[\\/](keras|tensorflow|tfamp)[\\/]")
_RULE = "default: cannot run in half precision"
_OWN_LOSS = "default: own loss"
_BETWEEN = ", between sublayers that stay as they are"
_HOW_TO_STAY = " Cast to `self.compute_dtype` there to run it in half precision."
_HOW_TO_KEEP = " Name it in `keep_float32` to say that it is meant to be so."
_HOW_TO_DIFFERENTIATE = (
    " Return tensors and gradients in the dtype of the inputs to run it in half "
    "precision, or name it in `keep_float32`."
)
_PRODUCT = "its own product makes an output of the model, which feeds the loss"


def remedy(
    layer: keras.layers.Layer,
    rule_before: str,
    error: Exception,
    again: Callable[[], Any],
) -> Any:
    """Returns what a layer's call gives in float32, after it failed in half precision.

    `rule_before` is what had decided ahead of the call, and `again` repeats it.
    The error is raised again where it has another cause or float32 does not help.
    """
    policy = policy_of(layer)
    if policy is not None and policy.rule == _RULE != rule_before:
        return again()  # it was found as the layer was built, on inputs cast before
    found, of_gradient = half_kernels.failure(layer)
    if policy is None or CALLS.differentiated is layer:  # as it is tried in float32
        raise error
    if policy.rule == _OWN_LOSS and isinstance(error, _DTYPE_ERRORS):
        return _without_own_loss(layer, policy.settings, error, again)
    # Elsewhere a layer's own code has effects, and has been traced before.
    is_harmless = found is not None or trials.is_of_keras(layer)
    if not (of_gradient or (is_harmless and _may_help(layer, policy, error))):
        raise error
    reason, how = _reason(layer, found or error, of_gradient)
    tried = {"differentiated": layer} if of_gradient else {}
    for applies_to in ("own", "all") if structure.children(layer) else ("own",):
        with contextlib.suppress(Exception), _restored_on_error(layer):
            take(layer, policy.settings, Rule(_RULE, reason, applies_to=applies_to))
            with replaced(CALLS, **tried):
                outputs = again()
            logging.warning(
                "Layer %r computes in float32%s: %s.%s",
                layer.name,
                _BETWEEN if applies_to == "own" and structure.children(layer) else "",
                reason,
                how,
            )
            return outputs
    if of_gradient:  # nobody may ask it, and it has none in float32, either
        trials.note_tried(layer)
        return again()
    policy.fails_in_float32 = True
    _mark(layer, error)
    raise error


def _reason(
    layer: keras.layers.Layer, error: Exception, of_gradient: bool
) -> tuple[str, str]:
    """Returns why a layer computes in float32, and what its author may do."""
    dtype, kind = layer.compute_dtype, type(error).__name__
    is_kernel = isinstance(error, half_kernels.MissingKernelError)
    told = str(error) if is_kernel else f"{kind}: {first_line(error)}"
    if of_gradient:
        reason = f"its gradient cannot be built in {dtype} ({told})"
        return reason, _HOW_TO_DIFFERENTIATE
    if is_kernel:
        return told, _HOW_TO_KEEP
    return (
        f"its `call` raises {kind} in {dtype} at {_place(layer, error)}",
        _HOW_TO_STAY,
    )


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Lets errors of calls in the block be what they are."""
    before, CALLS.may_keep = CALLS.may_keep, False
    try:
        yield
    finally:
        CALLS.may_keep = before


def _may_help(layer: keras.layers.Layer, policy: Policy, error: Exception) -> bool:
    return (
        policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and policy.settings.has_defaults
        and layer.compute_dtype in HALF
        and not policy.fails_in_float32
        and CALLS.may_keep
        and not getattr(error, _TRIED, False)
        and structure.graph_of(layer) is None
        and isinstance(error, _DTYPE_ERRORS)
    )


def _without_own_loss(
    layer: keras.layers.Layer,
    settings: PolicySettings,
    error: Exception,
    again: Callable[[], Any],
) -> Any:
    """Returns what a call gives in half precision, after a default rule broke it."""
    with _restored_on_error(layer):
        settings.taken_back.add(layer)
        layer_dtypes.begin_again(layer, settings)
        outputs = again()
    logging.warning(
        "Layer %r computes in %s, and so does the loss that it adds: in float32 its "
        "`call` raises %s. Cast to `self.compute_dtype` there.",
        layer.name,
        settings.compute_dtype,
        f"{type(error).__name__}: {first_line(error)}",
    )
    return outputs


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and those that it was raised for."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _mark(layer: keras.layers.Layer, error: Exception) -> None:
    """Keeps layers around from being tried too, and names what tfamp did before."""
    with contextlib.suppress(AttributeError):
        setattr(error, _TRIED, True)
    parts = ((path, policy_of(part)) for path, part, _ in structure.walk(layer))
    kept = [path for path, policy in parts if policy is not None and policy.is_kept]
    if kept:
        text = f"tfamp keeps these layers in float32: {', '.join(kept)}."
        getattr(error, "add_note", logging.error)(text)


def _place(layer: keras.layers.Layer, error: BaseException) -> str:
    """Returns the line of the user's code that raised, as far as it is known."""
    file = inspect.unwrap(type(layer).call).__code__.co_filename
    frames: list[traceback.FrameSummary] = []
    for each in _with_causes(error):
        own = [
            frame
            for frame in traceback.extract_tb(each.__traceback__)
            if frame.filename == file or not _LIBRARIES.search(frame.filename)
        ]
        own = [frame for frame in own if frame.name != "error_handler"]
        frames = [frame for frame in own if frame.filename == file] or own or frames
    if not frames:
        return f"`{type(layer).__name__}.call`"
    last = frames[-1]
    line = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    return f"`{line}` ({Path(last.filename).name}:{last.lineno})"


def take(layer: keras.layers.Layer, settings: PolicySettings, rule: Rule) -> None:
    """Takes a layer into float32 for good; `rule.applies_to` says whether alone."""
    settings.keep(layer, rule)
    update(layer, is_decided=True)
    if isinstance(layer, keras.Model) and not calls.in_call():
        update(layer, output_dtype="float32")  # a model's output is a head


def _restored_on_error(
    layer: keras.layers.Layer,
) -> contextlib.AbstractContextManager[None]:
    parts = [part for _, part, _ in structure.walk(layer)]
    return layer_dtypes.restored_on_error(parts)


def take_for_output(
    model: keras.layers.Layer,
    found: heads.Heads,
    settings: PolicySettings,
    trace: Callable[[], Any],
) -> bool:
    """Takes a model's own operations into float32 where a product of its own ends it.

    Returns whether they are in float32 now: not where the product is large, as its
    share of the time is not known, or where the call raises then. `trace` calls the
    model once, without side effects.
    """
    policy = policy_of(model)
    if policy is None or not found.own_products:
        return False
    if policy.applies_to == "own":  # by a rule, for a loss of its own
        update(model, output_dtype="float32")
        return True
    factors = [product.inputs[1].shape for product in found.own_products]
    weights = max(math.prod(size or 1 for size in factor) for factor in factors)
    if weights >= heads.MIN_LARGE_HEAD_WEIGHTS:
        return False
    with contextlib.suppress(Exception), _restored_on_error(model):
        take(model, settings, Rule("default: heads", _PRODUCT, applies_to="own"))
        trace()
        return True
    return False
