"""The state of a whole training: its model, other callbacks, and where it stands."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfamp.callbacks.resume import others, record
from tfamp.dtypes import resolution
from tfamp.keras_hooks import around_training, structure, trainer
from tfamp.keras_hooks.epochs import Feed
from tfamp.records import checks
from tfamp.stepping import snapshots
from tfamp.stepping.snapshots.names import optimizers_of
from tfamp.stepping.snapshots.state import State


def take(
    model: keras.Model,
    feed: Feed,
    callbacks: Sequence[Any],
    position: dict[str, Any],
    *,
    into: State | None,
) -> tuple[State, State]:
    """Returns the state of a training, and the part whose memory may be used anew.

    Args:
        model: The model.
        feed: What it trains on.
        callbacks: Other callbacks of the `fit`.
        position: Where it stands, for the record.
        into: A part that is not needed any more.
    """
    of_model = snapshots.take(model, into=into)
    held, arrays = others.take_callbacks(callbacks)
    counters = {
        **position,
        "facts": record.facts_of(feed),
        "dtypes": record.dtypes_of(model),
        "replicas": snapshots.num_local_replicas(model),
        "of replicas": snapshots.names_of_replicas(model),
        "seed": record.global_seed(),
        "versions": record.versions(),
        "random": others.take_random(),
        "callbacks": held,
        "history": others.take_history(model),
    }
    state = dataclasses.replace(
        of_model,
        arrays={**of_model.arrays, **arrays},
        counters={**of_model.counters, record.KEY: counters},
    )
    return state, of_model


def put(
    model: keras.Model,
    state: State,
    batch: Any,
    callbacks: Sequence[Any],
    directory: str,
) -> None:
    """Gives a model, its optimizer and other callbacks what a state holds.

    Args:
        model: The model, which is built where it is not.
        state: What `take` gave.
        batch: What one replica gets, to build the model from.
        callbacks: Other callbacks of the `fit`.
        directory: Named in errors.

    Raises:
        ValueError: The state is of another model, or under another policy.
    """
    held = state.counters[record.KEY]
    extra = {k: v for k, v in state.arrays.items() if k.startswith(others.PREFIX)}
    arrays = {k: v for k, v in state.arrays.items() if k not in extra}
    with model.distribute_strategy.scope():
        trainer.build_from(model, batch)
    for _, part, _ in structure.walk(model):
        # Networks that a train step of the user's calls, as its first step would.
        if isinstance(part, keras.Model) and part.built:
            resolution.resolve(part)
    if not all(optimizer.built for optimizer in optimizers_of(model)):
        # Optimizers of the user's that only the train step knows the variables of.
        # What this step does to weights and seeds is undone by the state.
        around_training.on_batch(model)(batch)
    record.check_dtypes(held["dtypes"], model, directory)
    num_replicas = snapshots.num_local_replicas(model)
    for name in held["of replicas"] if num_replicas != held["replicas"] else ():
        first = arrays[name][0] if held["replicas"] > 1 else arrays[name]
        copies = np.stack([first] * num_replicas)
        arrays[name] = copies if num_replicas > 1 else first
    try:
        snapshots.put(model, dataclasses.replace(state, arrays=arrays))
    except ValueError as error:
        raise ValueError(
            f"The training in {directory!r} is of another model than this "
            f"{model.name!r}: {checks.first_line(error)} Pass another `directory`, or "
            "delete the files in it."
        ) from error
    others.put_callbacks(callbacks, held["callbacks"], extra)
    others.put_history(model, held["history"])
