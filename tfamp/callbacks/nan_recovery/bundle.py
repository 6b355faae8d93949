"""Writes the bundle of a failure: the step, and all that replaying it takes."""

import inspect
import math
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.callbacks._draws import parts_of
from tfamp.callbacks.nan_recovery.failures import Sign
from tfamp.callbacks.nan_recovery.search import Found
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.models import assignment
from tfamp.records import versions
from tfamp.stepping import bundles, snapshots
from tfamp.stepping.bundle_records import (
    Batch,
    Bundle,
    Call,
    Cause,
    Surroundings,
    error_name,
    hexed,
)
from tfamp.stepping.snapshots import State
from tfamp.stepping.unchanged import take_random

# What a bundle calls a sign, where it has another name.
_CAUSES: dict[str, Cause] = {"logs": "loss", "loss scale": "skip"}
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
        steps_per_execution=1,  # as it was tried again
        jit_compile=bool(model.jit_compile),
        run_eagerly=bool(model.run_eagerly),
        versions={**versions.installed_versions(), "tfamp": tfamp.__version__},
        devices=devices.devices(),
        environment={
            name: value
            for name, value in sorted(os.environ.items())
            if name in _NAMES or name.startswith(_PREFIXES)
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


def write(
    model: keras.Model,
    folder: Path,
    found: Found,
    *,
    state: State,
    sign: Sign,
    epoch: int,
) -> str:
    """Writes the bundle of a failing step; returns its path.

    Args:
        model: The model, with the state from before the step.
        folder: Where the bundle's folder is made.
        found: The step; of a batch that was held.
        state: What the model has.
        sign: How the failure showed in training.
        epoch: Its epoch, from 0.
    """
    kept = found.kept
    if kept is None:
        raise ValueError("The failing step has no batch; expected one that was held.")
    parts = parts_of(model, kept.data)
    # Replicas were tried as one, whose numbers are others.
    is_same = found.has_failed and len(parts) == 1
    arrays: dict[str, np.ndarray] = {}
    batch = Batch(
        number=kept.number,
        num_bytes=kept.num_bytes,
        parts=tuple(
            bundles.pack(part, f"{kept.number}/{i}", arrays, {})
            for i, part in enumerate(parts)
        ),
    )
    logs = hexed(found.logs) if is_same else {}
    after = found.after if found.after is not None else state
    rate = _learning_rate_of(model)
    record = Bundle(
        cause=_cause_of(found, sign),
        message=f"{(found.sign or sign).text}.",
        error=None if found.error is None else error_name(found.error),
        epoch=epoch,
        step=kept.number + 1,
        calls=(Call(epoch, kept.number, kept.number, 1, logs),),
        batches=(batch,),
        state_step=kept.number,
        leads=is_same,
        digest=snapshots.digest(after) if is_same and found.error is None else None,
        counters=snapshots.take(model).counters,
        learning_rate=rate,
        state_learning_rate=rate,
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        classes=classes_of(model),
        has_model=False,
        needs_build="",
        surroundings=surroundings_of(model),
        notes=_notes(found, num_parts=len(parts)),
    )

    def save_model(path: Path) -> str:
        model.save(path)
        return needs_build(model)

    contents = bundles.Contents(record, state, arrays, take_random())
    return os.fspath(bundles.write(folder, contents, save_model))


def _cause_of(found: Found, sign: Sign) -> Cause:
    if found.error is not None:
        return "error"
    return _CAUSES.get((found.sign or sign).kind, "weights")


def _learning_rate_of(model: Any) -> float | None:
    """Returns the learning rate of a model's optimizer, where it is one number."""
    try:
        rate = float(model.optimizer.learning_rate)
    except (AttributeError, TypeError, ValueError):
        return None
    return rate if math.isfinite(rate) else None


def _notes(found: Found, *, num_parts: int) -> tuple[str, ...]:
    """Returns what a reader of the bundle should know."""
    notes = []
    if not found.has_failed:
        notes.append(
            "No step since the last good state failed when it was made again: this is "
            "the likeliest one, and what broke it is not in the model or the batch."
        )
    if num_parts > 1:
        notes.append(
            "The step was found on one device, with the batch of all replicas."
        )
    notes.append(
        "Operations that draw from a state of their own, such as `tf.random.normal`, "
        "and what a model keeps outside of Keras variables, are not replayed."
    )
    return tuple(notes)
