"""The first steps of `fit`: a scale that they cannot stand costs none of them.

A skipped step has changed no weight. While a scale is not proven, such a step is taken
again, on the same batch, at a lower one; a batch for which no scale is low enough is
skipped at the first one, as any later batch is. A scale of the user's own is obeyed.
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import trainer, trials
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.loss_scale.replicas import ours_of
from tfamp.loss_scale.rule import DEFAULT_SCALE

NUM_STEPS = 10  # that prove a scale
_LOWER = 0.25
_LEAST = 1.0  # a lower scale is no remedy


def is_due(model: keras.Model) -> bool:
    """Returns whether a model has a scale that is not proven yet."""
    ours = ours_of(model)
    return len(ours) == len(optimizers_of(model)) and any(map(_is_unproven, ours))


def taken(
    model: keras.Model, function: Callable[..., Any], iterator: Iterator[Any]
) -> Any:
    """Calls a training function, and gives what it returns for the last batch."""
    runs_eagerly = model.run_eagerly or tf.config.functions_run_eagerly()
    if runs_eagerly or not may_be_drawn(iterator):
        return function(iterator)

    def run(batch: Any) -> Any:
        again = functools.partial(repeating, batch, iterator)
        return _until_applied(model, function, batch, again)

    return one_by_one(model, function, iterator, run)


def one_by_one(
    model: keras.Model,
    function: Callable[..., Any],
    iterator: Any,
    run: Callable[[Any], Any],
) -> Any:
    """Calls `run` with each batch of an execution; returns what the last call does.

    Where there is no batch, the training function says so itself.
    """
    logs = None
    for batch in itertools.islice(iterator, model.steps_per_execution):
        logs = run(batch)
    return function(iterator) if logs is None else logs


def build(model: keras.Model, optimizers: list[Any], data: Any) -> None:
    """Builds what is not built, so that its variables can be held from the start."""
    if model.built and all(o.built for o in optimizers):
        return
    hidden: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if model.run_eagerly:  # where Keras builds no model ahead of its first step
        hidden = trials.without_python_effects(model)
    try:
        with hidden:
            trainer.build_from(model, data)
    except Exception:  # a model that only runs on tensors is built by its first call
        return


def _is_unproven(optimizer: Any) -> bool:
    """Returns whether nobody has chosen its scale, and no steps have proved it."""
    now = optimizer.scale_variables.numbers()
    is_given = not optimizer.dynamic or optimizer.initial_scale != DEFAULT_SCALE
    return not (is_given or now.is_frozen) and now.judged < NUM_STEPS


def may_be_drawn(iterator: Any) -> bool:
    """Returns whether a batch can be drawn, and given back by `repeating`."""
    return isinstance(iterator, tf.data.Iterator | types.GeneratorType)


def repeating(batch: Any, iterator: Any) -> Any:
    """Returns an iterator over one batch, of the type of another one."""
    if not isinstance(iterator, tf.data.Iterator):
        return (each for each in [batch])
    made = iter(tf.data.Dataset.from_tensors(batch))
    parts = tf.nest.flatten(made, expand_composites=True)
    like = tf.nest.pack_sequence_as(iterator, parts, expand_composites=True)
    like.kept = made  # which its resource goes with
    return like


def _until_applied(
    model: keras.Model, function: Callable[..., Any], batch: Any, again: Any
) -> Any:
    build(model, ours_of(model), batch)
    ours = [optimizer for optimizer in ours_of(model) if optimizer.built]
    before = [o.scale_variables.numbers() for o in ours]
    held = _State(model, ours)
    logs = function(again())
    if not ours or not _is_lost(ours, before) or not _is_finite(batch):
        return logs
    after = _State(model, ours)
    scale = _LOWER * max(now.scale for now in before)
    least = max(_LEAST, *(o.rule.min_scale for o in ours))
    while scale >= least:
        held.put_back()
        for optimizer, now in zip(ours, before, strict=True):
            optimizer.put(now._replace(scale=min(scale, now.scale)))
        logs_then = function(again())
        if not _is_lost(ours, before):
            logging.info(
                "The loss scale of model %r begins at %g, as the gradients of its "
                "first batches overflow at %g.",
                *(model.name, scale, before[0].scale),
            )
            return logs_then
        scale *= _LOWER
    after.put_back()
    return logs


def _is_lost(optimizers: Sequence[Any], before: Sequence[Any]) -> bool:
    """Returns whether all that was done since is skipping for a scale that moves."""
    facts = [o.scale_variables.numbers() for o in optimizers]
    pairs = list(zip(facts, before, strict=True))
    skipped = sum(now.skipped - then.skipped for now, then in pairs)
    judged = sum(now.judged - then.judged for now, then in pairs)
    return 0 < skipped == judged


def _is_finite(batch: Any) -> bool:
    """Returns whether the numbers of a batch are finite: else no scale helps."""
    for part in tf.nest.flatten(batch, expand_composites=True):
        dtype = getattr(part, "dtype", None)
        if dtype is not None and tf.as_dtype(dtype).is_floating:
            if not bool(tf.reduce_all(tf.math.is_finite(part))):
                return False
    return True


class _State:
    """What a skipped step leaves changed: metrics, seeds, counters of optimizers."""

    def __init__(self, model: keras.Model, optimizers: Sequence[Any]) -> None:
        variables = [*model.non_trainable_variables, *model.metrics_variables]
        for each in optimizers:
            stored = each.scale_variables
            variables += [stored.step_counter, stored.dynamic_scale, stored.counters]
            variables += [stored.levels, stored.recent, stored.blame]
        self._values = [(v, tf.identity(v.value)) for v in variables]

    def put_back(self) -> None:
        """Makes all be as it was."""
        for variable, value in self._values:
            variable.assign(value)
