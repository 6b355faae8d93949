"""Puts together what goes into a bundle."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfamp.callbacks._batch_ring import BatchRing
from tfamp.callbacks.flight_recorder.facts import (
    classes_of,
    needs_build,
    surroundings_of,
)
from tfamp.callbacks.flight_recorder.log import FlightLog, learning_rate_of
from tfamp.keras_hooks import trainer
from tfamp.stepping import snapshots
from tfamp.stepping.bundles.batches import pack
from tfamp.stepping.bundles.files import Contents
from tfamp.stepping.bundles.record import Batch, Bundle, Call, Cause, error_name
from tfamp.stepping.snapshots.names import optimizers_of
from tfamp.stepping.snapshots.state import digest

_NOT_COVERED = (
    "Operations that draw from a state of their own, such as `tf.random.normal`, and "
    "what a model keeps outside of Keras variables, are not replayed."
)

_FROM_ELSEWHERE = (
    "The exception came from outside of the training step, from a callback or from "
    "validation: a replay shows the step before it."
)


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
    """Returns what the bundle of a failure holds.

    Args:
        model: The model, right after the failing call.
        log: What was noted of the calls before.
        ring: The batches that are kept.
        cause: What was seen.
        message: It in a sentence.
        error: The exception, None without one.
        build: Where the user's function that builds the model is.
        num_asked: How many batches the user wants at least.
        is_of_step: Whether the training function raised the exception.
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
        notes=tuple(_notes(log, ring, calls, leads=leads, rate=rate))
        + (() if error is None or is_of_step else (_FROM_ELSEWHERE,)),
    )
    return Contents(record, before.state, arrays, before.random)


def built_from(model: keras.Model, element_spec: Any) -> bool:
    """Builds what the first step would build, so that a snapshot has all variables.

    Args:
        model: A compiled model.
        element_spec: What a batch is like, None where that is not known.

    Returns:
        Whether the model and its optimizers are built now. A model with a `train_step`
        of its own may give an optimizer some of the variables only, so it is left to
        build itself.
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


def model_saver(model: keras.Model) -> Callable[[Path], str]:
    """Returns the function that writes a model into its bundle."""

    def save(path: Path) -> str:
        model.save(path)
        return needs_build(model)

    return save


def _notes(
    log: FlightLog,
    ring: BatchRing,
    calls: tuple[Call, ...],
    *,
    leads: bool,
    rate: float | None,
) -> list[Any]:
    notes = []
    if not leads:
        num = ring.num_drawn - log.before.step
        notes.append(
            f"The state was taken {num} batches before the end of the failing call, of "
            f"which {len(ring.batches())} are kept: a snapshot every "
            f"{log.interval} calls is what 0.4 % of the time buys. So the failing call "
            "alone is replayed, from that older state, and its bits can differ."
        )
    if ring.was_cut:
        notes.append(
            f"No more than {len(ring.batches())} batches are kept, since more take "
            f"above `max_bytes={ring.max_bytes}`."
        )
    if leads and len({call.epoch for call in calls}) > 1:
        notes.append(
            "An epoch ended between the state and the failing step: what validation "
            "and callbacks did there is not replayed."
        )
    if rate != log.before.learning_rate and leads:
        notes.append(
            f"The learning rate was {log.before.learning_rate} at the state and {rate} "
            "at the failing step."
        )
    return [*notes, _NOT_COVERED]
