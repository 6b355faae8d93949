"""Puts together what goes into a bundle."""

import contextlib
import inspect
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfamp
from tfamp.callbacks._batch_ring import BatchRing
from tfamp.callbacks.flight_recorder.call_log import FlightLog, learning_rate_of
from tfamp.keras_hooks import structure, trainer
from tfamp.machine import devices
from tfamp.models import assignment
from tfamp.records import versions
from tfamp.stepping import snapshots
from tfamp.stepping.bundle_records import (
    Batch,
    Bundle,
    Call,
    Cause,
    Surroundings,
    error_name,
)
from tfamp.stepping.bundles import Contents, pack
from tfamp.stepping.snapshots import digest, optimizers_of

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


def contents_of(
    model: keras.Model,
    log: FlightLog,
    ring: BatchRing,
    *,
    cause: Cause,
    message: str,
    error: Exception | None,
    build: str | None,
    num_asked: int,
    is_of_step: bool,
) -> Contents:
    """Returns what the bundle of a failure holds, right after the failing call.

    `num_asked` is how many batches the user wants at least, and `is_of_step` says
    whether the training function raised the error.
    """
    after, calls = snapshots.take(model), log.calls()
    kept = ring.batches()
    before = log.before
    step = ring.fetch()
    followed = [call for call in calls if call.first >= before.step]
    leads = bool(followed) and followed[0].first == before.step
    calls = tuple(followed) if leads else calls[-1:]
    arrays: dict[str, np.ndarray] = {}
    # More are held for the next snapshot's sake than were asked for.
    oldest = min(step - num_asked, calls[0].first if calls else step)
    batches = tuple(
        Batch(
            number=held.number,
            num_bytes=held.num_bytes,
            parts=tuple(
                pack(part, f"{held.number}/{i}", arrays, held.shapes)
                for i, part in enumerate(held.parts)
            ),
        )
        for held in kept
        if held.number >= oldest
    )
    rate = learning_rate_of(model)
    record = Bundle(
        cause=cause,
        message=message,
        error=None if error is None else error_name(error),
        epoch=calls[-1].epoch if calls else 0,
        step=step,
        calls=calls,
        batches=batches,
        state_step=before.step,
        leads=leads,
        digest=None if error is not None else digest(after),
        counters=dict(after.counters),
        learning_rate=rate,
        state_learning_rate=before.learning_rate,
        model_class=f"{type(model).__module__}.{type(model).__qualname__}",
        classes=classes_of(model),
        has_model=False,
        needs_build="",
        build=build,
        surroundings=surroundings_of(model),
        notes=tuple(
            _notes(log, ring, calls, leads=leads, rate=rate, is_of_step=is_of_step)
        ),
    )
    return Contents(record, before.state, arrays, before.random)


def built_from(model: keras.Model, element_spec: Any) -> bool:
    """Builds what the first step would build, so that a snapshot has all variables.

    Returns whether the model and its optimizers are built now. A model with a
    `train_step` of its own may give an optimizer some of the variables only, so it is
    left to build itself. The element spec of a batch is None where it is not known.
    """
    optimizers = optimizers_of(model)
    if type(model).train_step is keras.Model.train_step and element_spec is not None:
        strategy = model.distribute_strategy
        # Whatever a model raises that only runs on tensors.
        with contextlib.suppress(Exception), strategy.scope():
            if not model.built:
                trainer.build_from(model, element_spec)
            if not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
    return model.built and all(optimizer.built for optimizer in optimizers)


def _notes(
    log: FlightLog,
    ring: BatchRing,
    calls: tuple[Call, ...],
    *,
    leads: bool,
    rate: float | None,
    is_of_step: bool,
) -> Iterator[str]:
    """Yields what a reader of the bundle should know."""
    if not leads:
        num = ring.num_drawn - log.before.step
        yield (
            f"The state was taken {num} batches before the end of the failing call, of "
            f"which {len(ring.batches())} are kept: a snapshot every "
            f"{log.interval} calls is what 0.4 % of the time buys. So the failing call "
            "alone is replayed, from that older state, and its bits can differ."
        )
    if ring.was_cut:
        yield (
            f"No more than {len(ring.batches())} batches are kept, since more take "
            f"above `max_bytes={ring.max_bytes}`."
        )
    if leads and len({call.epoch for call in calls}) > 1:
        yield (
            "An epoch ended between the state and the failing step: what validation "
            "and callbacks did there is not replayed."
        )
    if rate != log.before.learning_rate and leads:
        yield (
            f"The learning rate was {log.before.learning_rate} at the state and {rate} "
            "at the failing step."
        )
    yield (
        "Operations that draw from a state of their own, such as `tf.random.normal`, "
        "and what a model keeps outside of Keras variables, are not replayed."
    )
    if not is_of_step:
        yield (
            "The exception came from outside of the training step, from a callback or "
            "from validation: a replay shows the step before it."
        )
