"""Puts single layers under care: who follows the policy, who stays in float32."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import keras

from tfamp import rules as _rules
from tfamp._care import Care, Kind, care_of, change_care, set_care
from tfamp.keras_hooks import configs, state, structure
from tfamp.managed.in_force import IN_FORCE
from tfamp.managed.lease import HALF, Lease


@contextlib.contextmanager
def policy_in_force() -> Iterator[None]:
    """Has Keras's global policy be the one in force inside the block.

    `keras.utils.clear_session()` resets it, and a new thread starts without it. The
    thread that enabled tfamp keeps it; another one would not hear of `disable`.
    """
    lease = IN_FORCE.lease
    if lease is None or state.is_marked(lease):
        yield
        return
    before = state.present_policy()
    state.mark(lease, lease.policy)
    try:
        yield
    finally:
        if not IN_FORCE.owns_thread:
            state.unmark(before)


def settle_thread(before: keras.DTypePolicy | None) -> None:
    """Gives this thread the policy in force at the end of a block.

    Args:
        before: Keras's policy ahead of the block.
    """
    lease = IN_FORCE.lease
    if lease is not None and IN_FORCE.owns_thread:
        state.mark(lease, lease.policy)
    else:
        state.unmark(before)


def is_in_force(policy: str) -> bool:
    """States whether new layers come under the policy of this name."""
    lease = IN_FORCE.lease
    if lease is None:
        return False
    return policy in (lease.policy.name, IN_FORCE.present.loaded)


def inherited_policy(layer: keras.layers.Layer) -> str | None:
    """Returns the policy that a layer's dtypes came from, None if they were passed."""
    care = care_of(layer)
    if care is None or care.kind is Kind.EXPLICIT:
        return None
    return care.lease.policy.name


def on_created(layer: keras.layers.Layer, dtype: Any) -> None:
    """Puts a layer under care as it is made.

    Only rules that go by class and name can be asked: the rest of the layer's
    constructor has yet to run.
    """
    if isinstance(layer, keras.layers.InputLayer):
        return
    lease, loaded = IN_FORCE.lease, IN_FORCE.present.loaded
    if lease is None:
        makes_float32 = (loaded or "").startswith("mixed_")
        if makes_float32 and layer.dtype_policy.compute_dtype in HALF:
            set_policy(layer, keras.config.dtype_policy())
        return
    if dtype is lease.kept:
        _begin_inside(layer, lease)
        return
    is_loaded = loaded is not None and layer.dtype_policy.name == loaded
    if is_loaded or is_in_force(configs.inherited_from(dtype) or ""):
        set_policy(layer, lease.policy)
        dtype = None
    present = state.present_policy()
    is_explicit = dtype is not None and dtype is not present
    if not is_explicit and present is not lease.policy:
        _warn_of_foreign_policy(present)
        is_explicit = True
    begin(layer, lease, is_explicit=is_explicit)
    change_care(layer, made_in=lease.policy.name)


def on_quantized_read(layer: keras.layers.Layer) -> None:
    """Puts a quantized layer under care that inherited what it is quantized from."""
    lease = IN_FORCE.lease
    if lease is not None:
        set_policy(layer, lease.policy)
        begin(layer, lease, is_explicit=False)
        change_care(layer, made_in=lease.policy.name)


def begin(layer: keras.layers.Layer, lease: Lease, *, is_explicit: bool) -> None:
    """Gives `layer` its first care and asks the rules that can be asked early."""
    is_model = isinstance(layer, keras.Model)
    if is_explicit:
        care = Care(
            lease,
            Kind.EXPLICIT,
            rule="dtype argument",
            reason="the dtype passed to the layer wins",
        )
    else:
        exact = lease.has_defaults and isinstance(layer, _rules.EXACT_INPUT_LAYERS)
        care = Care(lease, rule=f"policy {lease.policy.name}", exact_inputs=exact)
    set_care(layer, care)
    change_care(layer, resolved=not is_model)
    if not is_explicit and lease.is_half:
        _ask(layer, lease, early=True)


def begin_again(layer: keras.layers.Layer, lease: Lease) -> None:
    """Puts a layer that exists already under the care of `lease`.

    Quantized weights and integer lookups have dtypes of their own and are left.
    """
    before = care_of(layer)
    is_explicit = before is not None and before.kind is Kind.EXPLICIT
    is_float = layer.dtype_policy.compute_dtype in ("float32", "float64", *HALF)
    if layer.quantization_mode is not None or not is_float:
        return
    if not is_explicit:
        set_policy(layer, lease.policy)
    begin(layer, lease, is_explicit=is_explicit)
    if before is not None:
        wrapped = before.wrapped_optimizer
        change_care(layer, wrapped_optimizer=wrapped, made_in=before.made_in)


def _begin_inside(layer: keras.layers.Layer, lease: Lease) -> None:
    """Starts a sublayer that a kept layer handed its own policy."""
    set_care(layer, Care(lease, resolved=not isinstance(layer, keras.Model)))
    put_inside(layer, "a kept layer")


def _ask(
    layer: keras.layers.Layer, lease: Lease, *, early: bool, path: str | None = None
) -> None:
    """Asks the rules in turn and keeps `layer` where one matches."""
    if layer in lease.taken_back:
        return
    for rule in lease.rules.rules:
        if early and rule.needs_finished_layer:
            continue
        if rule.matches(layer, path=path, is_exact=rule.name in lease.exact):
            keep(layer, lease, rule)
            return


class _Asking(threading.local):
    """Whether this thread is inside `on_read`, whose rules may read dtypes too."""

    now: bool = False


_asking = _Asking()


def on_read(layer: keras.layers.Layer) -> None:
    """Asks the rules that need the finished layer as soon as its dtype is read.

    The constructor may not have ended, so a rule that fails or says no is asked
    again at the first call.
    """
    care = care_of(layer)
    if care is None or care.kind is not Kind.FOLLOWS or _asking.now:
        return
    if not care.lease.is_half or layer in care.lease.taken_back:
        return
    _asking.now = True
    try:
        for rule in care.lease.rules.rules:
            if rule.needs_finished_layer and rule.matches(layer):
                keep(layer, care.lease, rule)
                return
    except (RuntimeError, TypeError):  # raised again at the first call, if it lasts
        return
    finally:
        _asking.now = False


def keep(layer: keras.layers.Layer, lease: Lease, rule: _rules.Rule) -> None:
    """Makes `layer` an island: float32 inside, the policy's compute dtype out."""
    set_policy(layer, lease.kept)
    change_care(
        layer,
        kind=Kind.ISLAND,
        rule=rule.name,
        reason=rule.reason,
        output_dtype=lease.compute_dtype,
        exact_inputs=True,
        reach=rule.reach,
        inner_dtype="float32" if rule.reach == "own" else None,
        spread=False,
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


def settle(layer: keras.layers.Layer, *, path: str | None = None) -> None:
    """Asks the rules that need the finished layer, then spreads the answer."""
    care = care_of(layer)
    if care is None:
        return
    lease = care.lease
    if not care.settled or path is not None:
        if care.kind is Kind.FOLLOWS and lease.is_half:
            _ask(layer, lease, early=False, path=path)
        change_care(layer, settled=True)
    _follow_wrapped_layer(layer, lease)
    spread(layer)


def _follow_wrapped_layer(layer: keras.layers.Layer, lease: Lease) -> None:
    """Keeps a `TimeDistributed` layer whose inner layer is kept.

    It runs the inner layer's `call` in its own autocast scope, so the inner
    layer's dtype counts for nothing.
    """
    if not isinstance(layer, keras.layers.TimeDistributed):
        return
    care, inner = care_of(layer), layer.layer
    settle(inner)
    inner_care = care_of(inner)
    if (
        care is not None
        and care.kind is Kind.FOLLOWS
        and inner_care is not None
        and inner_care.kind is Kind.ISLAND
    ):
        rule = _rules.Rule(inner_care.rule, inner_care.reason)
        keep(layer, lease, rule)


def spread(layer: keras.layers.Layer) -> None:
    """Takes the sublayers of a kept layer into float32 with it."""
    care = care_of(layer)
    if care is None or care.spread or not care.is_kept:
        return
    # Sublayers may yet be made by `build`; until then the answer is not final.
    change_care(layer, spread=layer.built)
    if care.reach != "all":
        return
    for child in structure.children(layer):
        child_care = care_of(child)
        if child_care is None or child_care.kind is Kind.EXPLICIT:
            continue
        put_inside(child, layer.name)
        spread(child)


def put_inside(layer: keras.layers.Layer, outer_name: str) -> None:
    """Makes `layer` compute and return float32 as part of a kept layer."""
    care = care_of(layer)
    if care is None:
        return
    if layer.compute_dtype in HALF:
        set_policy(layer, care.lease.kept)
    change_care(
        layer,
        kind=Kind.INSIDE,
        rule=f"inside {outer_name!r}",
        reason=f"the layer around it, {outer_name!r}, is kept in float32",
        output_dtype=None,
        reach="all",
        settled=True,
        spread=False,
    )


def on_recurrent_created(layer: keras.layers.Layer) -> None:
    """Takes the cell, which was made first, into float32 with its layer."""
    spread(layer)


def on_bidirectional_created(
    layer: keras.layers.Layer, given: keras.layers.Layer
) -> None:
    """Treats the two layers made from the given one as it was treated.

    They are made from its config, where an inherited dtype has become an
    explicit one.
    """
    care = care_of(given)
    for made in (layer.forward_layer, layer.backward_layer):
        if made is given or care is None or care_of(made) is None:
            continue
        if care.kind is not Kind.EXPLICIT:
            set_policy(made, given.dtype_policy)
            set_care(made, care)
            change_care(made, spread=False)
            cell, given_cell = made.cell, given.cell
            if care_of(given_cell) is not None and care_of(cell) is not None:
                set_policy(cell, given_cell.dtype_policy)
                set_care(cell, care_of(given_cell))  # type: ignore[arg-type]
            spread(made)
    spread(layer)


_warned_policies: set[str] = set()


def _warn_of_foreign_policy(policy: keras.DTypePolicy | None) -> None:
    name = "float32" if policy is None else policy.name
    if name in _warned_policies:
        return
    _warned_policies.add(name)
    warnings.warn(
        f"Keras's global policy was set to {name!r} by other code while tfamp was "
        "enabled, so new layers take it and tfamp's rules do not act on them. Call "
        "`tfamp.enable(...)` again, or use `tfamp.scope(...)` instead of "
        "`keras.config.set_dtype_policy`.",
        UserWarning,
        stacklevel=4,
    )


def forget_warnings() -> None:
    """Lets each warning be given once more, as after `enable`."""
    _warned_policies.clear()
