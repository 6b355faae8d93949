"""Installs the hooks while they are needed and takes them back when they are not.

The hook where layers are made stands while tfamp is enabled. The others stand
while any managed layer lives: a model keeps its behaviour after `disable`.
"""

import contextlib
import threading
from collections.abc import Iterator
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
    saving,
    state,
    trainer,
)
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fitting import BEFORE_TRAINING, FIT_HOOKS
from tfamp.loss_scale.optimizer import CONFIG_HOOKS
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
        *configs.read_patches(keeping.is_in_force),
    ]
)


def _takes_care(care: Care) -> bool:
    return care.kind is not Kind.EXPLICIT and care.lease.has_defaults


def _before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    if SELF_TEST.is_due and (care := care_of(layer)) and care.lease.is_half:
        SELF_TEST.run()
    resolving.before_call(layer, args, kwargs)


def restore(model: keras.layers.Layer, entry: dict[str, Any]) -> None:
    """Gives a loaded `model` the dtypes of its file, and installs the hooks."""
    files.restore(model, entry)
    lease = resolving.care_lease(model)
    if lease is not None:
        hold(lease)


def unpickled(archive: Any) -> Any:
    """Loads a pickled model; pickles name this function."""
    entry = saving.read_entry(archive)
    if entry is None:
        raise ValueError(
            "The pickle names tfamp, but its archive holds no dtypes of layers. It was "
            "changed since; pickle the model again."
        )
    with loading(entry["policy"]):
        model = saving.unpickled(archive)
    restore(model, entry)
    return model


_RUNNING = HeldPatches(
    [
        *dtypes.patches(keeping.on_read),
        *calls.patches(_before_call, keeping.spread, dtype_errors.remedy),
        *nn.patches(_takes_care),
        *losses.patches(nn.CAREFUL),
        *trainer.patches(compiling.before_compile),
        *saving.patches(files.describe, unpickled),
        *configs.write_patches(keeping.inherited_policy),
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
    sets = (_MAKING, _RUNNING, WORKER_HOOKS, FIT_HOOKS, CONFIG_HOOKS)
    return tuple(name for patches in sets for name in patches.installed)


class _Load:
    """Holds the hooks that a file needs until it is read."""


@contextlib.contextmanager
def loading(policy: str) -> Iterator[None]:
    """Makes the layers of a saved model inside a `with` block, unmanaged.

    Under a mixed policy they are made in float32, whatever their configs say:
    Keras builds a loaded subclassed model by its `call` on float32 inputs, where
    half-precision sublayers would clash. `restore` sets the dtypes afterwards.
    """
    load = _Load()
    CONFIG_HOOKS.hold(load)
    before = state.present_policy()
    is_mixed = policy.startswith("mixed_")
    try:
        with IN_FORCE.block(lease=None, makes_float32=is_mixed):
            follow_enabled()
            keras.config.set_dtype_policy("float32" if is_mixed else policy)
            yield
    finally:
        follow_enabled()
        keeping.settle_thread(before)
