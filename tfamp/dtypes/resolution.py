"""Settles a whole model once, before its first use: rules by path, and heads."""

import contextlib
import math
import threading
import warnings
import weakref
from typing import Any

import keras
from absl import logging

from tfamp.dtypes import heads, layer_dtypes
from tfamp.dtypes.rules import EXACT_RULE, Rule
from tfamp.dtypes.settings import IN_FORCE, PolicySettings
from tfamp.keras_hooks import backend, calls, exact_values, structure, trainer, trials
from tfamp.keras_hooks.layers import Kind, policy_of, update
from tfamp.records import checks
from tfamp.records.checks import kind_and_line
from tfamp.records.formats import HALF

# Calls of a model that are traced in search of its heads, where tracing fails.
MAX_TRACES = 3

_LOCK = threading.RLock()
_failures: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_met_under: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    """Does what is still open on a layer that is about to be called."""
    if policy_of(layer) is None and isinstance(layer, keras.Model):
        meet_unmanaged(layer)
    policy = policy_of(layer)
    if policy is None:
        return
    if not policy.is_decided:
        layer_dtypes.decide(layer)
    is_outermost, is_real = not calls.in_call(), not trials.is_symbolic(args, kwargs)
    # Keras traces a layer's own `call` for shapes, with nothing around it.
    is_first = not (policy.is_resolved or backend.in_symbolic_scope())
    if is_first and is_outermost and is_real:
        resolve(layer, args, kwargs)
        if policy.settings.plan is None:
            trials.note_tried(layer, kwargs)  # the trace for heads has tried it
    if is_real and trials.is_untried(layer, policy_of(layer) or policy, kwargs):
        trials.trace_ahead(layer, args, kwargs)
    is_training = kwargs.get("training") is True and isinstance(layer, keras.Model)
    if policy.settings.open_rules and is_training and is_outermost:
        warn_of_open_rules(layer)


def resolve(model: keras.layers.Layer, args: Any = None, kwargs: Any = None) -> bool:
    """Settles all layers of a managed model and finds its heads.

    One that is no graph of layers needs the arguments of the call that is coming.
    Returns whether the model is settled for good.
    """
    with _LOCK:
        policy = policy_of(model)
        if policy is None:
            return True
        key = structure.graph_key(model)
        if policy.is_resolved and key in (None, policy.graph_key):
            return True
        settings = policy.settings
        if policy.is_resolved:
            _start_again(model, settings)
        if follow_plan(model, settings):
            return True
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
        return done


def follow_plan(
    model: keras.layers.Layer, settings: PolicySettings, *, must: bool = False
) -> bool:
    """Lets a plan in force decide; a ValueError says the model `must` be its own."""
    plan = settings.plan
    return plan is not None and plan.follow(model, settings, must=must)


def _start_again(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Undoes what was settled for layers that a Sequential model had before.

    What a rule decided that a loaded model's user wrote in another process stays.
    """
    known = {rule.name for rule in settings.rules}
    left: set[int] = set()
    for _, layer, parent in structure.walk(model):
        policy = policy_of(layer)
        if policy is None or policy.settings is not settings:
            continue
        is_unknown = policy.kind is Kind.FLOAT32_INSIDE and policy.rule not in known
        if is_unknown or (policy.kind is Kind.SUBLAYER and id(parent) in left):
            left.add(id(layer))
        else:
            layer_dtypes.begin_again(layer, settings)


def _resolve(
    model: keras.layers.Layer, settings: PolicySettings, args: Any, kwargs: Any
) -> bool:
    policy = policy_of(model)
    if policy is not None and policy.kind is Kind.OUTPUT_CAST:  # after a failed trace
        rule = f"policy {settings.policy.name}"
        update(model, kind=Kind.FOLLOWS, rule=rule, reason="", output_dtype=None)
    found = heads.graph_heads(model)
    failure: Exception | None = None
    if found is None and args is not None:
        try:
            found = heads.traced_heads(model, args, kwargs)
        except Exception as error:  # the user's own code, which may do anything
            failure = error
    _settle_layers(model, settings)
    if found is None and failure is None:
        return False
    if IN_FORCE.settings is not settings:
        warn_of_open_rules(model)
    if not settings.has_defaults:
        return True
    if found is None:
        return failure is not None and _give_up(model, failure)
    _keep_exact_operations(model, settings)
    of_graph = heads.graph_heads(model)
    if of_graph is not None:
        _narrow_around_tied_heads(model, of_graph, settings)
        heads.keep_heads(model, of_graph, settings)
    else:
        _keep_traced(model, found, settings, args, kwargs)
    return True


def _keep_traced(
    model: keras.layers.Layer,
    found: heads.Heads,
    settings: PolicySettings,
    args: Any,
    kwargs: Any,
) -> None:
    """Keeps the heads of a model that is no graph, as far as its `call` allows it."""
    before = heads.keep_heads(model, found, settings)
    of_heads = [policy_of(head) for head in found.heads]
    wide = (Kind.HEAD, Kind.WIDE_OUTPUT)
    if of_heads and all(each and each.kind in wide for each in of_heads):
        update(model, output_dtype="float32")
    try:
        with layer_dtypes.errors_left_alone():  # the heads are tried, not the layers
            heads.traced_heads(model, args, kwargs)
    except Exception as error:
        before.put_back()
        _cast_output(model, "a float32 head would break the model's `call`")
        _say_cast(
            model,
            f"with that layer in float32 its `call` raises {kind_and_line(error)}. "
            "Cast what is combined with it to one dtype, for example with "
            "`keras.ops.cast`.",
        )
        return
    if not (found.is_complete or _take_product(model, found, settings, args, kwargs)):
        _cast_output(model, "no layer could be named that makes the output")


def _take_product(
    model: keras.layers.Layer,
    found: heads.Heads,
    settings: PolicySettings,
    args: Any,
    kwargs: Any,
) -> bool:
    """Takes a model's own operations into float32 where a product of its own ends it.

    Returns whether they are: not where the product is large, or the call raises then.
    """
    policy = policy_of(model)
    if policy is not None and policy.applies_to == "own":  # by a rule
        update(model, output_dtype="float32")
        return True
    factors = [product.inputs[1].shape for product in found.own_products]
    weights = [math.prod(size or 1 for size in factor) for factor in factors]
    if not weights or max(weights) >= heads.MIN_LARGE_HEAD_WEIGHTS:
        return False
    why = "its own product makes an output of the model, which feeds the loss"
    layers = structure.layers_of(model)
    with contextlib.suppress(Exception), layer_dtypes.restored_on_error(layers):
        rule = Rule(heads.RULE, why, applies_to="own")
        layer_dtypes.take(model, settings, rule)
        heads.traced_heads(model, args, kwargs)
        return True
    return False


def _narrow_around_tied_heads(
    model: keras.layers.Layer, found: heads.Heads, settings: PolicySettings
) -> None:
    """Has layers that use a head inside get half precision from it."""
    parts = {id(p) for head in found.heads for p in structure.layers_of(head)}
    for layer in structure.layers_of(model):
        is_graph = structure.graph_of(layer) is not None
        if is_graph or id(layer) in parts or policy_of(layer) is None:
            continue
        holds_a_head = any(id(each) in parts for each in structure.children(layer))
        if layer.compute_dtype in HALF and holds_a_head:
            update(layer, inner_dtype=settings.compute_dtype)


def _keep_exact_operations(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Has operations of graphs make whole numbers, such as ids, of exact values."""
    for _, operation in exact_values.operations_in(model):
        inputs, outputs = structure.tensors_of(operation)
        if any(x.dtype in HALF for x in inputs):
            reads = not any(backend.is_float_dtype(y.dtype) for y in outputs)
            if reads or any(map(_takes_ids, structure.users_of(operation))):
                _keep_way_to(operation, settings.compute_dtype)


def _takes_ids(operation: Any) -> bool:
    policy = policy_of(operation)
    return policy is not None and trials.takes_ids(operation, policy)


def _keep_way_to(operation: Any, dtype: str) -> None:
    """Keeps an operation in float32, and the operations that its inputs come from."""
    if not exact_values.keep(operation, dtype, EXACT_RULE.name, EXACT_RULE.reason):
        return
    for tensor in structure.tensors_of(operation)[0]:
        made = structure.producer(tensor)
        if made is not None and not isinstance(made[0], keras.layers.Layer):
            _keep_way_to(made[0], "float32")


def _give_up(model: keras.layers.Layer, failure: Exception) -> bool:
    """Casts the output of a model whose `call` cannot be traced, only run.

    The failure may also be that of one bad call. Returns whether enough were tried.
    """
    _failures[model] = _failures.get(model, 0) + 1
    _cast_output(model, "its `call` cannot be traced")
    is_final = _failures[model] >= MAX_TRACES
    if is_final:
        _say_cast(
            model,
            "its `call` cannot be traced to find that layer "
            f"({kind_and_line(failure)}). Make the model a Functional one, or give "
            "its last layer dtype='float32'.",
        )
    return is_final


def _say_cast(model: keras.layers.Layer, why: str) -> None:
    logging.warning(
        "The output of model %r is cast to float32, but its last layer stays in half "
        "precision: %s",
        model.name,
        why,
    )


def _cast_output(model: keras.layers.Layer, because: str) -> None:
    policy = policy_of(model)
    if policy is not None and policy.is_kept:  # what it computes itself is float32
        update(model, output_dtype="float32")
        return
    update(
        model,
        kind=Kind.OUTPUT_CAST,
        rule=heads.RULE,
        reason=f"{because}, so the output alone is cast to float32",
        output_dtype="float32",
    )


def _settle_layers(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Asks all rules about all layers, whose paths are known now."""
    rows = [(path, layer) for path, layer, _ in structure.walk(model)]
    for rule in settings.rules_of_user:
        if any(rule.is_name_of(layer, path) for path, layer in rows):
            settings.exact.add(rule.name)
    for path, layer in rows:
        policy = policy_of(layer)
        if policy is None or policy.settings is not settings:
            continue
        _note_user_rules(layer, path, settings)
        layer_dtypes.decide(layer, path=path)


def _note_user_rules(
    layer: keras.layers.Layer, path: str, settings: PolicySettings
) -> None:
    policy = policy_of(layer)
    is_explicit = policy is not None and policy.kind is Kind.EXPLICIT
    for rule in settings.rules_of_user:
        if rule.name in settings.matched and not is_explicit:
            continue
        if not settings.matches(rule, layer, path):
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


def warn_of_open_rules(model: keras.layers.Layer) -> None:
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
    rows = [(path, layer) for each in made for path, layer, _ in structure.walk(each)]
    for rule in settings.open_rules:
        settings.matched.add(rule.name)
        if not any(_matches(rule, layer, path) for path, layer in rows):
            message = unmatched_message(model, rule)
            if IN_FORCE.settings is settings:
                message += (
                    " Nor has any other layer been made that it matches: if it is for "
                    "a model to come, make that one first, or in a `tfamp.scope`."
                )
            warnings.warn(message, UserWarning, stacklevel=checks.level_of_user())
    settings.made.clear()


def _matches(rule: Rule, layer: keras.layers.Layer, path: str) -> bool:
    try:
        return rule.matches(layer, path=path)
    except RuntimeError:  # raised where that layer is called
        return True


def unmatched_message(model: keras.layers.Layer, rule: Rule) -> str:
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
    """Looks at a model that was not made under tfamp, once under each `enable`.

    One around managed layers is managed from here on; of another it is said that it
    computes as it was built.
    """
    if not count_as_met(model):
        return
    settings = settings_of(model)
    if settings is not None:
        layer_dtypes.begin(model, settings, is_explicit=False)
    elif IN_FORCE.settings is not None and IN_FORCE.settings.is_half:
        warnings.warn(
            f"Model {model.name!r} was built before `tfamp.enable`, so it computes in "
            f"{model.compute_dtype} as it was built. Call `tfamp.enable` before "
            "building the model, or convert it in place with `tfamp.apply(model)`. "
            f"{checks.see('lint#late-policy')}",
            UserWarning,
            stacklevel=4,
        )


def count_as_met(model: keras.layers.Layer) -> bool:
    """Counts a model as looked at under this `enable`; returns whether it was not."""
    number = IN_FORCE.settings.number if IN_FORCE.settings is not None else 0
    is_new = _met_under.get(model) != number
    _met_under[model] = number
    return is_new


def computes_in(model: keras.layers.Layer, dtype: str) -> bool:
    """Returns whether any layer of `model` computes in `dtype`."""
    layers = structure.layers_of(model)
    # A graph of layers computes nothing itself.
    own = layers if structure.graph_of(model) is None else layers[1:]
    return any(layer.compute_dtype == dtype for layer in own)


def settings_of(model: keras.layers.Layer) -> PolicySettings | None:
    """Returns the settings of a model, or of the first managed layer in it."""
    found = (policy_of(layer) for _, layer, _ in structure.walk(model))
    return next((each.settings for each in found if each is not None), None)
