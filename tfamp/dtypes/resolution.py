"""Settles a whole model once, before its first use: rules by path, and heads."""

import math
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
from absl import logging

from tfamp.dtypes import heads, layer_dtypes
from tfamp.dtypes.layer_dtypes import errors_left_alone, restored_on_error
from tfamp.dtypes.rules import FOUND_RULES, HEADS, Rule
from tfamp.dtypes.settings import IN_FORCE, PolicySettings
from tfamp.keras_hooks import backend, calls, exact_values, structure, trainer, trials
from tfamp.keras_hooks.layers import Kind, keep, policy_of, update
from tfamp.keras_hooks.structure import Layer, layers_of, walk
from tfamp.records import checks
from tfamp.records.checks import kind_and_line
from tfamp.records.formats import HALF

# Calls of a model that are traced in search of its heads, where tracing fails.
MAX_TRACES = 3

_LOCK = threading.RLock()
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_met_under: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def before_call(layer: Layer, args: Any, kwargs: Any) -> None:
    """Does what is still open on a layer that is about to be called."""
    if policy_of(layer) is None and isinstance(layer, keras.Model):
        meet_unmanaged(layer)
    policy = policy_of(layer)
    if policy is None:
        return
    if not policy.is_decided:  # what it holds, too: `build` asks a recurrent cell
        for each in layers_of(layer):
            layer_dtypes.decide(each)
    is_outermost, is_real = not calls.in_call(), not trials.is_symbolic(args, kwargs)
    # Keras traces a layer's own `call` for shapes, with nothing around it.
    is_first = not (policy.is_resolved or backend.in_symbolic_scope())
    if is_first and is_outermost and is_real:
        resolve(layer, args, kwargs)
        if policy.settings.plan is None:
            trials.note_tried(layer, (args, kwargs))  # the trace for heads has tried it
    policy = policy_of(layer) or policy
    if is_real and trials.is_untried(layer, policy, (args, kwargs)):
        trials.trace_ahead(layer, args, kwargs)
    is_training = kwargs.get("training") is True and isinstance(layer, keras.Model)
    if policy.settings.open_rules and is_training and is_outermost:
        warn_of_open_rules(layer)


def resolve(model: Layer, args: Any = None, kwargs: Any = None) -> bool:
    """Settles all layers of a managed model and finds its heads.

    One that is no graph of layers needs the arguments of the call that is coming.
    Returns whether the model is settled for good.
    """
    with _LOCK:
        policy = policy_of(model)
        key = structure.graph_key(model)
        if policy is None or (policy.is_resolved and key in (None, policy.graph_key)):
            return True
        settings = policy.settings
        if policy.is_resolved:
            _release_heads(model, settings)
        if follow_plan(model, settings):
            return True
        gave = _given_by(model)
        # The trace below comes here again.
        update(model, is_resolved=True, graph_key=key)
        try:
            done = _resolve(model, settings, args, kwargs)
            if done or args is not None:  # layers may have been made by the trace
                done |= follow_plan(model, settings, must=trainer.is_compiled(model))
        except BaseException:
            update(model, is_resolved=False)
            raise
        update(model, is_resolved=done, graph_key=structure.graph_key(model))
        if _given_by(model) != gave:
            trials.try_around(model)
        return done


def _given_by(model: Layer) -> list[Any]:
    """Returns what the layers of a model are said to compute in, and to give."""
    policies = filter(None, map(policy_of, layers_of(model)))
    return [(each.present_name, each.output_dtype) for each in policies]


def follow_plan(model: Layer, settings: PolicySettings, *, must: bool = False) -> bool:
    """Lets a plan in force decide; a ValueError says the model `must` be its own."""
    plan = settings.plan
    return plan is not None and plan.follow(model, settings, must=must)


def _release_heads(model: Layer, settings: PolicySettings) -> None:
    """Undoes what was settled for layers that ended a Sequential model before."""
    released: set[int] = set()
    for _, layer, parent in walk(model):
        policy = policy_of(layer)
        if policy is not None and policy.settings is settings:
            is_inside = policy.kind is Kind.SUBLAYER and id(parent) in released
            if is_inside or policy.kind in (Kind.HEAD, Kind.WIDE_OUTPUT):
                released.add(id(layer))
                layer_dtypes.begin_again(layer, settings)


def _resolve(model: Layer, settings: PolicySettings, args: Any, kwargs: Any) -> bool:
    policy = policy_of(model)
    if policy is not None and policy.kind is Kind.OUTPUT_CAST:  # after a failed trace
        rule = f"policy {settings.policy.name}"
        update(model, kind=Kind.FOLLOWS, rule=rule, reason="", output_dtype=None)
    found, failure = heads.graph_heads(model), ""
    if found is None and args is not None:
        try:
            found = heads.traced_heads(model, args, kwargs)
        except Exception as error:  # the user's own code, which may do anything
            failure = kind_and_line(error)
    _settle_layers(model, settings)
    if found is None and not failure:
        return False
    if IN_FORCE.settings is not settings:
        warn_of_open_rules(model)
    if not settings.has_defaults:
        return True
    if found is None:  # it may also have been one bad call
        _failures[model] = _failures.get(model, 0) + 1
        is_final = _failures[model] >= MAX_TRACES
        told = (
            f"its `call` cannot be traced to find that layer ({failure}). Make the "
            "model a Functional one, or give its last layer dtype='float32'."
        )
        # Functional models inside have heads of their own in float32.
        parts = [part for part in structure.children(model) if part.weights]
        is_open = not parts or any(structure.graph_of(part) is None for part in parts)
        told = told if is_final and is_open else ""
        _cast_output(model, "its `call` cannot be traced", told)
        return is_final
    _keep_exact_operations(model, settings)
    of_graph = heads.graph_heads(model)
    if of_graph is not None:
        _narrow_around_tied_heads(model, of_graph, settings)
        heads.keep_heads(model, of_graph, settings)
    else:
        _keep_traced(model, found, settings, (args, kwargs))
    return True


def _settle_layers(model: Layer, settings: PolicySettings) -> None:
    """Asks all rules about all layers, whose paths are known now."""
    for path, layer, _ in list(walk(model)):
        policy = policy_of(layer)
        if policy is None or policy.settings is not settings:
            continue
        is_explicit = policy.kind is Kind.EXPLICIT
        for rule in settings.rules_of_user:
            is_known = rule.name in settings.matched and not is_explicit
            if is_known or not rule.matches(layer, path=path):
                continue
            settings.matched.add(rule.name)
            if is_explicit and layer.compute_dtype != "float32":
                warnings.warn(
                    f"Layer {path!r} matches {rule.name}, but was made with dtype="
                    f"{layer.dtype_policy.name!r}, which wins. Leave out the layer's "
                    "`dtype`, or the rule.",
                    UserWarning,
                    stacklevel=2,
                )
        layer_dtypes.decide(layer, path=path)


def _keep_traced(
    model: Layer, found: heads.Heads, settings: PolicySettings, given: tuple[Any, Any]
) -> None:
    """Keeps the heads of a model that is no graph, as far as its `call` allows it.

    The model's own operations follow where a small product of its own ends it.
    """

    def error_after(change: Callable[[], None]) -> str:
        """Makes a change for good if the model can be traced then."""
        try:
            # The heads are tried, not the layers.
            with restored_on_error(model), errors_left_alone():
                change()
                heads.traced_heads(model, *given)
        except Exception as error:
            return kind_and_line(error).rstrip(".")
        return ""

    def keep_heads() -> None:
        heads.keep_heads(model, found, settings)
        known = [policy_of(head) for head in found.heads]
        wide = (Kind.HEAD, Kind.WIDE_OUTPUT)
        if known and all(each and each.kind in wide for each in known):
            update(model, output_dtype="float32")

    def take_product() -> None:
        why = "its own product makes an output of the model, which feeds the loss"
        layer_dtypes.take(model, settings, Rule(HEADS, why, applies_to="own"))

    if error := error_after(keep_heads):
        told = f"with that layer in float32 its `call` raises {error}. Cast what is "
        told += "combined with it to one dtype, for example with `keras.ops.cast`."
        _cast_output(model, "a float32 head would break the model's `call`", told)
        return
    if found.is_complete:
        return
    factors = [product.inputs[1].shape for product in found.own_products]
    weights = [math.prod(size or 1 for size in factor) for factor in factors]
    policy = policy_of(model)
    if policy is not None and policy.applies_to == "own":  # by a rule
        update(model, output_dtype="float32")
    elif (
        not weights
        or max(weights) >= heads.MIN_LARGE_HEAD_WEIGHTS
        or error_after(take_product)
    ):
        _cast_output(model, "no layer could be named that makes the output")


def _narrow_around_tied_heads(
    model: Layer, found: heads.Heads, settings: PolicySettings
) -> None:
    """Has layers that use a head inside get half precision from it."""
    parts = {id(p) for head in found.heads for p in layers_of(head)}
    for layer in layers_of(model):
        is_graph = structure.graph_of(layer) is not None
        if is_graph or id(layer) in parts or policy_of(layer) is None:
            continue
        holds_a_head = any(id(each) in parts for each in structure.children(layer))
        if layer.compute_dtype in HALF and holds_a_head:
            update(layer, inner_dtype=settings.compute_dtype)


def _keep_exact_operations(model: Layer, settings: PolicySettings) -> None:
    """Has operations of graphs make whole numbers, such as ids, of exact values."""

    def keep_way_to(operation: Any, dtype: str) -> None:
        """Keeps an operation in float32, and those that its inputs come from."""
        rule = trials.EXACT, FOUND_RULES[trials.EXACT].reason
        if exact_values.keep(operation, dtype, *rule):
            for made in map(structure.producer, structure.tensors_of(operation)[0]):
                if made is not None and not isinstance(made[0], keras.layers.Layer):
                    keep_way_to(made[0], "float32")

    own = policy_of(model)
    # A graph tells the dtypes that it was built in.
    built_in = {*HALF, *(("float32",) if own and own.made_in == "float32" else ())}
    for _, operation in exact_values.operations_in(model):
        inputs, outputs = structure.tensors_of(operation)
        if any(x.dtype in built_in for x in inputs):
            reads = not any(backend.is_float_dtype(y.dtype) for y in outputs)
            if reads or any(map(trials.takes_ids, structure.users_of(operation))):
                keep_way_to(operation, settings.compute_dtype)


def _cast_output(model: Layer, because: str, told: str = "") -> None:
    """Casts a model's output to float32; `told` is logged."""
    policy = policy_of(model)
    if policy is not None and policy.is_kept:  # what it computes itself is float32
        update(model, output_dtype="float32")
    else:
        reason = f"{because}, so the output alone is cast to float32"
        keep(model, Kind.OUTPUT_CAST, HEADS, reason)
    if told:
        logging.warning(
            "The output of model %r is cast to float32, but its last layer stays in "
            "half precision: %s",
            *(model.name, told),
        )


def warn_of_open_rules(model: Layer) -> None:
    """Warns once of each rule of the user that matches none of the layers made so far.

    One `enable` may serve several models, so it is asked when the first of them trains.
    """
    settings = settings_of(model)
    if settings is None or not settings.open_rules:
        return
    try:
        made = [model, *settings.made]
    except RuntimeError:  # another thread makes layers; the next run asks again
        return
    rows = [(path, layer) for each in made for path, layer, _ in walk(each)]
    for rule in settings.open_rules:
        settings.matched.add(rule.name)
        try:
            is_matched = any(rule.matches(layer, path=path) for path, layer in rows)
        except RuntimeError:  # raised where that layer is called
            continue
        if not is_matched:
            message = unmatched_message(model, rule)
            if IN_FORCE.settings is settings:
                message += (
                    " Nor has any other layer been made that it matches: if it is for "
                    "a model to come, make that one first, or in a `tfamp.scope`."
                )
            warnings.warn(message, UserWarning, stacklevel=checks.level_of_user())
    settings.made.clear()


def unmatched_message(model: Layer, rule: Rule) -> str:
    """Words the complaint about a rule that keeps no layer of `model`."""
    paths = [path for path, layer, _ in walk(model) if layer is not model]
    example = max(paths, key=lambda path: path.count("/"), default=model.name)
    subject = rule.name.removeprefix("keep_float32: ")
    return (
        f"{'Pattern' if rule.pattern else 'Rule'} {subject} in `keep_float32` matches "
        f"none of the {len(paths)} layers of model {model.name!r}; paths look like "
        f"{example!r}. Print them with `print(tfamp.assignment(model))`."
    )


def meet_unmanaged(model: Layer) -> None:
    """Looks at a model that was not made under tfamp, once under each `enable`.

    One around managed layers is managed from here on; of another it is said that it
    computes as it was built.
    """
    if not count_as_met(model):
        return
    settings = settings_of(model)
    if settings is not None:
        layer_dtypes.begin(model, settings)
    elif IN_FORCE.settings is not None and IN_FORCE.settings.is_half:
        warnings.warn(
            f"Model {model.name!r} was built before `tfamp.enable`, so it computes in "
            f"{model.compute_dtype} as it was built. Call `tfamp.enable` before "
            "building the model, or convert it in place with `tfamp.apply(model)`. "
            f"{checks.see('lint#late-policy')}",
            UserWarning,
            stacklevel=4,
        )


def count_as_met(model: Layer) -> bool:
    """Counts a model as looked at under this `enable`; returns whether it was not."""
    number = IN_FORCE.settings.number if IN_FORCE.settings is not None else 0
    is_new = _met_under.get(model) != number
    _met_under[model] = number
    return is_new


def settings_of(model: Layer) -> PolicySettings | None:
    """Returns the settings of a model, or of the first managed layer in it."""
    found = (policy_of(layer) for _, layer, _ in walk(model))
    return next((each.settings for each in found if each is not None), None)
