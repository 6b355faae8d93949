"""What `fit` does more where an optimizer is a `LossScaleOptimizer`.

A skipped step leaves the moving statistics as they were; a window that is not full
is applied at the end of an epoch; an error of TensorFlow becomes ours. Errors of memory
of a managed model are explained in `fit`, `evaluate` and `predict`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import around_training, epochs, replicas, structure, trainer
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.patches import PatchSet, replaced
from tfamp.loss_scale import first_steps, stops
from tfamp.loss_scale.replicas import (
    ReplicaStatistics,
    StateBeforeStep,
    kept_if_empty,
    ours_of,
    weights_replicas,
)
from tfamp.loss_scale.scales import HERE
from tfamp.machine.memory import machine_memory
from tfamp.machine.out_of_memory import explain, is_out_of_memory

# Under XLA no error can be raised in the graph, so the counter is read every so
# many calls; each reading waits for the device.
_CALLS_BETWEEN_READINGS = 16
_NOTED = "_tfamp_explained"


# What is done ahead of a model's training, by parts that this one does not know.
BEFORE_TRAINING: list[Callable[[keras.Model], None]] = []
# The same ahead of `evaluate` and `predict` too.
BEFORE_RUN: list[Callable[[keras.Model], None]] = []
# The same of `fit` of a managed model, with its arguments by name.
BEFORE_FIT: list[Callable[[keras.Model, Mapping[str, Any]], None]] = []
# Whether a model's first batch is wanted, and what is called with the model and that
# batch, as `train_step` is given it, ahead of the first trace; with None where it
# cannot be had.
BEFORE_FIRST_BATCH: list[
    tuple[Callable[[keras.Model], bool], Callable[[keras.Model, Any], None]]
] = []


def _guarded(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training step that undoes what a skipped step did to the model."""

    @functools.wraps(train_step)
    def step_and_undo(data: Any) -> Any:
        optimizers = ours_of(model)
        with replaced(CALLS, is_training=policy_of(model) is not None):
            return undoing(optimizers, data) if optimizers else sharing(data)

    def sharing(data: Any) -> Any:
        if not weights_replicas(model):
            return train_step(data)
        count, may_be_empty = trainer.batch_size_of(data), trainer.may_be_empty(data)
        with replicas.sharing(model, count, may_be_empty=may_be_empty):
            return kept_if_empty(model, train_step, data)

    def undoing(optimizers: list[Any], data: Any) -> Any:
        first_steps.build(model, optimizers, data)
        state = StateBeforeStep(model, optimizers)
        accumulates = any(o.accumulates for o in optimizers)
        weight = trainer.batch_size_of(data) if accumulates else None
        for optimizer in optimizers:
            optimizer.leaves_stop_to_caller = True
        try:
            with replaced(HERE, optimizers=tuple(optimizers), weight=weight):
                logs = sharing(data)
        finally:
            for optimizer in optimizers:
                optimizer.leaves_stop_to_caller = False
        state.put_back_if_skipped()
        return logs

    return step_and_undo


def _watched(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training function that looks at the counters between its calls.

    In the first steps, for a scale that is too high; under XLA now and then, for a
    training that was stopped.
    """
    if BEFORE_FIRST_BATCH and policy_of(model) is not None:
        function = _looking_first(model, function)
    if not ours_of(model):
        return function
    calls, is_proven = 0, False

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        nonlocal calls, is_proven
        if not tf.executing_eagerly():  # as a part of another function
            return function(iterator)
        is_proven = is_proven or not first_steps.is_due(model)
        if is_proven:
            outputs = function(iterator)
        else:
            outputs = first_steps.taken(model, function, iterator)
        calls += 1
        if model.jit_compile and calls % _CALLS_BETWEEN_READINGS == 0:
            _raise_if_stopped(model)
        return outputs

    return call


def _looking_first(model: keras.Model, function: Callable[..., Any]) -> Any:
    """Returns a training function whose first batch is looked at ahead of it."""
    is_first = True

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        nonlocal is_first
        if not (is_first and tf.executing_eagerly()):
            return function(iterator)
        is_first = False
        looks = [look for is_due, look in BEFORE_FIRST_BATCH if is_due(model)]
        if not looks:
            return function(iterator)
        if not first_steps.may_be_drawn(iterator):
            for look in looks:
                look(model, None)
            return function(iterator)

        def run(batch: Any) -> Any:
            while looks:
                looks.pop(0)(model, batch)
            return function(first_steps.repeating(batch, iterator))

        return first_steps.one_by_one(model, function, iterator, run)

    return call


def _raise_if_stopped(model: keras.Model) -> None:
    for optimizer in ours_of(model):
        error = stops.late_error(optimizer)
        if error is not None:
            raise error


class _EndOfEpoch(keras.callbacks.Callback):
    """Brings weights up to date before anything looks at them.

    What is left of a window is applied; replicas agree on moving statistics.
    """

    statistics: ReplicaStatistics

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds what the replicas hold."""
        self.statistics = ReplicaStatistics(self.model)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that weights move."""
        self.statistics.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Brings weights up to date, and raises what XLA could not."""
        self._flush()
        if self.model.jit_compile:
            _raise_if_stopped(self.model)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Brings weights up to date before the validation inside `fit`."""
        self._flush()

    def _flush(self) -> None:
        for optimizer in ours_of(self.model):
            optimizer.flush()
        self.statistics.average()


@contextlib.contextmanager
def _guarded_fit(model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
    _prepare(model)
    callbacks = arguments.get("callbacks")
    if not ours_of(model) and not weights_replicas(model):
        with _our_errors(model):  # of optimizers that a `train_step` has of its own
            yield
        return
    ours = _EndOfEpoch()
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    if given is None:
        others = tf.nest.flatten(callbacks) if callbacks else []
        arguments["callbacks"] = [ours, *others]
    else:
        ours.set_model(model)
        given.callbacks.insert(0, ours)
    for optimizer in ours_of(model):
        stops.forget(optimizer)
    try:
        with _our_errors(model):
            yield
    except BaseException:
        for optimizer in ours_of(model):
            optimizer.discard()  # nothing of this `fit` leaks into the next
        raise
    finally:
        if given is not None:
            given.callbacks.remove(ours)


@contextlib.contextmanager
def _our_errors(model: keras.Model) -> Iterator[None]:
    """Turns TensorFlow's error of a stopped training into a `LossScaleError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        text = stops.found_in(error.message)
        if text is None:
            raise
        raise stops.LossScaleError(text) from error


@contextlib.contextmanager
def _guarded_run(
    model: keras.Model, name: str, arguments: dict[str, Any]
) -> Iterator[None]:
    """Surrounds `fit`, `train_on_batch`, `evaluate` or `predict` of a model."""
    for prepare_run in BEFORE_RUN:
        prepare_run(model)
    with contextlib.ExitStack() as stack:
        if name == "train_on_batch":
            _prepare(model)
            stack.enter_context(around_training.running(model))
            stack.enter_context(_our_errors(model))
        elif name == "fit":
            for prepare in BEFORE_FIT if policy_of(model) is not None else ():
                prepare(model, arguments)
            stack.enter_context(around_training.running(model, arguments))
            stack.enter_context(around_run(model, training=True))
            stack.enter_context(_guarded_fit(model, arguments))
            stack.enter_context(_nan_without_a_step(model))
        else:
            stack.enter_context(around_run(model, training=False))
        yield


@contextlib.contextmanager
def _nan_without_a_step(model: keras.Model) -> Iterator[None]:
    """Has an epoch whose every step was skipped report NaN, as it does in Keras.

    What a skipped step added to the metrics is taken back, so nothing is left in them,
    and they would give 0, the best loss there is, to callbacks that compare epochs.
    """
    original = model.get_metrics_result
    is_told = False

    def get_metrics_result() -> Any:
        nonlocal is_told
        results = original()
        # A step that is traced asks too, where nothing can be known.
        if not tf.executing_eagerly() or not ours_of(model):
            return results
        if trainer.has_recorded_a_loss(model) or not any(
            int(optimizer.consecutive_skips) for optimizer in ours_of(model)
        ):
            return results
        if not is_told:
            is_told = True
            logging.warning(
                "No step of this epoch of model %r was applied: each had a gradient "
                "that is not finite, so its metrics are NaN. `tfamp.triage(model, "
                "batch)` finds the cause; where the data has NaN or infinities, mend "
                "it, and else keep the layer that overflows in float32 "
                "(`keep_float32=`) or lower the learning rate.",
                model.name,
            )
        return keras.tree.map_structure(lambda _: float("nan"), results)

    with replaced(model, get_metrics_result=get_metrics_result):
        yield


def _prepare(model: keras.Model) -> None:
    for prepare in BEFORE_TRAINING:
        prepare(model)


@contextlib.contextmanager
def around_run(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Explains errors of memory of a managed model, in `fit` where it is training.

    An error is raised as it came, with the explanation as a note; Python 3.10 has no
    notes, so there it is logged.
    """
    try:
        yield
    except Exception as error:
        if policy_of(model) is not None and is_out_of_memory(error):
            _add_note(error, model, training=training)
        raise


def _add_note(error: Exception, model: keras.Model, *, training: bool) -> None:
    # `fit` evaluates too: the inner one has explained it already.
    if getattr(error, _NOTED, False):
        return
    setattr(error, _NOTED, True)
    try:
        dtypes = structure.compute_dtypes(model)
        optimizer = getattr(model, "optimizer", None) if training else None
        held = {"weights": structure.bytes_of(model.weights)}
        if optimizer is not None:
            held["optimizer slots"] = structure.bytes_of(optimizer.variables)
        layers = [path for path, each, _ in structure.walk(model) if each is not model]
        text = explain(
            str(error),
            layers=layers,
            held=held,
            memory=machine_memory(),
            training=training,
            computes_in=dtypes.pop() if len(dtypes) == 1 else "",
        )
    except Exception as reason:  # whatever is asked of a full device may fail in turn
        logging.info("The error of memory could not be explained: %s", reason)
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.error("%s", text)


FIT_HOOKS = PatchSet(
    [
        *trainer.run_patches(_guarded, _watched, _guarded_run),
        *replicas.patches(),
        *epochs.order_patches(),
    ]
)
