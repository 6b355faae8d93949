"""Installs the hooks while they are needed and takes them back when they are not.

The hook where layers are made stands while tfamp is enabled. The others stand
while any managed layer lives: a model keeps its behaviour after `disable`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp import _amx
from tfamp._care import Care, Kind, care_of
from tfamp._patch import HeldPatches, PatchSet
from tfamp.keras_hooks import (
    calls,
    configs,
    dtypes,
    layers,
    losses,
    nn,
    regularizers,
    saving,
    state,
    trainer,
)
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.companion import PLAIN_HOOKS
from tfamp.loss_scale.fitting import BEFORE_TRAINING, FIT_HOOKS
from tfamp.loss_scale.optimizer import CONFIG_HOOKS
from tfamp.loss_scale.tape import TAPE_HOOKS
from tfamp.managed import compiling, dtype_errors, files, keeping, resolving
from tfamp.managed.in_force import IN_FORCE
from tfamp.managed.lease import Lease
from tfamp.managed.self_test import SelfTest

_MAKING = PatchSet(
    [
        *layers.patches(
            keeping.policy_in_force,
            keeping.on_created,
            keeping.on_recurrent_created,
            keeping.on_bidirectional_created,
        ),
        *configs.read_patches(keeping.is_in_force, keeping.on_quantized_read),
    ]
)


def _takes_care(care: Care) -> bool:
    return care.kind is not Kind.EXPLICIT and care.lease.has_defaults


def _before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    if SELF_TEST.is_due and (care := care_of(layer)) and care.lease.is_half:
        SELF_TEST.run()
    resolving.before_call(layer, args, kwargs)


def load(entry: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Returns a saved model with the dtypes of its file.

    Under a mixed policy its layers are made in float32 at first, whatever their configs
    say: Keras builds a loaded subclassed model by its `call` on float32 inputs, where
    half-precision sublayers would clash. Where a constructor wires a graph, they are
    made as they were.

    Args:
        entry: What was stored for it.
        make: Makes the model as Keras does.

    Raises:
        ValueError: The file was written by a newer tfamp, or describes another model.
    """
    files.check_schema(entry)
    with _making(files.lease_to_make(entry), entry["policy"]):
        model = make()
    files.restore(model, entry)
    lease = resolving.care_lease(model)
    if lease is not None:
        hold(lease)
    return model


def load_unmanaged(make: Callable[[], Any]) -> Any:
    """Returns a saved model that has no dtypes of tfamp, with the optimizer it had."""
    load = _Load()
    CONFIG_HOOKS.hold(load)
    return make()


def unpickled(archive: Any) -> Any:
    """Loads a pickled model; pickles name this function."""
    entry = saving.read_entry(archive)
    if entry is None:
        raise ValueError(
            "The pickle names tfamp, but its archive holds no dtypes of layers. It was "
            "changed since; pickle the model again."
        )
    return load(entry, lambda: saving.unpickled(archive))


def _load_for_keras(entry: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Returns what Keras's own `load_model` gives while tfamp is enabled."""
    present = IN_FORCE.present
    is_ours = present.lease is not None and present.loaded is None
    return load(entry, make) if is_ours else make()


class _Load:
    """Holds the hooks that a file needs until it is read."""


@contextlib.contextmanager
def _making(lease: Lease | None, policy: str) -> Iterator[None]:
    """Makes layers in a `with` block under a lease, or unmanaged where it is None."""
    load = _Load()
    CONFIG_HOOKS.hold(load)
    before = state.present_policy()
    in_float32 = policy.startswith("mixed_")
    try:
        with IN_FORCE.block(lease=lease, loaded=policy):
            follow_enabled()
            if lease is None:
                keras.config.set_dtype_policy("float32" if in_float32 else policy)
            else:
                state.mark(lease, lease.policy)
            yield
    finally:
        follow_enabled()
        keeping.settle_thread(before)


_RUNNING = HeldPatches(
    [
        *dtypes.patches(keeping.on_read),
        *calls.patches(_before_call, keeping.spread, dtype_errors.remedy),
        *regularizers.patches(),
        *nn.patches(_takes_care),
        *losses.patches(nn.CAREFUL),
        *trainer.patches(compiling.before_compile),
        *saving.patches(files.describe, unpickled, _load_for_keras),
        *configs.write_patches(keeping.inherited_policy),
        *configs.build_patches(),
    ]
)

BEFORE_TRAINING.append(compiling.before_training)

_LOCK = threading.RLock()


def hold(lease: Lease) -> None:
    """Keeps the hooks on calls and runs installed for as long as `lease` lives."""
    _hold(lease)
    SELF_TEST.run_if_started(lease)


def _hold(lease: Lease) -> None:
    if lease.is_half:
        _amx.avoid()
    _RUNNING.hold(lease)
    FIT_HOOKS.hold(lease)
    TAPE_HOOKS.hold(lease)
    PLAIN_HOOKS.hold(lease)
    WORKER_HOOKS.hold(lease)
    CONFIG_HOOKS.hold(lease)


def follow_enabled() -> None:
    """Installs or removes the hook where layers are made, as enabled or not."""
    with _LOCK:
        if IN_FORCE.lease is not None:
            _hold(IN_FORCE.lease)
        if IN_FORCE.is_used:
            _MAKING.install()
        else:
            _MAKING.remove()
    if IN_FORCE.lease is not None:
        SELF_TEST.run_if_started(IN_FORCE.lease)


SELF_TEST = SelfTest(follow_enabled)


def installed() -> tuple[str, ...]:
    """Returns the names of everything in Keras that is replaced now."""
    running = (_RUNNING, WORKER_HOOKS, FIT_HOOKS, TAPE_HOOKS, PLAIN_HOOKS, CONFIG_HOOKS)
    sets = (_MAKING, *running)
    return tuple(name for patches in sets for name in patches.installed)
