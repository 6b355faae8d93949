"""What a bundle says of where and how a model trained."""

import inspect
import os
from typing import Any

import keras
import tensorflow as tf

import tfamp
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.models import assignment
from tfamp.records import versions
from tfamp.stepping.bundles.record import Surroundings

# What changes which kernels compute, and with how many threads.
_PREFIXES = ("ONEDNN_", "DNNL_", "XLA_", "TF_ENABLE_", "TF_XLA_", "TF_CUDNN_")
_NAMES = (
    "OMP_NUM_THREADS",
    "TF_DETERMINISTIC_OPS",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_NUM_INTEROP_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "NVIDIA_TF32_OVERRIDE",
)
_FOUND_ANYWAY = ("builtins", "keras", "tfamp")


def surroundings_of(model: keras.Model) -> Surroundings:
    """Returns where and how a model trains."""
    strategy = model.distribute_strategy
    dtypes = assignment(model)
    threading = tf.config.threading
    return Surroundings(
        policy=dtypes.policy,
        is_managed=any(row.rule != "not managed" for row in dtypes),
        assignment=dtypes.to_dict(),
        strategy=type(strategy).__name__,
        replicas=_replicas(strategy),
        steps_per_execution=int(model.steps_per_execution or 1),
        jit_compile=bool(model.jit_compile),
        run_eagerly=bool(model.run_eagerly),
        versions={**versions.installed_versions(), "tfamp": tfamp.__version__},
        devices=devices.devices(),
        environment={
            name: value for name, value in sorted(os.environ.items()) if _counts(name)
        },
        threads=(
            threading.get_intra_op_parallelism_threads(),
            threading.get_inter_op_parallelism_threads(),
        ),
    )


def needs_build(model: keras.Model) -> str:
    """Returns why another process cannot find the classes of a model, or nothing.

    Keras finds a class by the module that it says it is from.
    """
    for part in _parts_of(model):
        if isinstance(part, keras.layers.Lambda):
            return f"layer {part.name!r} is a Lambda, whose code Keras does not load"
        kind = _kind_of(part)
        if kind.__module__ == "__main__":
            return f"{kind.__qualname__} is defined in the script that was run"
        if "<locals>" in kind.__qualname__:
            return f"{kind.__qualname__} is defined inside a function"
    return ""


def classes_of(model: keras.Model) -> dict[str, str]:
    """Returns where the classes and functions of a model are that are not Keras's."""
    kinds = map(_kind_of, _parts_of(model))
    return {
        keras.saving.get_registered_name(kind): f"{kind.__module__}:{kind.__qualname__}"
        for kind in kinds
        if kind.__module__.split(".")[0] not in _FOUND_ANYWAY
    }


def _parts_of(model: keras.Model) -> list[Any]:
    """Returns layers, optimizers, and losses of a model."""
    inner = getattr(model.optimizer, "inner_optimizer", None)
    layers = [layer for _, layer, _ in structure.walk(model)]
    return [*layers, model.optimizer, inner, *tf.nest.flatten(model.loss)]


def _kind_of(part: Any) -> Any:
    """Returns the class of a part, or the function that it is."""
    return part if inspect.isfunction(part) else type(part)


def _replicas(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    """Returns the device of each replica, such as "GPU:0"; none without a strategy."""
    if type(strategy) is type(tf.distribute.get_strategy()):
        return ()
    names = strategy.extended.worker_devices
    return tuple(name.split("/device:")[-1] for name in names)


def _counts(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)
