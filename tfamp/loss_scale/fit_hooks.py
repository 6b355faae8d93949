"""What `fit` does more where an optimizer is a `LossScaleOptimizer`.

A scale that the first steps cannot stand costs none of them. A skipped step leaves the
moving statistics as they were, and an epoch of nothing else reports NaN; a window that
is not full is applied at the end of an epoch; an error of TensorFlow becomes ours.
Replicas count by their examples and agree on moving statistics. Errors of memory of a
managed model are explained in `fit`, `evaluate` and `predict`.
"""

import contextlib
import functools
import importlib
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import (
    around_training,
    epochs,
    replicas,
    structure,
    trainer,
    trials,
)
from tfamp.keras_hooks.layers import CALLS, policy_of
from tfamp.keras_hooks.optimizers import optimizers_of, where_replicas_are_one
from tfamp.keras_hooks.patches import PatchSet, replaced
from tfamp.loss_scale import stops
from tfamp.loss_scale.rule import DEFAULT_SCALE
from tfamp.loss_scale.step import either, first_of, on_window
from tfamp.loss_scale.tape import HERE
from tfamp.machine.out_of_memory import is_out_of_memory

# Under XLA no error can be raised in the graph, so the counter is read every so
# many calls; each reading waits for the device.
_CALLS_BETWEEN_READINGS = 16
_STEPS_THAT_PROVE_A_SCALE = 10
_LOWER = 0.25  # what a scale is tried at next
_NOTED = "_tfamp_explained"

# What `tfamp.distribute.strategy()` made: all models train there as on one device.
STRATEGIES: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# What parts above this one do ahead of a model's training; ahead of `evaluate` and
# `predict` too; ahead of `fit` of a managed model, with its arguments by name; and a
# context around its `evaluate` or `predict`, by this name and with its arguments.
BEFORE_TRAINING: list[Callable[[keras.Model], None]] = []
BEFORE_RUN: list[Callable[[keras.Model], None]] = []
BEFORE_FIT: list[Callable[[keras.Model, Mapping[str, Any]], None]] = []
AROUND_PASS: list[
    Callable[
        [keras.Model, str, Mapping[str, Any]], contextlib.AbstractContextManager[None]
    ]
] = []
# Whether a model's first batch is wanted, and what is called ahead of the first trace
# with the model, that batch and what the trace knows of it; None where it is not had.
_Look = Callable[[keras.Model, Any, Any], None]
BEFORE_FIRST_BATCH: list[tuple[Callable[[keras.Model], bool], _Look]] = []
# More skipped steps of an epoch than these, and than this share of it, are told.
_SKIPS_THAT_ARE_FEW, _SKIPS_THAT_FIND_A_SCALE, _FEW = 2, 10, 0.1
_Values = list[tuple[Any, tf.Tensor]]


def ours_of(model: Any) -> list[Any]:
    """Returns the optimizers of a model that are a `LossScaleOptimizer` of tfamp."""
    return [o for o in optimizers_of(model) if hasattr(o, "scale_variables")]


def _weights_replicas(model: keras.Model) -> bool:
    """Returns whether a model has replicas that count by their examples.

    A model of which tfamp knows neither itself, nor its optimizer, nor its strategy
    stays as Keras has it.
    """
    strategy = model.distribute_strategy
    is_known = policy_of(model) is not None or strategy in STRATEGIES
    return strategy.num_replicas_in_sync > 1 and (is_known or bool(ours_of(model)))


def _values_of(variables: Iterable[tf.Variable]) -> _Values:
    """Returns TensorFlow's variables, each with a copy of its present value."""
    return [(v, tf.identity(v)) for v in variables]


def _put_back(values: _Values) -> None:
    """Gives variables their values back; inside of a replica, on it alone."""
    for variable, value in values:
        variable.assign(value)


def _around_step(
    model: keras.Model, train_step: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a training step that undoes what a skipped step did to the model."""

    @functools.wraps(train_step)
    def step(data: Any) -> Any:
        optimizers = ours_of(model)
        with replaced(CALLS, is_training=policy_of(model) is not None):
            return undoing(optimizers, data) if optimizers else sharing(data)

    def sharing(data: Any) -> Any:
        if not _weights_replicas(model):
            return train_step(data)
        with replicas.sharing(model, data):
            empty = replicas.is_empty()
            if empty is None:
                return train_step(data)
            # The moving statistics of no example are NaN. What replicas agree on is
            # not written by one of them.
            held = _values_of(
                v.value for v in _moving_state(model) if v.aggregation in (None, "none")
            )
            logs = train_step(data)
            either(empty, lambda: _put_back(held))
            return logs

    def undoing(optimizers: list[Any], data: Any) -> Any:
        _build(model, optimizers, data)
        skips = [o.scale_variables.read().skipped for o in optimizers]
        held = _values_of(v.value for v in _moving_state(model))
        metrics = _values_of(v.value for m in model.metrics for v in m.variables)
        accumulates = any(o.accumulates for o in optimizers)
        weight = replicas.batch_size_of(data) if accumulates else None
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(replaced(optimizer, leaves_stop_to_caller=True))
            stack.enter_context(replaced(HERE, in_step=True, weight=weight))
            logs = sharing(data)
        _undo_if_skipped(optimizers, skips, held, metrics)
        return logs

    return step


def _undo_if_skipped(
    optimizers: Sequence[Any], skips: Sequence[Any], held: _Values, metrics: _Values
) -> None:
    """Puts the state of a model back where any optimizer has skipped a step since.

    Metrics only where one of them is not finite: they forget a bad batch, and count one
    that only overflowed. Random numbers go on, as in stock Keras, so that the next step
    draws another mask.
    """

    def any_skipped(skips: Sequence[Any]) -> tf.Tensor:
        now = [o.scale_variables.read().skipped for o in optimizers]
        return tf.reduce_any(tf.stack(now) > tf.stack(list(skips)))

    floating = [v for v, value in metrics if value.dtype.is_floating]
    if floating:
        finite = [tf.reduce_all(tf.math.is_finite(v)) for v in floating]
        is_bad = ~tf.reduce_all(tf.stack(finite))
        # On this replica, whose part of the metrics is its own.
        either(is_bad & any_skipped(skips), lambda: _put_back(metrics))
    variables = [variable for variable, _ in held]

    def merged(skips: Any, values: Any) -> None:
        def restore() -> None:
            done = list(map(write, variables, values))
            after = [each for each in done if isinstance(each, tf.Operation)]
            for optimizer in optimizers:
                if optimizer.built:  # it has stepped
                    stops.stop_if_due(optimizer, after)

        either(any_skipped([first_of(skip) for skip in skips]), restore)

    def write(variable: Any, value: Any) -> Any:
        if tf.distribute.in_cross_replica_context():
            return tf.distribute.get_strategy().extended.update(
                variable, lambda v, x: v.assign(x, read_value=False), args=(value,)
            )
        return variable.assign(value, read_value=False)

    where_replicas_are_one(merged, list(skips), [value for _, value in held])


def _moving_state(model: keras.Model) -> list[Any]:
    """Returns moving statistics, and the states of recurrent layers.

    Keras lists those under no model.
    """
    held = list(model.non_trainable_weights)
    for _, layer, _ in structure.walk(model):
        if getattr(layer, "stateful", False):
            states = structure.flatten(getattr(layer, "states", None))
            held += [v for v in states if isinstance(v, keras.Variable)]
    return list({id(v): v for v in held}.values())


def _build(model: keras.Model, optimizers: Sequence[Any], data: Any) -> None:
    """Builds what is not built, so that its variables can be held from the start."""
    if model.built and all(o.built for o in optimizers):
        return
    hidden: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if model.run_eagerly:  # where Keras builds no model ahead of its first step
        hidden = trials.without_python_effects(model)
    # A model that only runs on tensors is built by its first call.
    with contextlib.suppress(Exception), hidden:
        trainer.build_from(model, data)


def _around_function(
    model: keras.Model, function: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a training function that looks at batches and counters between calls.

    At the first batch, for whoever wants it; in the first steps, for a scale that is
    too high; under XLA now and then, for a training that was stopped.
    """
    is_managed = BEFORE_FIRST_BATCH and policy_of(model) is not None
    if not ours_of(model) and not is_managed:
        return function
    calls, is_proven = 0, model.run_eagerly or tf.config.functions_run_eagerly()
    touched: list[tf.Variable] = []

    @functools.wraps(function)
    def call(iterator: Any) -> Any:
        nonlocal calls, is_proven, touched
        if not tf.executing_eagerly():  # as a part of another function
            return function(iterator)
        due = BEFORE_FIRST_BATCH if is_managed and calls == 0 else ()
        looks = [look for is_due, look in due if is_due(model)]
        # An optimizer that never steps proves nothing.
        steps = calls * model.steps_per_execution
        is_proven = is_proven or steps >= _STEPS_THAT_PROVE_A_SCALE
        is_proven = is_proven or not _is_unproven(model)
        calls += 1
        logs = None
        is_seen = isinstance(iterator, tf.data.Iterator | types.GeneratorType)
        if is_seen and (looks or not is_proven):  # the steps of a call one by one
            for batch in itertools.islice(iterator, model.steps_per_execution):
                # A model is built for any number of examples, where its trace will be.
                spec = getattr(iterator, "element_spec", batch)
                while looks:
                    looks.pop(0)(model, batch, spec)
                run = functools.partial(_on_one, function, batch, iterator)
                if is_proven:
                    logs = run()
                    continue
                if calls == 1 and not touched:
                    _build(model, ours_of(model), spec)
                    touched = _variables_of(function, batch, iterator, spec)
                logs = _until_applied(model, run, batch, touched)
        for look in () if is_seen else looks:
            look(model, None, None)
        if logs is None:  # where there is no batch, the function says so itself
            logs = function(iterator)
        if model.jit_compile and calls % _CALLS_BETWEEN_READINGS == 0:
            _raise_if_stopped(model)
        return logs

    return call


def _on_one(function: Callable[..., Any], batch: Any, iterator: Any) -> Any:
    """Calls a training function on one batch, by an iterator of the same type."""
    return function(_iterator_of(batch, iterator))


def _iterator_of(batch: Any, like: Any) -> Any:
    """Returns an iterator over one batch that a training function takes for `like`."""
    if not isinstance(like, tf.data.Iterator):
        return (each for each in [batch])
    made = iter(tf.data.Dataset.from_tensors(batch))
    parts = tf.nest.flatten(made, expand_composites=True)
    return tf.nest.pack_sequence_as(like, parts, expand_composites=True)


def _variables_of(
    function: Callable[..., Any], batch: Any, iterator: Any, spec: Any
) -> list[tf.Variable]:
    """Returns the variables that a training function reads or writes.

    It is traced for such batches, which makes what it uses, and nothing of it is run.
    What is wrong with it is said here: TensorFlow makes a function that has raised as
    it made variables one that does nothing.
    """

    def traced(batches: Any) -> None:
        # Keras asks the result for its value.
        with contextlib.suppress(tf.errors.OperatorNotAllowedInGraphError):
            function(batches)

    for run, given in (
        (lambda: traced(_iterator_of(batch, iterator)), ()),
        (lambda data: traced([data]), (spec,)),
    ):
        ahead = tf.function(run, autograph=False)
        graph = ahead.get_concrete_function(*given).graph
        # From 3.16 on Keras asks an iterator for a value before it traces.
        if graph.variables or not graph.get_operations():
            break
    return list(graph.variables)


def _is_unproven(model: keras.Model) -> bool:
    """Returns whether a scale that nobody has chosen has yet to be proved by steps."""
    ours = ours_of(model)
    return len(ours) == len(optimizers_of(model)) and any(
        optimizer.initial_scale == DEFAULT_SCALE
        and not optimizer.is_frozen  # nor static
        and optimizer.scale_variables.numbers().judged < _STEPS_THAT_PROVE_A_SCALE
        for optimizer in ours
    )


def _until_applied(
    model: keras.Model, run: Callable[[], Any], batch: Any, touched: list[tf.Variable]
) -> Any:
    """Takes a step, again at a lower scale if that was why an optimizer skipped one.

    A skipped step has changed no weight. A batch for which no scale is low enough is
    skipped at the first one, as any later batch is.
    """
    ours = [optimizer for optimizer in ours_of(model) if optimizer.built]
    before = [o.scale_variables.numbers() for o in ours]

    def is_lost() -> bool:
        now = [o.scale_variables.numbers() for o in ours]
        return any(
            0 < after.skipped - then.skipped == after.judged - then.judged
            for after, then in zip(now, before, strict=True)
        )

    variables = touched
    if type(model).train_step is keras.Model.train_step:  # a skipped step left them
        inner = [v for o in ours for v in o.inner_optimizer.variables]
        left = {id(v.value) for v in (*model.trainable_variables, *inner)}
        variables = [v for v in touched if id(v) not in left]
    held = _values_of(variables)
    logs = run()
    parts = tf.nest.flatten(batch, expand_composites=True)
    floats = [x for x in parts if tf.is_tensor(x) and x.dtype.is_floating]
    # No scale helps where the batch itself is not finite.
    if not is_lost() or not all(
        bool(tf.reduce_all(tf.math.is_finite(x))) for x in floats
    ):
        return logs
    after, scale = _values_of(variables), _LOWER * max(b.scale for b in before)
    while scale >= max(o.rule.min_scale for o in ours):
        _put_back(held)
        for optimizer, then in zip(ours, before, strict=True):
            optimizer.put(then._replace(scale=min(scale, then.scale)))
        lower = run()
        if not is_lost():
            logging.info(
                "The loss scale of model %r begins at %g, as the gradients of its "
                "first batches overflow at %g.",
                *(model.name, scale, before[0].scale),
            )
            return lower
        scale *= _LOWER
    _put_back(after)
    return logs


def _raise_if_stopped(model: keras.Model) -> None:
    for optimizer in ours_of(model):
        error = stops.late_error(optimizer)
        if error is not None:
            raise error


class _EndOfEpoch(keras.callbacks.Callback):
    """Brings weights up to date before anything looks at them.

    What is left of a window is applied. Each replica keeps moving statistics of its own
    part of a batch, and files show those of the first: all get the mean.
    """

    _average: Any = None
    _before: Sequence[Any] = ()  # the counters of each optimizer as the epoch began
    _is_told = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes how many steps were skipped before."""
        self._before = [o.scale_variables.numbers() for o in ours_of(self.model)]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Brings weights up to date, and raises what XLA could not."""
        self.on_test_begin()
        self._tell_of_skips()
        if self.model.jit_compile:
            _raise_if_stopped(self.model)

    def _tell_of_skips(self) -> None:
        """Says once that many steps of an epoch were skipped, as no metric shows."""
        now = [o.scale_variables.numbers() for o in ours_of(self.model)]
        for after, then in zip(now, self._before, strict=False):
            steps, lost = after.judged - then.judged, after.skipped - then.skipped
            # A scale that is found at the beginning may cost some steps.
            few = _SKIPS_THAT_ARE_FEW if then.judged else _SKIPS_THAT_FIND_A_SCALE
            if not self._is_told and few < lost < steps and lost > _FEW * steps:
                self._is_told = True
                logging.warning(
                    "%d of the %d steps of this epoch of model %r were skipped, as "
                    "their gradients are not finite, and count in no metric. "
                    "`tfamp.triage(model, batch)` finds the cause: data with NaN, or "
                    "values beyond float16's 65504, which to scale or to give "
                    "'mixed_bfloat16'.",
                    *(lost, steps, self.model.name),
                )

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Brings weights up to date before the validation inside `fit`."""
        for optimizer in ours_of(self.model):
            optimizer.flush()
        self._average = self._average or replicas.averaging(self.model)
        self._average()


@contextlib.contextmanager
def _guarded_fit(model: keras.Model, arguments: dict[str, Any]) -> Iterator[None]:
    optimizers = ours_of(model)
    if optimizers or _weights_replicas(model):
        given = arguments.get("callbacks")
        given = getattr(given, "callbacks", given)  # of a list of Keras's own
        others = tf.nest.flatten(given) if given else []
        arguments["callbacks"] = [_EndOfEpoch(), *others]
    for optimizer in optimizers:
        optimizer.num_stops_seen = optimizer.num_stops
    try:
        yield
    except BaseException:
        for optimizer in ours_of(model):
            on_window(optimizer, applies=False)  # nothing leaks into the next `fit`
        raise


@contextlib.contextmanager
def _our_errors() -> Iterator[None]:
    """Turns TensorFlow's error of a stopped training into a `LossScaleError`."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        text = stops.found_in(error.message)
        if text is None:
            raise
        raise stops.LossScaleError(text) from error


@contextlib.contextmanager
def _nan_without_a_step(model: keras.Model) -> Iterator[None]:
    """Has an epoch whose every step was skipped report NaN, as it does in Keras.

    What a skipped step added to the metrics is taken back, so nothing is left in them,
    and they would give 0, the best loss there is, to callbacks that compare epochs.
    """
    original, reset = model.get_metrics_result, model.reset_metrics
    is_told = False

    def applied() -> list[int]:
        return [int(optimizer.applied_steps) for optimizer in ours_of(model)]

    before = applied()

    def reset_metrics() -> None:  # as an epoch begins
        nonlocal before
        before = applied()
        reset()

    def get_metrics_result() -> Any:
        nonlocal is_told
        results = original()
        # A step that is traced asks too, where nothing can be known.
        is_asked = tf.executing_eagerly() and trainer.examples_recorded(model) == 0
        has_skipped = is_asked and any(int(o.consecutive_skips) for o in ours_of(model))
        # A `train_step` of one's own may count no examples here.
        if not has_skipped or applied() != before:
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

    own = {"get_metrics_result": get_metrics_result, "reset_metrics": reset_metrics}
    with replaced(model, **own):
        yield


@contextlib.contextmanager
def _explaining_memory(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Explains errors of memory of a managed model, in a note of the error.

    Python 3.10 has no notes, so there it is logged.
    """
    try:
        yield
    except Exception as error:
        is_known = getattr(error, _NOTED, False)  # `fit` evaluates too
        if policy_of(model) is not None and not is_known and is_out_of_memory(error):
            setattr(error, _NOTED, True)
            # Whatever is asked of a full device may fail in turn.
            with contextlib.suppress(Exception):
                explained = importlib.import_module("tfamp.memory.explained")
                text = explained.text(error, model, training=training)
                getattr(error, "add_note", logging.error)(text)
        raise


@contextlib.contextmanager
def _around_run(
    model: keras.Model, name: str, arguments: dict[str, Any]
) -> Iterator[None]:
    """Surrounds `fit`, `train_on_batch`, `evaluate` or `predict` of a model."""
    for prepare_run in BEFORE_RUN:
        prepare_run(model)
    is_fit = name == "fit"
    with contextlib.ExitStack() as stack:
        if is_fit and policy_of(model) is not None:
            for prepare_fit in BEFORE_FIT:
                prepare_fit(model, arguments)
        for around_pass in AROUND_PASS if name in ("evaluate", "predict") else ():
            stack.enter_context(around_pass(model, name, arguments))
        if name != "train_on_batch":
            stack.enter_context(_explaining_memory(model, training=is_fit))
        if is_fit or name == "train_on_batch":
            stack.enter_context(
                around_training.running(model, arguments if is_fit else None)
            )
            for prepare in BEFORE_TRAINING:
                prepare(model)
            stack.enter_context(_our_errors())
        if is_fit:
            stack.enter_context(_guarded_fit(model, arguments))
            stack.enter_context(_nan_without_a_step(model))
        yield


FIT_HOOKS = PatchSet(
    [
        *trainer.run_patches(_around_step, _around_function, _around_run),
        *replicas.patches(),
        *epochs.order_patches(),
    ]
)
