"""Settles a whole model once, before its first use: rules by path, and heads."""

import threading
import warnings
import weakref
from typing import Any

import keras
from absl import logging

from tfamp import rules as _rules
from tfamp._care import Care, Kind, care_of, change_care
from tfamp._checks import first_line
from tfamp.keras_hooks import calls, structure
from tfamp.managed import dtype_errors, exact_names, heads, keeping, own_operations
from tfamp.managed.in_force import IN_FORCE
from tfamp.managed.lease import HALF, Lease

# Calls of a model that are traced in search of its heads, where tracing fails.
MAX_TRACES = 3

_LOCK = threading.RLock()
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_met_under: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Does what is still open on a layer that is about to be called."""
    if care_of(layer) is None and isinstance(layer, keras.Model):
        meet_unmanaged(layer)
    care = care_of(layer)
    if care is None:
        return
    if not care.settled:
        keeping.settle(layer)
    if not care.resolved and not calls.in_call() and not _is_symbolic(args, kwargs):
        resolve(layer, args, kwargs)


def _is_symbolic(args: Any, kwargs: Any) -> bool:
    leaves = structure.flatten((args, kwargs))
    return any(isinstance(x, keras.KerasTensor) for x in leaves)


def resolve(model: keras.layers.Layer, args: Any = None, kwargs: Any = None) -> bool:
    """Settles all layers of a model and finds its heads.

    Args:
        model: A managed model.
        args: Arguments of the call that is coming, where one is; a model that
            is not a graph of layers cannot be settled without.
        kwargs: Its keyword arguments.

    Returns:
        Whether the model is settled for good.
    """
    with _LOCK:
        care = care_of(model)
        if care is None:
            return True
        key = structure.graph_key(model)
        if care.resolved and key in (None, care.graph_key):
            return True
        if care.resolved:
            _start_again(model, care.lease)
        # The trace below comes here again.
        change_care(model, resolved=True, graph_key=key)
        try:
            done = _resolve(model, care.lease, args, kwargs)
        except BaseException:
            change_care(model, resolved=False)
            raise
        change_care(model, resolved=done, graph_key=structure.graph_key(model))
        return done


def _start_again(model: keras.layers.Layer, lease: Lease) -> None:
    """Undoes what was settled for layers that a Sequential model had before.

    What a rule decided that the lease does not hold stays: a loaded model's user wrote
    it in another process.
    """
    known = {rule.name for rule in lease.rules.rules}
    left: set[int] = set()
    for _, layer, parent in structure.walk(model):
        care = care_of(layer)
        if care is None or care.lease is not lease:
            continue
        is_unknown = care.kind is Kind.ISLAND and care.rule not in known
        if is_unknown or (care.kind is Kind.INSIDE and id(parent) in left):
            left.add(id(layer))
            continue
        keeping.begin_again(layer, lease)


def _resolve(model: keras.layers.Layer, lease: Lease, args: Any, kwargs: Any) -> bool:
    _forget_failure(model, lease)
    found = heads.graph_heads(model)
    if found is None and args is None:
        _settle_layers(model, lease)
        return False
    shapes: dict[int, Any] = {}
    failure: Exception | None = None
    if found is None:
        found, shapes, failure = _trace(model, args, kwargs)
    _settle_layers(model, lease)
    _report_unmatched(model, lease)
    if not lease.has_defaults:
        return True
    if failure is not None:
        return _give_up(model, failure)
    found = heads.graph_heads(model) or found
    is_graph = structure.graph_of(model) is not None
    if is_graph:
        _narrow_around_tied_heads(model, found, lease)
    before = heads.keep_heads(model, found, lease, shapes)
    if is_graph:
        return True
    if _output_is_float32(found):
        change_care(model, output_dtype="float32")
    with dtype_errors.switched_off():  # the heads are tried, not the layers around
        _, _, broken = _trace(model, args, kwargs)
    if broken is not None:
        heads.restore(before)
        _cast_output(model, "a float32 head would break the model's `call`")
        _say_what_broke(model, broken)
    elif not found.is_complete and not own_operations.take_for_output(
        model, found, lease, lambda: heads.traced_heads(model, args, kwargs)
    ):
        _cast_output(model, "no layer could be named that makes the output")
    return True


def _narrow_around_tied_heads(
    model: keras.layers.Layer, found: heads.Heads, lease: Lease
) -> None:
    """Has layers that use a head inside, or a part of one, get half precision from it.

    Such a layer's `call` may add what it gets to tensors in half precision.
    """
    parts = {id(part) for head in found.heads for _, part, _ in structure.walk(head)}
    for _, layer, _ in structure.walk(model):
        is_outside = structure.graph_of(layer) is None and id(layer) not in parts
        if not is_outside or care_of(layer) is None or layer.compute_dtype not in HALF:
            continue
        if any(id(child) in parts for child in structure.children(layer)):
            change_care(layer, inner_dtype=lease.compute_dtype)


def _output_is_float32(found: heads.Heads) -> bool:
    """Returns whether all heads of a model were put into float32 for good."""
    cares = [care_of(head) for head in found.heads]
    return bool(cares) and all(
        care is not None and care.kind in (Kind.HEAD, Kind.WIDE_OUTPUT)
        for care in cares
    )


def _trace(
    model: keras.layers.Layer, args: Any, kwargs: Any
) -> tuple[heads.Heads, dict[int, Any], Exception | None]:
    try:
        found, recorder = heads.traced_heads(model, args, kwargs)
    except Exception as error:  # the user's own code, which may do anything
        return heads.Heads(is_complete=False), {}, error
    return found, recorder.shapes, None


def _give_up(model: keras.layers.Layer, failure: Exception) -> bool:
    """Casts the output of a model whose `call` cannot be traced, only run.

    The failure may also be that of one bad call, so a few more are tried.

    Returns:
        Whether no further call is worth a trace.
    """
    _failures[model] = _failures.get(model, 0) + 1
    _cast_output(model, "its `call` cannot be traced")
    is_final = _failures[model] >= MAX_TRACES
    if is_final:
        logging.warning(
            "The output of model %r is cast to float32, but its last layer stays in "
            "half precision: its `call` cannot be traced to find that layer (%s). Make "
            "the model a Functional one, or give its last layer dtype='float32'.",
            model.name,
            f"{type(failure).__name__}: {first_line(failure)}",
        )
    return is_final


def _forget_failure(model: keras.layers.Layer, lease: Lease) -> None:
    care = care_of(model)
    if care is not None and care.kind is Kind.OUTPUT_CAST:
        rule = f"policy {lease.policy.name}"
        change_care(model, kind=Kind.FOLLOWS, rule=rule, reason="", output_dtype=None)


def _cast_output(model: keras.layers.Layer, because: str) -> None:
    change_care(
        model,
        kind=Kind.OUTPUT_CAST,
        rule="default: heads",
        reason=f"{because}, so the output alone is cast to float32",
        output_dtype="float32",
    )


def _say_what_broke(model: keras.layers.Layer, broken: Exception) -> None:
    logging.warning(
        "The output of model %r is cast to float32, but its last layer stays in half "
        "precision: with that layer in float32 its `call` raises %s. Cast what is "
        "combined with it to one dtype, for example with `keras.ops.cast`.",
        model.name,
        f"{type(broken).__name__}: {first_line(broken)}",
    )


def _settle_layers(model: keras.layers.Layer, lease: Lease) -> None:
    """Asks all rules about all layers, whose paths are known now."""
    exact_names.find(model, lease)
    for path, layer, _ in structure.walk(model):
        care = care_of(layer)
        if care is None or care.lease is not lease:
            continue
        _note_user_rules(layer, path, lease)
        keeping.settle(layer, path=None if layer is model else path)


def _note_user_rules(layer: keras.layers.Layer, path: str, lease: Lease) -> None:
    care = care_of(layer)
    for rule in lease.rules.of_user:
        if rule.name in lease.matched and (
            care is None or care.kind is not Kind.EXPLICIT
        ):
            continue
        if not rule.matches(layer, path=path, is_exact=rule.name in lease.exact):
            continue
        lease.matched.add(rule.name)
        if care is not None and care.kind is Kind.EXPLICIT:
            _warn_of_clash(layer, path, rule)


def _warn_of_clash(layer: keras.layers.Layer, path: str, rule: _rules.Rule) -> None:
    if layer.compute_dtype == "float32":
        return
    warnings.warn(
        f"Layer {path!r} matches {rule.name}, but was made with dtype="
        f"{layer.dtype_policy.name!r}, which wins. Leave out the layer's `dtype`, or "
        "the rule.",
        UserWarning,
        stacklevel=2,
    )


def _report_unmatched(model: keras.layers.Layer, lease: Lease) -> None:
    for rule in lease.rules.of_user:
        if rule.name not in lease.matched:
            lease.matched.add(rule.name)  # said once
            warnings.warn(unmatched_message(model, rule), UserWarning, stacklevel=2)


def unmatched_message(model: keras.layers.Layer, rule: _rules.Rule) -> str:
    """Words the complaint about a rule that keeps no layer of `model`."""
    paths = [path for path, layer, _ in structure.walk(model) if layer is not model]
    example = max(paths, key=lambda path: path.count("/"), default=model.name)
    subject = rule.name.removeprefix("keep_float32: ")
    return (
        f"{'Pattern' if rule.pattern else 'Rule'} {subject} in `keep_float32` matches "
        f"none of the {len(paths)} layers of model {model.name!r}; paths look like "
        f"{example!r}. Print them with `print(tfamp.assignment(model))`."
    )


def meet_unmanaged(model: keras.layers.Layer) -> None:
    """Looks once at a model that was not made under tfamp, as it is first used.

    Once under each `enable`, that is: it may have been used before.

    A model around managed layers is managed from here on, or its head would
    stay in half precision. Of one that was built before `tfamp.enable` it is said
    that it computes as it was built.
    """
    if not count_as_met(model):
        return
    lease = care_lease(model)
    if lease is not None:
        keeping.begin(model, lease, is_explicit=False)
    elif IN_FORCE.lease is not None and IN_FORCE.lease.is_half:
        warnings.warn(
            f"Model {model.name!r} was built before `tfamp.enable`, so it computes in "
            f"{model.compute_dtype} as it was built. Call `tfamp.enable` before "
            "building the model, or convert it in place with `tfamp.apply(model)`.",
            UserWarning,
            stacklevel=4,
        )


def count_as_met(model: keras.layers.Layer) -> bool:
    """Counts a model as looked at under the present `enable`.

    Returns:
        Whether it was not before.
    """
    number = IN_FORCE.lease.number if IN_FORCE.lease is not None else 0
    is_new = _met_under.get(model) != number
    _met_under[model] = number
    return is_new


def computes_in(model: keras.layers.Layer, dtype: str) -> bool:
    """Returns whether any layer of `model` computes in `dtype`.

    A graph of layers computes nothing itself, so its own policy counts for
    nothing.
    """
    is_graph = structure.graph_of(model) is not None
    return any(
        layer.compute_dtype == dtype
        for _, layer, _ in structure.walk(model)
        if not (is_graph and layer is model)
    )


def care_lease(model: keras.layers.Layer) -> Lease | None:
    """Returns the lease of a model, or of the first managed layer in it."""
    for _, layer, _ in structure.walk(model):
        care: Care | None = care_of(layer)
        if care is not None:
            return care.lease
    return None
