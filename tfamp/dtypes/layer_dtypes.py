"""Assigns dtypes to single layers: who follows the policy, who stays in float32."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfamp.dtypes import in_force
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.rules import EXACT_INPUT_LAYERS, Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import layers, saved_state, structure
from tfamp.keras_hooks.layers import GlobalPolicy, Kind, Policy, policy_of, update
from tfamp.records.formats import HALF


def inherited_policy(layer: keras.layers.Layer) -> str | None:
    """Returns the policy that a layer's dtypes came from, "" if they were passed."""
    policy = policy_of(layer)
    if policy is None:
        return None
    return "" if policy.kind is Kind.EXPLICIT else policy.settings.policy.name


def on_created(layer: keras.layers.Layer, dtype: Any) -> None:
    """Gives a layer its policy as it is made.

    Only rules that go by class and name can be asked: the rest of the layer's
    constructor has yet to run.
    """
    given = vars(layer)["_dtype_policy"]
    if isinstance(given, GlobalPolicy):
        given = vars(layer)["_dtype_policy"] = given.present
        dtype = None
    if isinstance(layer, keras.layers.InputLayer):
        return
    if isinstance(dtype, Policy):  # a layer handed its own to its sublayer
        _hand_on(layer, dtype)
        return
    settings, loaded = IN_FORCE.settings, IN_FORCE.present.loaded
    if settings is None:
        makes_float32 = (loaded or "").startswith("mixed_")
        if makes_float32 and given.compute_dtype in HALF:
            layers.put(layer, keras.config.dtype_policy())
        return
    name = settings.policy.name
    inherited = saved_state.inherited_from(dtype) if isinstance(dtype, dict) else None
    # A program that has always set this policy sets a policy object of its own.
    is_object = dtype is None or isinstance(dtype, keras.DTypePolicy)
    inherits = (
        (is_object and given.name == name)
        or given.name == loaded
        or in_force.is_in_force(inherited or "")
    )
    if not inherits and dtype is None:
        in_force.warn_of_foreign_policy(given)
    begin(layer, settings, is_explicit=not inherits)
    update(layer, made_in=name)


def _hand_on(layer: keras.layers.Layer, policy: Policy) -> None:
    begin(layer, policy.settings, is_explicit=policy.kind is Kind.EXPLICIT)
    update(layer, made_in=policy.made_in)
    if policy.is_kept and policy.applies_to == "all":
        put_inside(layer, "a kept layer")


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
    if is_explicit:
        policy = Policy(
            _name_of(layer),
            settings,
            kind=Kind.EXPLICIT,
            rule="dtype argument",
            reason="the dtype passed to the layer wins",
        )
    else:
        exact = settings.has_defaults and isinstance(layer, EXACT_INPUT_LAYERS)
        policy = Policy(settings.policy.name, settings, exact_inputs=exact)
    policy.is_resolved = not isinstance(layer, keras.Model)
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
    """Puts a layer that exists already under `settings`.

    Quantized weights and integer lookups have dtypes of their own and are left.
    """
    before = policy_of(layer)
    is_explicit = before is not None and before.kind is Kind.EXPLICIT
    is_float = layer.dtype_policy.compute_dtype in ("float32", "float64", *HALF)
    if layer.quantization_mode is not None or not is_float:
        return
    begin(layer, settings, is_explicit=is_explicit)
    if before is not None:
        wrapped = before.wrapped_optimizer
        update(layer, wrapped_optimizer=wrapped, made_in=before.made_in)


def decide(layer: keras.layers.Layer, *, path: str | None = None) -> None:
    """Asks the rules that need the finished layer, then spreads the answer."""
    policy = policy_of(layer)
    if policy is None:
        return
    if not policy.is_decided or path is not None:
        if policy.kind is Kind.FOLLOWS:
            policy.settings.ask(layer, is_finished=True, path=path)
        policy.is_decided = True
    _follow_wrapped_layer(layer, policy)
    propagate_to_sublayers(layer)


def _follow_wrapped_layer(layer: keras.layers.Layer, policy: Policy) -> None:
    """Keeps a `TimeDistributed` layer whose inner layer is kept.

    It runs the inner layer's `call` in its own autocast scope, so the inner
    layer's dtype counts for nothing.
    """
    if not isinstance(layer, keras.layers.TimeDistributed):
        return
    decide(layer.layer)
    inner = policy_of(layer.layer)
    if (
        policy.kind is Kind.FOLLOWS
        and inner is not None
        and inner.kind is Kind.FLOAT32_INSIDE
    ):
        policy.settings.keep(layer, Rule(inner.rule, inner.reason))


def propagate_to_sublayers(layer: keras.layers.Layer) -> None:
    """Takes the sublayers of a kept layer into float32 with it."""
    policy = policy_of(layer)
    if policy is None or policy.is_propagated or not policy.is_kept:
        return
    # Sublayers may yet be made by `build`; until then the answer is not final.
    policy.is_propagated = layer.built
    if policy.applies_to != "all":
        return
    for child in structure.children(layer):
        inner = policy_of(child)
        if inner is None or inner.kind is Kind.EXPLICIT:
            continue
        put_inside(child, layer.name)
        propagate_to_sublayers(child)


def put_inside(layer: keras.layers.Layer, outer_name: str) -> None:
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


def take_back_patterns(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Takes back what a pattern has kept that turns out to be another layer's name."""
    rows = [(path, layer) for path, layer, _ in structure.walk(model)]
    for rule in settings.rules.of_user:
        if any(rule.is_name_of(layer, path) for path, layer in rows):
            settings.exact.add(rule.name)
        if rule.name not in settings.exact:
            continue
        for path, kept in rows:
            policy = policy_of(kept)
            if policy is None or policy.settings is not settings:
                continue
            if policy.rule != rule.name:
                continue
            if rule.matches(kept, path=path, is_exact=True):
                continue
            for _, layer, _ in structure.walk(kept):
                inside = policy_of(layer)
                if layer is kept or (inside and inside.kind is Kind.SUBLAYER):
                    begin_again(layer, settings)


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
