"""Installs the hooks, once, and what a hook does that needs all of the rest."""

from collections.abc import Callable
from typing import Any

import keras

from tfamp.dtypes import (
    compile_hooks,
    in_force,
    layer_dtypes,
    own_operations,
    resolution,
    saved_dtypes,
)
from tfamp.dtypes.in_force import IN_FORCE
from tfamp.dtypes.self_test import SelfTest
from tfamp.dtypes.settings import PolicySettings, make_settings
from tfamp.keras_hooks import (
    calls,
    exact_values,
    float32_operations,
    half_kernels,
    layers,
    saved_state,
    trainer,
)
from tfamp.keras_hooks.layers import CALLS, Kind, policy_of
from tfamp.keras_hooks.patches import PatchSet
from tfamp.keras_hooks.replicas import warn_of_idle_distribution
from tfamp.keras_hooks.workers import WORKER_HOOKS
from tfamp.loss_scale.fit_hooks import BEFORE_RUN, BEFORE_TRAINING, FIT_HOOKS
from tfamp.loss_scale.loops import LOOP_HOOKS
from tfamp.loss_scale.optimizer import CONFIG_HOOKS
from tfamp.loss_scale.tape import TAPE_HOOKS
from tfamp.machine import cpus


def _stays_float32() -> bool | None:
    """Returns what `float32_operations` asks of the layer that computes now."""
    policy = CALLS.stack[-1] if CALLS.stack else None
    if (
        policy is None
        or policy.kind is Kind.EXPLICIT
        or not policy.settings.has_defaults
    ):
        return None
    return policy.kind is Kind.WIDE_OUTPUT


def _before_call(layer: keras.layers.Layer, args: Any, kwargs: Any) -> None:
    if SELF_TEST.is_due and (policy := policy_of(layer)) and policy.settings.is_half:
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
    saved_dtypes.check_schema(entry)
    policy = entry["policy"]
    settings = saved_dtypes.settings_to_make(entry)
    install(settings or make_settings(policy))
    with IN_FORCE.block(settings=settings, loaded=policy):
        if settings is None:
            is_mixed = policy.startswith("mixed_")
            keras.config.set_dtype_policy("float32" if is_mixed else policy)
        model = make()
    saved_dtypes.restore(model, entry)
    return model


def load_unmanaged(make: Callable[[], Any]) -> Any:
    """Returns a saved model that has no dtypes of tfamp, with the optimizer it had."""
    CONFIG_HOOKS.install()
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


HOOKS = (
    PatchSet(
        [
            *layers.patches(
                in_force.prepare_thread,
                layer_dtypes.on_created,
                layer_dtypes.propagate_to_sublayers,
            ),
            *saved_state.read_patches(
                in_force.is_in_force, layer_dtypes.on_quantized_read
            ),
            *calls.patches(
                _before_call, layer_dtypes.propagate_to_sublayers, own_operations.remedy
            ),
            *half_kernels.patches(),
            *exact_values.patches(),
            *float32_operations.patches(_stays_float32),
            *trainer.compile_patches(compile_hooks.before_compile),
            *saved_state.patches(
                saved_dtypes.describe,
                unpickled,
                _load_for_keras,
                layer_dtypes.inherited_policy,
            ),
        ]
    ),
    *(FIT_HOOKS, TAPE_HOOKS, LOOP_HOOKS, WORKER_HOOKS, CONFIG_HOOKS),
)

BEFORE_RUN.append(resolution.warn_of_open_rules)
BEFORE_TRAINING.append(compile_hooks.before_training)
BEFORE_TRAINING.append(warn_of_idle_distribution)


def install(settings: PolicySettings) -> None:
    """Installs the hooks for the life of the process; what is unmanaged passes through.

    A HookError says that they do not do what they promise on this Keras.
    """
    if settings.is_half:
        cpus.avoid_broken_amx()
    is_first = not any(patches.installed for patches in HOOKS)
    try:
        for patches in HOOKS:
            patches.install()
        SELF_TEST.run_if_started(settings)
    except BaseException:
        if is_first:
            remove()
        raise


def remove() -> None:
    """Takes all hooks away; models that were made under them are lost."""
    for patches in reversed(HOOKS):
        patches.remove()


SELF_TEST = SelfTest()


def installed() -> tuple[str, ...]:
    """Returns the names of everything in Keras that is replaced now."""
    return tuple(name for patches in PatchSet.known for name in patches.installed)
