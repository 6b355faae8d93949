"""Assigns dtypes to single layers: who follows the policy, who stays in float32."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import keras

from tfamp.dtypes import in_force
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.rules import EXACT_INPUT_LAYERS, Rule
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import layers, saved_state, structure
from tfamp.keras_hooks.layers import (
    Kind,
    LayerRecord,
    drop_record,
    record_of,
    set_record,
    update_record,
)
from tfamp.records.formats import HALF


def inherited_policy(layer: keras.layers.Layer) -> str | None:
    """Returns the policy that a layer's dtypes came from, "" if they were passed."""
    record = record_of(layer)
    if record is None:
        return None
    return "" if record.kind is Kind.EXPLICIT else record.settings.policy.name


def on_created(layer: keras.layers.Layer, dtype: Any) -> None:
    """Assigns a dtype to a layer as it is made.

    Only rules that go by class and name can be asked: the rest of the layer's
    constructor has yet to run.
    """
    if isinstance(layer, keras.layers.InputLayer):
        return
    settings, loaded = IN_FORCE.settings, IN_FORCE.present.loaded
    if settings is None:
        makes_float32 = (loaded or "").startswith("mixed_")
        if makes_float32 and layer.dtype_policy.compute_dtype in HALF:
            set_policy(layer, keras.config.dtype_policy())
        return
    if dtype is settings.float32_policy:
        # A kept layer handed it to its sublayer.
        is_model = isinstance(layer, keras.Model)
        set_record(layer, LayerRecord(settings, is_resolved=not is_model))
        put_inside(layer, "a kept layer")
        return
    is_loaded = loaded is not None and layer.dtype_policy.name == loaded
    if is_loaded or in_force.is_in_force(saved_state.inherited_from(dtype) or ""):
        dtype = settings.policy
    present = layers.present_policy()
    given = present if dtype is None else dtype
    # A program that has always set this policy sets a policy object of its own.
    is_explicit = not (
        isinstance(given, keras.DTypePolicy) and given == settings.policy
    )
    if not is_explicit:
        set_policy(layer, settings.policy)
    elif given is present:
        in_force.warn_of_foreign_policy(present)
    begin(layer, settings, is_explicit=is_explicit)
    update_record(layer, made_in=settings.policy.name)


def on_quantized_read(layer: keras.layers.Layer) -> None:
    """Manages a quantized layer that inherited what it is quantized from."""
    settings = IN_FORCE.settings
    if settings is not None:
        set_policy(layer, settings.policy)
        begin(layer, settings, is_explicit=False)
        update_record(layer, made_in=settings.policy.name)


def begin(
    layer: keras.layers.Layer, settings: PolicySettings, *, is_explicit: bool
) -> None:
    """Gives `layer` its first record and asks the rules that can be asked early."""
    is_model = isinstance(layer, keras.Model)
    if is_explicit:
        record = LayerRecord(
            settings,
            Kind.EXPLICIT,
            rule="dtype argument",
            reason="the dtype passed to the layer wins",
        )
    else:
        exact = settings.has_defaults and isinstance(layer, EXACT_INPUT_LAYERS)
        record = LayerRecord(
            settings, rule=f"policy {settings.policy.name}", exact_inputs=exact
        )
    set_record(layer, record)
    update_record(layer, is_resolved=not is_model)
    if settings.open_rules:
        settings.made.add(layer)
    if not is_explicit and settings.is_half:
        _ask(layer, settings, early=True)


def begin_again(layer: keras.layers.Layer, settings: PolicySettings) -> None:
    """Puts a layer that exists already under `settings`.

    Quantized weights and integer lookups have dtypes of their own and are left.
    """
    before = record_of(layer)
    is_explicit = before is not None and before.kind is Kind.EXPLICIT
    is_float = layer.dtype_policy.compute_dtype in ("float32", "float64", *HALF)
    if layer.quantization_mode is not None or not is_float:
        return
    if not is_explicit:
        set_policy(layer, settings.policy)
    begin(layer, settings, is_explicit=is_explicit)
    if before is not None:
        wrapped = before.wrapped_optimizer
        update_record(layer, wrapped_optimizer=wrapped, made_in=before.made_in)


def _ask(
    layer: keras.layers.Layer,
    settings: PolicySettings,
    *,
    early: bool,
    path: str | None = None,
) -> None:
    """Asks the rules in turn and keeps `layer` where one matches."""
    if layer in settings.taken_back:
        return
    for rule in settings.rules.rules:
        if early and rule.needs_finished_layer:
            continue
        if rule.matches(layer, path=path, is_exact=rule.name in settings.exact):
            keep(layer, settings, rule)
            return


_ASKING = threading.local()  # `now` inside `on_read`, whose rules may read dtypes too


def on_read(layer: keras.layers.Layer) -> None:
    """Asks the rules that need the finished layer as soon as its dtype is read.

    The constructor may not have ended, so a rule that fails or says no is asked again
    at the first call.
    """
    record = record_of(layer)
    if (
        record is None
        or record.kind is not Kind.FOLLOWS
        or getattr(_ASKING, "now", False)
    ):
        return
    if not record.settings.is_half or layer in record.settings.taken_back:
        return
    _ASKING.now = True
    try:
        for rule in record.settings.rules.rules:
            if rule.needs_finished_layer and rule.matches(layer):
                keep(layer, record.settings, rule)
                return
    except (RuntimeError, TypeError):  # raised again at the first call, if it lasts
        return
    finally:
        _ASKING.now = False


def keep(layer: keras.layers.Layer, settings: PolicySettings, rule: Rule) -> None:
    """Keeps `layer` in float32: float32 inside, the policy's compute dtype out."""
    set_policy(layer, settings.float32_policy)
    update_record(
        layer,
        kind=Kind.FLOAT32_INSIDE,
        rule=rule.name,
        reason=rule.reason,
        output_dtype=settings.compute_dtype,
        exact_inputs=True,
        applies_to=rule.applies_to,
        inner_dtype="float32" if rule.applies_to == "own" else None,
        is_propagated=False,
    )


def set_policy(layer: keras.layers.Layer, policy: keras.DTypePolicy) -> None:
    """Sets the policy of one layer in place; its weights stay as they are.

    A quantized layer stays so: its policy is that of the quantization, from `policy`.
    """
    if layer.dtype_policy is policy:
        return
    if layer.quantization_mode is not None and policy.quantization_mode is None:
        mode = layer.dtype_policy.name.partition("_from_")[0]
        policy = keras.dtype_policies.get(f"{mode}_from_{policy.name}")
    layer.dtype_policy = policy
    graph = structure.graph_of(layer)
    if graph is not None and policy.compute_dtype == "float32":
        structure.widen_inputs(graph)
    if isinstance(layer, keras.layers.Normalization) and layer.built:
        structure.refresh_normalization(layer)


def decide(layer: keras.layers.Layer, *, path: str | None = None) -> None:
    """Asks the rules that need the finished layer, then spreads the answer."""
    record = record_of(layer)
    if record is None:
        return
    settings = record.settings
    if not record.is_decided or path is not None:
        if record.kind is Kind.FOLLOWS and settings.is_half:
            _ask(layer, settings, early=False, path=path)
        update_record(layer, is_decided=True)
    _follow_wrapped_layer(layer, settings)
    propagate_to_sublayers(layer)


def _follow_wrapped_layer(layer: keras.layers.Layer, settings: PolicySettings) -> None:
    """Keeps a `TimeDistributed` layer whose inner layer is kept.

    It runs the inner layer's `call` in its own autocast scope, so the inner
    layer's dtype counts for nothing.
    """
    if not isinstance(layer, keras.layers.TimeDistributed):
        return
    record, inner = record_of(layer), layer.layer
    decide(inner)
    inner_record = record_of(inner)
    if (
        record is not None
        and record.kind is Kind.FOLLOWS
        and inner_record is not None
        and inner_record.kind is Kind.FLOAT32_INSIDE
    ):
        rule = Rule(inner_record.rule, inner_record.reason)
        keep(layer, settings, rule)


def propagate_to_sublayers(layer: keras.layers.Layer) -> None:
    """Takes the sublayers of a kept layer into float32 with it."""
    record = record_of(layer)
    if record is None or record.is_propagated or not record.is_kept:
        return
    # Sublayers may yet be made by `build`; until then the answer is not final.
    update_record(layer, is_propagated=layer.built)
    if record.applies_to != "all":
        return
    for child in structure.children(layer):
        child_record = record_of(child)
        if child_record is None or child_record.kind is Kind.EXPLICIT:
            continue
        put_inside(child, layer.name)
        propagate_to_sublayers(child)


def put_inside(layer: keras.layers.Layer, outer_name: str) -> None:
    """Makes `layer` compute and return float32 as part of a kept layer."""
    record = record_of(layer)
    if record is None:
        return
    if layer.compute_dtype in HALF:
        set_policy(layer, record.settings.float32_policy)
    update_record(
        layer,
        kind=Kind.SUBLAYER,
        rule=f"inside {outer_name!r}",
        reason=f"the layer around it, {outer_name!r}, is kept in float32",
        output_dtype=None,
        applies_to="all",
        is_decided=True,
        is_propagated=False,
    )


def on_bidirectional_created(
    layer: keras.layers.Layer, given: keras.layers.Layer
) -> None:
    """Treats the two layers made from the given one as it was treated.

    They are made from its config, where an inherited dtype has become an explicit one.
    """
    record = record_of(given)
    for made in (layer.forward_layer, layer.backward_layer):
        if made is given or record is None or record_of(made) is None:
            continue
        if record.kind is not Kind.EXPLICIT:
            set_policy(made, given.dtype_policy)
            set_record(made, record)
            update_record(made, is_propagated=False)
            cell, given_cell = made.cell, given.cell
            if record_of(given_cell) is not None and record_of(cell) is not None:
                set_policy(cell, given_cell.dtype_policy)
                set_record(cell, record_of(given_cell))  # type: ignore[arg-type]
            propagate_to_sublayers(made)
    propagate_to_sublayers(layer)


def take_back_patterns(model: keras.layers.Layer, settings: PolicySettings) -> None:
    """Takes back what a pattern has kept that turns out to be another layer's name."""
    rows = [(path, layer) for path, layer, _ in structure.walk(model)]
    for rule in settings.rules.of_user:
        if any(rule.is_name_of(layer, path) for path, layer in rows):
            settings.exact.add(rule.name)
        if rule.name not in settings.exact:
            continue
        for path, kept in rows:
            record = record_of(kept)
            is_kept = record is not None and record.rule == rule.name
            if not is_kept or record.settings is not settings:  # type: ignore[union-attr]
                continue
            if rule.matches(kept, path=path, is_exact=True):
                continue
            for _, layer, _ in structure.walk(kept):
                inside = record_of(layer)
                if layer is kept or (inside and inside.kind is Kind.SUBLAYER):
                    begin_again(layer, settings)


class LayerDtypes(NamedTuple):
    """The dtypes that a layer has, with its record where it is managed."""

    layer: keras.layers.Layer
    policy: keras.DTypePolicy
    record: LayerRecord | None


def read(layers: Iterable[keras.layers.Layer]) -> list[LayerDtypes]:
    """Returns what some layers are, for `restore`."""
    return [LayerDtypes(each, each.dtype_policy, record_of(each)) for each in layers]


def restore(before: Iterable[LayerDtypes]) -> None:
    """Puts layers back to what `read` found."""
    for layer, policy, record in before:
        set_policy(layer, policy)
        if record is None:
            drop_record(layer)
        else:
            set_record(layer, record)


@contextlib.contextmanager
def restored_on_error(layers: Iterable[keras.layers.Layer]) -> Iterator[None]:
    """Puts the dtypes of layers back where the block fails."""
    before = read(layers)
    try:
        yield
    except BaseException:
        restore(before)
        raise
