"""Installs the hooks while they are needed and takes them back when they are not.

The hook where layers are made stands while tfamp is enabled. The others stand
while any managed layer lives: a model keeps its behaviour after `disable`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfamp.dtypes import (
    compile_hooks,
    in_force,
    layer_dtypes,
    model_dtypes,
    own_operations,
    resolution,
)
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.self_test import SelfTest
from tfamp.dtypes.settings import PolicySettings
from tfamp.keras_hooks import (
    calls,
    exact_values,
    float32_operations,
    half_kernels,
    layers,
    saved_state,
    trainer,
)
from tfamp.keras_hooks.layers import CALLS, Kind, record_of
from tfamp.keras_hooks.patches import HeldPatches, PatchSet
from tfamp.keras_hooks.replicas import warn_of_idle_distribution
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fit_hooks import BEFORE_RUN, BEFORE_TRAINING, FIT_HOOKS
from tfamp.loss_scale.loops import LOOP_HOOKS
from tfamp.loss_scale.optimizer import CONFIG_HOOKS
from tfamp.loss_scale.tape import TAPE_HOOKS
from tfamp.machine import cpus

_MAKING = PatchSet(
    [
        *layers.patches(
            in_force.policy_in_force,
            layer_dtypes.on_created,
            layer_dtypes.propagate_to_sublayers,
            layer_dtypes.on_bidirectional_created,
        ),
        *saved_state.read_patches(in_force.is_in_force, layer_dtypes.on_quantized_read),
    ]
)


def _stays_float32() -> bool | None:
    """Returns what `float32_operations` asks of the layer that computes now."""
    record = CALLS.stack[-1] if CALLS.stack else None
    if (
        record is None
        or record.kind is Kind.EXPLICIT
        or not record.settings.has_defaults
    ):
        return None
    return record.kind is Kind.WIDE_OUTPUT


def _is_managed(layer: keras.layers.Layer) -> bool:
    return record_of(layer) is not None


def _before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    if SELF_TEST.is_due and (record := record_of(layer)) and record.settings.is_half:
        SELF_TEST.run()
    resolution.before_call(layer, args, kwargs)


def load(entry: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Returns a saved model with the dtypes of its file, whose entry is given.

    Under a mixed policy its layers are made in float32 at first, whatever their configs
    say: Keras builds a loaded subclassed model by its `call` on float32 inputs, where
    half-precision sublayers would clash. Where a constructor wires a graph, they are
    made as they were. A ValueError says that the file was written by a newer tfamp, or
    describes another model.
    """
    model_dtypes.check_schema(entry)
    with _making(model_dtypes.settings_to_make(entry), entry["policy"]):
        model = make()
    model_dtypes.restore(model, entry)
    settings = resolution.settings_of(model)
    if settings is not None:
        hold(settings)
    return model


def load_unmanaged(make: Callable[[], Any]) -> Any:
    """Returns a saved model that has no dtypes of tfamp, with the optimizer it had."""
    load = _Load()
    CONFIG_HOOKS.hold(load)
    return make()


def unpickled(archive: Any) -> Any:
    """Loads a pickled model; pickles name this function."""
    entry = saved_state.read_entry(archive)
    if entry is None:
        raise ValueError(
            "The pickle names tfamp, but its archive holds no dtypes of layers. It was "
            "changed since; pickle the model again."
        )
    return load(entry, lambda: saved_state.unpickled(archive))


def _load_for_keras(entry: dict[str, Any], make: Callable[[], Any]) -> Any:
    """Returns what Keras's own `load_model` gives while tfamp is enabled."""
    present = IN_FORCE.present
    is_ours = present.settings is not None and present.loaded is None
    return load(entry, make) if is_ours else make()


class _Load:
    """Holds the hooks that a file needs until it is read."""


@contextlib.contextmanager
def _making(settings: PolicySettings | None, policy: str) -> Iterator[None]:
    """Makes layers in a `with` block under settings, or unmanaged ones for None."""
    load = _Load()
    CONFIG_HOOKS.hold(load)
    in_float32 = policy.startswith("mixed_")
    try:
        with IN_FORCE.block(settings=settings, loaded=policy):
            follow_enabled()
            if settings is None:
                keras.config.set_dtype_policy("float32" if in_float32 else policy)
            else:
                IN_FORCE.mark()
            yield
    finally:
        follow_enabled()


_RUNNING = HeldPatches(
    [
        *layers.read_patches(layer_dtypes.on_read),
        *calls.patches(
            _before_call, layer_dtypes.propagate_to_sublayers, own_operations.remedy
        ),
        *half_kernels.patches(),
        *exact_values.patches(),
        *float32_operations.patches(_stays_float32, _is_managed),
        *trainer.compile_patches(compile_hooks.before_compile),
        *saved_state.patches(
            model_dtypes.describe,
            unpickled,
            _load_for_keras,
            layer_dtypes.inherited_policy,
        ),
    ]
)

_HELD = (_RUNNING, FIT_HOOKS, TAPE_HOOKS, LOOP_HOOKS, WORKER_HOOKS, CONFIG_HOOKS)

BEFORE_RUN.append(resolution.warn_of_open_rules)
BEFORE_TRAINING.append(compile_hooks.before_training)
BEFORE_TRAINING.append(warn_of_idle_distribution)

_LOCK = threading.RLock()


def hold(settings: PolicySettings) -> None:
    """Keeps the hooks on calls and runs installed for as long as `settings` lives."""
    _hold(settings)
    SELF_TEST.run_if_started(settings)


def _hold(settings: PolicySettings) -> None:
    if settings.is_half:
        cpus.avoid_broken_amx()
    for patches in _HELD:
        patches.hold(settings)


def install() -> None:
    """Installs or removes the hook where layers are made, as enabled or not."""
    with _LOCK:
        if IN_FORCE.settings is not None:
            _hold(IN_FORCE.settings)
        if IN_FORCE.is_used:
            _MAKING.install()
        else:
            _MAKING.remove()


def follow_enabled() -> None:
    """As `install`; raises HookError where hooks do not do what they promise."""
    install()
    if IN_FORCE.settings is not None:
        SELF_TEST.run_if_started(IN_FORCE.settings)


SELF_TEST = SelfTest(follow_enabled)


def installed() -> tuple[str, ...]:
    """Returns the names of everything in Keras that is replaced now."""
    return tuple(name for patches in (_MAKING, *_HELD) for name in patches.installed)
