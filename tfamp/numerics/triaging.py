"""`tfamp.triage`: replays a failing step and says what is to blame."""

import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.bottlenecks.arguments import build, check_model
from tfamp.data.bottlenecks.unchanged import unchanged
from tfamp.numerics.inquiry import Inquiry
from tfamp.numerics.triage_records import Triage


def triage(model: keras.Model, batch_or_bundle: Any) -> Triage:
    """Replays a step and says why it failed.

    The train step runs eagerly with every layer watched: in the model's policy at its
    loss scale, in float32, and in the policy at scale 1. Nothing is updated; weights,
    optimizers, metrics and seeds are afterwards what they were. It takes a few
    steps' time, eager ones.

    Args:
        model: A compiled model with the weights of the failing step.
        batch_or_bundle: The batch of the step, as `(x, y)` or `(x, y, sample_weight)`,
            or the path of a bundle that `tfamp.callbacks.FlightRecorder` wrote, whose
            state the model is given for the time of the replay.

    Returns:
        The `Triage`: `.cause`, `.layer`, `.evidence`, `.remedy`, `.table()`.

    Raises:
        TypeError: `model` is not a compiled Keras model, or the batch is none.
        ValueError: The bundle cannot be read, or is of another model.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> bad = np.float32([[1, np.nan], [3, 4]])
        >>> found = triage(model, (bad, np.float32([[0], [0]])))
        >>> found.cause, found.evidence[0]  # doctest: +NORMALIZE_WHITESPACE
        ('data', '`x` holds 1 numbers that are inf or NaN, in 1 of 2 examples
        (number 0).')
    """
    check_model(model)
    batch = _checked(batch_or_bundle)
    build(model, batch)
    rate = model.optimizer.learning_rate if model.optimizer is not None else None
    rate = float(rate) if isinstance(rate, keras.Variable) else None
    with unchanged(model):
        return Inquiry(model, batch, rate).run()


def _checked(batch: Any) -> Any:
    """Returns a batch as `train_step` takes it."""
    if isinstance(batch, (str, os.PathLike)):
        raise NotImplementedError
    if not isinstance(batch, (tuple, list, dict)) and not tf.is_tensor(batch):
        raise TypeError(
            f"`batch_or_bundle` is of type {type(batch).__name__}; expected a batch "
            "(x, y) or (x, y, sample_weight), or the path of a bundle. Take one from "
            "a dataset by `next(iter(dataset))`."
        )
    return tf.nest.map_structure(
        _as_tensor, tuple(batch) if isinstance(batch, list) else batch
    )


def _as_tensor(part: Any) -> Any:
    if part is None or tf.is_tensor(part):
        return part
    array = np.asarray(part)
    return tf.constant(array.astype(np.float32) if array.dtype == np.float64 else array)
