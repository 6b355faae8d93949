"""The care that `fit` takes where the optimizer is a `LossScaleOptimizer`.

A skipped step leaves the moving statistics as they were; a window that is not full
is applied at the end of an epoch; an error of TensorFlow becomes ours.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfamp._patch import HeldPatches
from tfamp.keras_hooks import fitting, structure
from tfamp.keras_hooks.optimizers import in_xla, variables_written
from tfamp.loss_scale import errors
from tfamp.loss_scale.branches import (
    either,
    first_of,
    stop_if_due,
    where_replicas_are_one,
)
from tfamp.runs.caring import around_run

# Under XLA no error can be raised in the graph, so the counter is read every so
# many calls; each reading waits for the device.
_CALLS_BETWEEN_READINGS = 16


class _Microbatch(threading.local):
    """The number of examples in the batch being trained on, in this thread."""

    weight: Any = None


_MICROBATCH = _Microbatch()


def microbatch_weight() -> Any:
    """Returns the weight of the present microbatch: its size in `fit`, else 1."""
    weight = _MICROBATCH.weight
    return tf.constant(1.0) if weight is None else weight


def _ours(model: Any) -> Any:
    """Returns a model's optimizer where it is a `LossScaleOptimizer` of tfamp."""
    optimizer = getattr(model, "optimizer", None)
    return optimizer if hasattr(type(optimizer), "last_step_skipped") else None


def _guarded(model: keras.Model, train_step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training step that undoes what a skipped step did to the model."""

    @functools.wraps(train_step)
    def step_and_undo(data: Any) -> Any:
        optimizer = _ours(model)
        if optimizer is None:
            return train_step(data)
        _build(model, optimizer, data)
        held = _moving_state(model)
        before = [tf.convert_to_tensor(v.value) for v in held]
        num_skipped = optimizer.tally.read().counters.skipped
        weight = fitting.batch_size_of(data) if optimizer.accumulates else None
        optimizer.leaves_stop_to_caller, _MICROBATCH.weight = True, weight
        # Under XLA each is a select, so only what is written is undone.
        watch = variables_written() if in_xla() else contextlib.nullcontext()
        try:
            with watch as written:
                logs = train_step(data)
        finally:
            optimizer.leaves_stop_to_caller, _MICROBATCH.weight = False, None
        if written is not None:
            pairs = list(zip(held, before, strict=True))
            pairs = [pair for pair in pairs if id(pair[0].value) in written]
            held, before = [v for v, _ in pairs], [b for _, b in pairs]
        _undo(optimizer, held, before, num_skipped)
        return logs

    return step_and_undo


def _moving_state(model: keras.Model) -> list[Any]:
    """Returns what a step changes beside the weights that the optimizer trains.

    Moving statistics, and the states of recurrent layers, which Keras lists under no
    model. Random numbers go on, as they do in stock Keras, so that the next step draws
    another mask.
    """
    held = list(model.non_trainable_weights)
    for _, layer, _ in structure.walk(model):
        if getattr(layer, "stateful", False):
            states = structure.flatten(getattr(layer, "states", None))
            held += [v for v in states if isinstance(v, keras.Variable)]
    return list({id(v): v for v in held}.values())


def _build(model: keras.Model, optimizer: Any, data: Any) -> None:
    """Builds what is not built, so that its variables can be held from the start."""
    if model.built and optimizer.built:
        return
    try:
        fitting.build_from(model, data)
    except Exception:  # a model that only runs on tensors is built by its first call
        return


def _undo(optimizer: Any, held: list[Any], before: list[Any], num_skipped: Any) -> None:
    if not optimizer.built:
        return
    values = [v.value for v in held]

    def merged(strategy: Any, before: Any, num_skipped: Any) -> None:
        def restore() -> None:
            done = []
            for variable, value in zip(values, before, strict=True):
                write = functools.partial(_write, strategy)
                done.append(write(variable, value))
            stop_if_due(optimizer, [op for op in done if op is not None])

        now = optimizer.tally.read().counters
        is_skipped = now.skipped > first_of(strategy, num_skipped)
        either(is_skipped, restore, _nothing)

    where_replicas_are_one(merged, before, num_skipped)


def _write(strategy: Any, variable: Any, value: Any) -> Any:
    if tf.distribute.in_cross_replica_context():
        done = strategy.extended.update(
            variable, lambda v, x: v.assign(x, read_value=False), args=(value,)
        )
    else:
        done = variable.assign(value, read_value=False)
    return done if isinstance(done, tf.Operation) else None


def _nothing() -> None:
    return None


def _watched(model: keras.Model, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a training function that reads the counters now and then, under XLA."""
    if not model.jit_compile or _ours(model) is None:
        return function
    calls = 0

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        nonlocal calls
        outputs = function(iterator)
        calls += 1
        if calls % _CALLS_BETWEEN_READINGS == 0:
            _raise_if_stopped(model)
        return outputs

    return call


def _raise_if_stopped(model: keras.Model) -> None:
    optimizer = _ours(model)
    if optimizer is not None and optimizer.was_stopped():
        raise optimizer.late_stop_error()


class _EndOfEpoch(keras.callbacks.Callback):
    """Applies what is left of a window before anything looks at the weights."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Flushes the window, and raises what XLA could not."""
        self._flush()
        if self.model.jit_compile:
            _raise_if_stopped(self.model)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Flushes the window before the validation inside `fit`."""
        self._flush()

    def _flush(self) -> None:
        optimizer = _ours(self.model)
        if optimizer is not None:
            optimizer.flush()


@contextlib.contextmanager
def _fit_with_care(model: keras.Model, callbacks: Any) -> Iterator[Any]:
    if _ours(model) is None:
        with _our_errors(model):  # of optimizers that a `train_step` has of its own
            yield callbacks
        return
    ours = _EndOfEpoch()
    given = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    if given is None:
        callbacks = [ours, *tf.nest.flatten(callbacks)] if callbacks else [ours]
    else:
        ours.set_model(model)
        given.callbacks.insert(0, ours)
    _ours(model).forget_stops()
    try:
        with _our_errors(model):
            yield callbacks
    except BaseException:
        _ours(model).discard()  # nothing of this `fit` leaks into the next
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
        text = errors.found_in(error.message)
        if text is None:
            raise
        raise errors.LossScaleError(text) from error


FIT_HOOKS = HeldPatches(
    fitting.patches(_guarded, _watched, _fit_with_care, _our_errors, around_run)
)
