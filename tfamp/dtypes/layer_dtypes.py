"""Gives single layers their dtypes: who follows the policy, who stays in float32."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfamp.dtypes.rules import EXACT_INPUTS, MOVES, Rule
from tfamp.dtypes.settings import IN_FORCE, PolicySettings
from tfamp.keras_hooks import calls, layers, saved_state, structure
from tfamp.keras_hooks.in_force import GlobalPolicy
from tfamp.keras_hooks.layers import CALLS, Kind, Policy, policy_of, update
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper
from tfamp.keras_hooks.structure import Layer
from tfamp.records.formats import HALF

_INT8 = Rule(
    "default: int8",
    "beside its integers a layer in int8 computes in float32 or bfloat16 alone",
)


def on_created(layer: Layer, dtype: Any) -> None:
    """Gives a layer its policy as it is made; its constructor goes on."""
    given = vars(layer)["_dtype_policy"]
    if isinstance(given, GlobalPolicy):
        given = vars(layer)["_dtype_policy"] = given.present
        dtype = None
    if isinstance(layer, keras.layers.InputLayer):
        return
    if isinstance(dtype, Policy):  # a layer handed its own to its sublayer
        is_explicit = dtype.kind is Kind.EXPLICIT
        begin(layer, dtype.settings, is_explicit=is_explicit, made_in=dtype.made_in)
        if dtype.name == "float32" and dtype.is_kept and dtype.applies_to == "all":
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
    around = CALLS.stack[-1] if CALLS.stack else None
    if around is not None and inherits:
        made = update(layer, made_in_call=True)
        if around.is_kept and around.applies_to == "all" and made.kind is Kind.FOLLOWS:
            _put_inside(layer, "a kept layer")


def begin(
    layer: Layer,
    settings: PolicySettings,
    *,
    is_explicit: bool = False,
    made_in: str | None = None,
) -> None:
    """Gives `layer` a policy of its own, which asks the rules when it is read."""
    name, is_model = settings.policy.name, isinstance(layer, keras.Model)
    decided: dict[str, Any] = {"is_resolved": not is_model, "made_in": made_in or name}
    if is_explicit:
        name, decided["kind"] = _name_of(layer), Kind.EXPLICIT
        decided["rule"] = "dtype argument"
        decided["reason"] = "the dtype passed to the layer wins"
    elif settings.has_defaults:
        moves = isinstance(layer, MOVES)
        decided["exact_inputs"] = moves or isinstance(layer, EXACT_INPUTS)
        decided["output_dtype"] = settings.compute_dtype if moves else None
    if settings.open_rules:
        settings.made.add(layer)
    policy = Policy(name, settings, **decided)
    if is_explicit:
        policy.bind(layer)
    else:
        layers.put(layer, policy)


def _name_of(layer: Layer) -> str:
    """Returns the name of a stock policy like that of a layer."""
    given = vars(layer)["_dtype_policy"]
    if isinstance(given, Policy):
        return given.given_name
    if type(given) in (keras.DTypePolicy, keras.dtype_policies.FloatDTypePolicy):
        return str(given.name)
    return str(layer.compute_dtype)  # it keeps its own, of a quantization or a map


def begin_again(layer: Layer, settings: PolicySettings) -> None:
    """Puts a layer that exists already under `settings`; quantized ones are left."""
    before = policy_of(layer)
    is_float = layer.dtype_policy.compute_dtype in ("float32", "float64", *HALF)
    if layer.quantization_mode is None and is_float:
        is_explicit = before is not None and before.kind is Kind.EXPLICIT
        made_in = "float32" if before is None else before.made_in
        begin(layer, settings, is_explicit=is_explicit, made_in=made_in)


def decide(layer: Layer, *, path: str | None = None) -> None:
    """Asks the rules that need the finished layer, then spreads the answer."""
    policy = policy_of(layer)
    if policy is None:
        return
    if not policy.is_decided or path is not None:
        if policy.kind is Kind.FOLLOWS:
            policy.settings.ask(layer, path)
        policy.is_decided = True
    # Its inner layer's `call` runs in its own autocast scope.
    if isinstance(layer, keras.layers.TimeDistributed):
        decide(layer.layer)
        inner = policy_of(layer.layer)
        if policy.kind is Kind.FOLLOWS and inner and inner.kind is Kind.FLOAT32_INSIDE:
            policy.settings.keep(layer, Rule(inner.rule, inner.reason))
    propagate_to_sublayers(layer)


def propagate_to_sublayers(layer: Layer) -> None:
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


def _put_inside(layer: Layer, outer_name: str) -> None:
    """Makes `layer` compute and return float32 as part of a kept layer."""
    reason = f"the layer around it, {outer_name!r}, is kept in float32"
    layers.keep(layer, Kind.SUBLAYER, f"inside {outer_name!r}", reason)


def take(layer: Layer, settings: PolicySettings, rule: Rule) -> None:
    """Takes a layer into float32 for good; `rule.applies_to` says whether alone."""
    settings.keep(layer, rule)
    if isinstance(layer, keras.Model) and not calls.in_call():
        update(layer, output_dtype="float32")  # a model's output is a head


class Before:
    """What some layers were, for `put_back`."""

    def __init__(self, of: Iterable[Layer]) -> None:
        self._layers = [(layer, layers.snapshot(layer)) for layer in of]

    def put_back(self) -> None:
        """Puts the layers back to what they were."""
        for layer, before in self._layers:
            layers.put_back(layer, before)


@contextlib.contextmanager
def restored_on_error(model: Layer) -> Iterator[None]:
    """Puts the dtypes of a model's layers back where the block fails."""
    before = Before(structure.layers_of(model))
    try:
        yield
    except BaseException:
        before.put_back()
        raise


@wrapper
def _check_mode(original: Function, self: Layer, mode: str, dtype: str) -> None:
    if (mode, dtype) == ("int8", "float16"):
        policy = policy_of(self)
        # Since Keras 3.16 there is one method for all.
        geometry = getattr(self, "_quantization_geometry", lambda: None)
        is_own = type(self).quantize not in (Layer.quantize, keras.Model.quantize)
        if geometry() is None and not is_own:
            dtype = "float32"  # it has no integers of its own
        elif policy is not None and policy.kind is not Kind.EXPLICIT:
            take(self, policy.settings, _INT8)
            dtype = "float32"
    original(self, mode, dtype)


def patches() -> list[Patch]:
    """Returns the patch by which layers in float16 are quantized to int8, too.

    Relies on: a layer's `quantize` asking `_check_quantize_args` first, and layers that
    can be quantized having a method of their own or a `_quantization_geometry`.
    """
    return [Patch(Layer, "_check_quantize_args", _check_mode)]


def errors_left_alone() -> contextlib.AbstractContextManager[None]:
    """Lets errors of calls in the block be what they are."""
    return replaced(CALLS, may_keep=False)
