"""Assigns dtypes to single layers: who follows the policy, who stays in float32.

A layer of the user's whose own `call` cannot run in half precision, as it combines its
inputs with float32 noise, constants or tensors cast by hand, computes in float32
itself, between sublayers that stay; where that does not help these follow.
"""

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.dtypes.rules import EXACT_INPUTS, MOVES, OWN_LOSS, Rule
from tfamp.dtypes.settings import IN_FORCE, PolicySettings
from tfamp.keras_hooks import calls, layers, saved_state, structure, trials
from tfamp.keras_hooks.layers import (
    CALLS,
    GlobalPolicy,
    Kind,
    Policy,
    policy_of,
    update,
)
from tfamp.keras_hooks.patches import replaced
from tfamp.records.checks import first_line, kind_and_line
from tfamp.records.formats import HALF

# What Keras and TensorFlow raise for want of a kernel, or where dtypes do not fit.
_DTYPE_ERRORS = (TypeError, ValueError, NotImplementedError, tf.errors.OpError)
_TRIED = "_tfamp_tried_in_float32"
_LIBRARIES = re.compile(r"[\\/](keras|tensorflow|tfamp)[\\/]")
_CANNOT_RUN = "default: cannot run in half precision"


def on_created(layer: keras.layers.Layer, dtype: Any) -> None:
    """Gives a layer its policy as it is made; its constructor goes on."""
    given = vars(layer)["_dtype_policy"]
    if isinstance(given, GlobalPolicy):
        given = vars(layer)["_dtype_policy"] = given.present
        dtype = None
    if isinstance(layer, keras.layers.InputLayer):
        return
    if isinstance(dtype, Policy):  # a layer handed its own to its sublayer
        begin(layer, dtype.settings, is_explicit=dtype.kind is Kind.EXPLICIT)
        update(layer, made_in=dtype.made_in)
        if dtype.is_kept and dtype.applies_to == "all":
            _put_inside(layer, "a kept layer")
        return
    settings, loaded = IN_FORCE.settings, IN_FORCE.present.loaded
    if settings is None:
        return
    name = settings.policy.name
    inherited = saved_state.inherited_from(dtype) if isinstance(dtype, dict) else None
    # A program that has always set this policy sets a policy object of its own.
    is_object = dtype is None or isinstance(dtype, keras.DTypePolicy)
    inherits = (
        (is_object and given.name == name)
        or given.name == loaded
        or IN_FORCE.holds(inherited or "")
        # A loaded model is made in float32, whatever it computes in afterwards.
        or (loaded is not None and name == "float32" and given.compute_dtype in HALF)
    )
    if not inherits and dtype is None:
        IN_FORCE.warn_of_foreign(given)
    begin(layer, settings, is_explicit=not inherits)
    update(layer, made_in=name)


def on_quantized_read(layer: keras.layers.Layer) -> None:
    """Manages a quantized layer that inherited what it is quantized from."""
    settings = IN_FORCE.settings
    if settings is not None:
        begin(layer, settings, is_explicit=False)
        update(layer, made_in=settings.policy.name)
        layers.follow(layer)


def begin(
    layer: keras.layers.Layer, settings: PolicySettings, *, is_explicit: bool
) -> None:
    """Gives `layer` a policy of its own and asks the rules that can be asked early."""
    decided: dict[str, Any] = {"is_resolved": not isinstance(layer, keras.Model)}
    name = settings.policy.name
    if is_explicit:
        name, decided["kind"] = _name_of(layer), Kind.EXPLICIT
        decided["rule"] = "dtype argument"
        decided["reason"] = "the dtype passed to the layer wins"
    elif settings.has_defaults:
        moves = isinstance(layer, MOVES)
        decided["exact_inputs"] = moves or isinstance(layer, EXACT_INPUTS)
        decided["output_dtype"] = settings.compute_dtype if moves else None
    policy = Policy(name, settings, **decided)
    if is_explicit:
        policy.bind(layer)
    else:
        layers.put(layer, policy)
    if settings.open_rules:
        settings.made.add(layer)
    if not is_explicit:
        settings.ask(layer, is_finished=False)


def _name_of(layer: keras.layers.Layer) -> str:
    """Returns the name of a stock policy like that of a layer."""
    given = vars(layer)["_dtype_policy"]
    if isinstance(given, Policy):
        return given.given_name
    if type(given) in (keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy):
        return str(given.name)
    return str(layer.compute_dtype)  # it keeps its own, of a quantization or a map


def begin_again(layer: keras.layers.Layer, settings: PolicySettings) -> None:
    """Puts a layer that exists already under `settings`; quantized ones are left."""
    before = policy_of(layer)
    is_float = layer.dtype_policy.compute_dtype in ("float32", "float64", *HALF)
    if layer.quantization_mode is not None or not is_float:
        return
    is_explicit = before is not None and before.kind is Kind.EXPLICIT
    begin(layer, settings, is_explicit=is_explicit)
    if before is not None:
        update(layer, made_in=before.made_in)


def decide(layer: keras.layers.Layer, *, path: str | None = None) -> None:
    """Asks the rules that need the finished layer, then spreads the answer."""
    policy = policy_of(layer)
    if policy is None:
        return
    if not policy.is_decided or path is not None:
        if policy.kind is Kind.FOLLOWS:
            policy.settings.ask(layer, path=path)
        policy.is_decided = True
    # Its inner layer's `call` runs in its own autocast scope.
    if isinstance(layer, keras.layers.TimeDistributed):
        decide(layer.layer)
        inner = policy_of(layer.layer)
        is_kept = inner is not None and inner.kind is Kind.FLOAT32_INSIDE
        if policy.kind is Kind.FOLLOWS and is_kept:
            policy.settings.keep(layer, Rule(inner.rule, inner.reason))  # type: ignore[union-attr]
    propagate_to_sublayers(layer)


def propagate_to_sublayers(layer: keras.layers.Layer) -> None:
    """Takes the sublayers of a kept layer into float32 with it."""
    policy = policy_of(layer)
    if policy is None or policy.is_propagated or not policy.is_kept:
        return
    # Sublayers may yet be made by `build`; until then the answer is not final.
    policy.is_propagated = layer.built
    for child in structure.children(layer) if policy.applies_to == "all" else ():
        inner = policy_of(child)
        if inner is not None and inner.kind is not Kind.EXPLICIT:
            _put_inside(child, layer.name)
            propagate_to_sublayers(child)


def _put_inside(layer: keras.layers.Layer, outer_name: str) -> None:
    """Makes `layer` compute and return float32 as part of a kept layer."""
    update(
        layer,
        kind=Kind.SUBLAYER,
        rule=f"inside {outer_name!r}",
        reason=f"the layer around it, {outer_name!r}, is kept in float32",
        output_dtype=None,
        applies_to="all",
        is_decided=True,
        is_propagated=False,
    )


class Before:
    """What some layers were, for `put_back`."""

    def __init__(self, of: Iterable[keras.layers.Layer]) -> None:
        self._layers = [(layer, layers.snapshot(layer)) for layer in of]

    def put_back(self) -> None:
        """Puts the layers back to what they were."""
        for layer, before in self._layers:
            layers.put_back(layer, before)


@contextlib.contextmanager
def restored_on_error(of: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Puts the dtypes of layers back where the block fails."""
    before = Before(of)
    try:
        yield
    except BaseException:
        before.put_back()
        raise


@contextlib.contextmanager
def errors_left_alone() -> Iterator[None]:
    """Lets errors of calls in the block be what they are."""
    before, CALLS.may_keep = CALLS.may_keep, False
    try:
        yield
    finally:
        CALLS.may_keep = before


def take(layer: keras.layers.Layer, settings: PolicySettings, rule: Rule) -> None:
    """Takes a layer into float32 for good; `rule.applies_to` says whether alone."""
    settings.keep(layer, rule)
    update(layer, is_decided=True)
    if isinstance(layer, keras.Model) and not calls.in_call():
        update(layer, output_dtype="float32")  # a model's output is a head


def remedy(
    layer: keras.layers.Layer,
    rule_before: str,
    error: Exception,
    again: Callable[[], Any],
) -> Any:
    """Returns what a layer's call gives in float32, after it failed in half precision.

    `rule_before` is what had decided ahead of the call, and `again` repeats it. The
    error is raised again where it has another cause or float32 does not help.
    """
    policy = policy_of(layer)
    if policy is not None and policy.rule == _CANNOT_RUN != rule_before:
        return again()  # it was found as the layer was built, on inputs cast before
    found, of_gradient = trials.failure(layer)
    if policy is None or CALLS.differentiated is layer:  # as it is tried in float32
        raise error
    if policy.rule in (OWN_LOSS, trials.EXACT) and isinstance(error, _DTYPE_ERRORS):
        return _taken_back(layer, policy, error, again)
    # Elsewhere a layer's own code has effects, and has been traced before.
    is_harmless = found is not None or trials.is_of_keras(layer)
    is_harmless = is_harmless and not policy.fails_in_float32
    if not (of_gradient or (is_harmless and _may_help(layer, policy, error))):
        raise error
    reason, how = _reason(layer, found or error, of_gradient)
    has_sublayers = bool(structure.children(layer))
    for applies_to in ("own", "all") if has_sublayers else ("own",):
        with (
            contextlib.suppress(Exception),
            restored_on_error(structure.layers_of(layer)),
        ):
            rule = Rule(_CANNOT_RUN, reason, applies_to=applies_to)
            take(layer, policy.settings, rule)
            with replaced(CALLS, **({"differentiated": layer} if of_gradient else {})):
                outputs = again()
            between = ", between sublayers that stay as they are"
            logging.warning(
                "Layer %r computes in float32%s: %s. %s",
                layer.name,
                between if applies_to == "own" and has_sublayers else "",
                reason,
                how,
            )
            return outputs
    if of_gradient:  # nobody may ask it, and it has none in float32, either
        trials.note_tried(layer)
        return again()
    update(layer, fails_in_float32=True)
    with contextlib.suppress(AttributeError):
        setattr(error, _TRIED, True)  # layers around need not be tried
    raise error


def _may_help(layer: keras.layers.Layer, policy: Policy, error: Exception) -> bool:
    return (
        policy.kind in (Kind.FOLLOWS, Kind.OUTPUT_CAST)
        and policy.settings.has_defaults
        and layer.compute_dtype in HALF
        and CALLS.may_keep
        and not getattr(error, _TRIED, False)
        and structure.graph_of(layer) is None
        and isinstance(error, _DTYPE_ERRORS)
    )


def _taken_back(
    layer: keras.layers.Layer,
    policy: Policy,
    error: Exception,
    again: Callable[[], Any],
) -> Any:
    """Returns what a call gives in half precision, after a default rule broke it."""
    with restored_on_error(structure.layers_of(layer)):
        policy.settings.taken_back.add(layer)
        begin_again(layer, policy.settings)
        outputs = again()
    logging.warning(
        "Layer %r computes in %s: in float32, for rule %r, its `call` raises %s. Cast "
        "to `self.compute_dtype` there.",
        layer.name,
        policy.settings.compute_dtype,
        policy.rule,
        kind_and_line(error),
    )
    return outputs


def _reason(
    layer: keras.layers.Layer, error: Exception, of_gradient: bool
) -> tuple[str, str]:
    """Returns why a layer computes in float32, and what its author may do."""
    dtype, kind = layer.compute_dtype, type(error).__name__
    is_kernel = isinstance(error, trials.MissingKernelError)
    told = str(error) if is_kernel else f"{kind}: {first_line(error)}"
    if of_gradient:
        how = "Return tensors and gradients in the dtype of the inputs to run it in "
        how += "half precision, or name it in `keep_float32`."
        return f"its gradient cannot be built in {dtype} ({told})", how
    if is_kernel:
        return told, "Name it in `keep_float32` to say that it is meant to be so."
    how = "Cast to `self.compute_dtype` there to run it in half precision."
    return f"its `call` raises {kind} in {dtype} at {_place(layer, error)}", how


def _place(layer: keras.layers.Layer, error: BaseException | None) -> str:
    """Returns the line of the user's code that raised, as far as it is known."""
    file = inspect.unwrap(type(layer).call).__code__.co_filename
    best: tuple[bool, traceback.FrameSummary] | None = None
    while error is not None:  # and those that it was raised for
        for frame in traceback.extract_tb(error.__traceback__):
            is_call = frame.filename == file
            is_own = is_call or not _LIBRARIES.search(frame.filename)
            if is_own and (best is None or is_call >= best[0]):
                best = is_call, frame
        error = error.__cause__ or error.__context__
    if best is None:
        return f"`{type(layer).__name__}.call`"
    last = best[1]
    return f"`{(last.line or '').strip()}` ({Path(last.filename).name}:{last.lineno})"
