"""`tfamp.triage`: replays a failing step and says what is to blame."""

import os
from typing import Any

import keras

from tfamp.numerics.triage.replays import inquire
from tfamp.numerics.triage.result import Triage
from tfamp.stepping import snapshots
from tfamp.stepping.arguments import check_model
from tfamp.stepping.snapshot_files import read_bundle
from tfamp.stepping.unchanged import seeds_put_back


def triage(model: keras.Model, batch_or_bundle: Any) -> Triage:
    """Replays a step and says why it failed.

    The train step runs eagerly with every layer watched: in the model's policy at its
    loss scale, in float32, and in the policy at scale 1. Nothing is updated; weights,
    optimizers, metrics and seeds are afterwards what they were. It takes a few
    steps' time, eager ones.

    Args:
        model: A compiled model with the weights of the failing step.
        batch_or_bundle: The batch of the step, as `(x, y)` or `(x, y, sample_weight)`;
            whatever else `fit` takes, of which it is the first batch; or the path of a
            bundle that `tfamp.callbacks.NanRecovery` wrote, whose
            state the model is given for the time of the replay.

    Returns:
        The `Triage`: `.cause`, `.layer`, `.evidence`, `.remedy`, `.table()`.

    Raises:
        TypeError: `model` is not a compiled Keras model, or the batch is none.
        ValueError: The bundle cannot be read, or is of another model.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> import numpy as np
        >>> bad = np.float32([[1, np.nan], [3, 4]])
        >>> found = triage(model, (bad, np.float32([[0], [0]])))
        >>> found.cause, found.evidence[0]  # doctest: +NORMALIZE_WHITESPACE
        ('data', '`x` holds 1 numbers that are inf or NaN, in 1 of 2 examples
        (number 0).')
    """
    check_model(model)
    with seeds_put_back():
        if not isinstance(batch_or_bundle, (str, os.PathLike)):
            return inquire(model, batch_or_bundle)
        _, state, batch = read_bundle(batch_or_bundle)
        snapshots.built_from(model, batch)
        before = snapshots.take(model)
        try:
            snapshots.put(model, state)
            return inquire(model, batch)
        finally:
            snapshots.put(model, before)
