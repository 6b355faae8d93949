"""The steps of one model under MicroBatches: whole while they fit, in parts after."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.callbacks._timed_iterator import ITERATORS
from tfamp.callbacks.micro_batches import parts, text
from tfamp.callbacks.micro_batches.gradients import Gradients, only_after_gradients
from tfamp.callbacks.micro_batches.state import StateBefore
from tfamp.callbacks.nan_recovery.signs import was_skipped
from tfamp.keras_hooks import around_training, trainer
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.records.checks import first_line


@dataclasses.dataclass(frozen=True)
class BatchSplit:
    """One time that a batch did not fit into memory.

    Attributes:
        epoch: Counted from 0.
        step: Batches trained in this `fit` before it.
        examples: Examples in the batch, of all replicas.
        splits: Micro-batches that it was cut into then, and others of its size.
        error: What was raised, its class and first line.
    """

    epoch: int
    step: int
    examples: int
    splits: int
    error: str


class Course:
    """Runs the steps of a model, and cuts batches that do not fit.

    Args:
        model: A compiled model in `fit`.
        max_splits: Most micro-batches of a batch.
        on_split: Called with each `BatchSplit`.

    Attributes:
        limit: Most examples that a replica trains on at once; None for any number.
        splits: Micro-batches of the last batch.
        epoch: The present epoch, from 0.
        step: Batches trained in this `fit`.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        max_splits: int,
        on_split: Callable[[BatchSplit], None],
    ) -> None:
        self.limit: int | None = None
        self.splits = 1
        self.epoch = self.step = 0
        self._model, self._max_splits, self._on_split = model, max_splits, on_split
        self._largest = 0
        self._function: Any = None
        self.trace_anew()

    def begin(self) -> None:
        """Notes that a `fit` begins."""
        self.epoch = self.step = 0
        self._largest = 0

    def trace_anew(self) -> None:
        """Drops all that was traced."""
        self._whole: Any = None
        self._gradients: Gradients | None = None
        self._before: StateBefore | None = None
        self._tables: set[Any] = set()
        self._largest = 0

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands for the training function: trains on the batches of an execution."""
        if function is not self._function:
            self.trace_anew()  # compiled anew, or given other dtypes
            self._function = function
        self._prepare(iterator)
        if not isinstance(iterator, ITERATORS):
            return self._whole(next(iter(iterator)))
        logs: Any = None
        for done in range(int(self._model.steps_per_execution or 1)):
            try:
                data = iterator.get_next()
            except tf.errors.OutOfRangeError:
                if not done:
                    raise
                break
            logs = self._step(parts.without_optionals(data))
            self.step += 1
        return logs

    def _prepare(self, iterator: Any) -> None:
        if self._whole is None:
            _build(self._model, getattr(iterator, "element_spec", None))
            self._whole = around_training.on_batch(self._model)
            self._before = StateBefore(self._model)

    def _step(self, data: Any) -> Any:
        before, strategy = self._before, self._model.distribute_strategy
        if before is None:
            raise RuntimeError("No training is under way.")
        size = _num_elements(strategy, data)
        is_first = size > self._largest
        num_parts = 1
        if self.limit is not None:
            examples = parts.sizes(strategy, data)
            num_parts = parts.num_parts(examples, self.limit, self._max_splits)
        before.hold(is_first=is_first)
        while True:
            try:
                logs = self._train(data, num_parts)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                num_parts = self._next(error, data, num_parts)
            else:
                break
            # Here the error is gone, and the tensors that its traceback held.
        before.let_go()
        self._largest = max(self._largest, size)
        self.splits = num_parts
        return logs

    def _train(self, data: Any, num_parts: int) -> Any:
        before = self._before
        if num_parts == 1 and before is not None:
            optimizer = self._model.optimizer
            with only_after_gradients(optimizer, before.begun, self._tables.add):
                return self._whole(data)
        return self._train_in_parts(data, num_parts)

    def _train_in_parts(self, data: Any, num_parts: int) -> Any:
        model, before = self._model, self._before
        if before is None:
            return None
        if self._gradients is None:
            self._gradients = Gradients(model, before.begun, self._tables)
        gradients = self._gradients
        strategy = model.distribute_strategy
        examples = parts.sizes(strategy, data)
        gradients.clear()
        seen, tables = [], []
        for piece in parts.cut(strategy, data, examples, num_parts):
            logs, rows = gradients.add(piece)
            seen.append(_of_all_replicas(strategy, logs))
            tables.append(rows)
        counted = [
            sum(end - begin for begin, end in edges)
            for edges in zip(
                *(parts.bounds(length, num_parts) for length in examples), strict=True
            )
        ]
        logs = _logs_of_all(model, seen, counted)
        gradients.apply(_first_array(data), tables)
        if was_skipped(model):
            before.restore_statistics()
        return logs

    def _next(self, error: Exception, data: Any, num_parts: int) -> int:
        """Puts the model back, and returns into how many parts the batch goes next.

        Raises:
            Exception: There is no way on; of the error's class where that can be made.
        """
        model, before = self._model, self._before
        strategy = model.distribute_strategy
        has_begun = before is not None and before.has_begun()
        if before is None or not before.restore():
            raise text.as_error(error, text.half_written(model)) from error
        try:
            examples = parts.sizes(strategy, data)
        except parts.CannotSplit as why:
            raise text.as_error(error, text.cannot_split(str(why))) from error
        most = min(self._max_splits, min(examples))
        wanted = min(2 * num_parts, most)
        if wanted <= num_parts or (num_parts > 1 and has_begun):
            sums = self._gradients.num_bytes if self._gradients is not None else 0
            raise text.as_error(
                error,
                text.exhausted(
                    model,
                    examples=sum(examples),
                    num_parts=num_parts,
                    max_splits=self._max_splits,
                    in_update=has_begun,
                    sums_bytes=sums,
                ),
            ) from error
        self.limit = -(-max(examples) // wanted)
        self._on_split(
            BatchSplit(
                epoch=self.epoch,
                step=self.step,
                examples=sum(examples),
                splits=wanted,
                error=f"{type(error).__name__}: {first_line(error)}",
            )
        )
        return wanted


def _build(model: keras.Model, element_spec: Any) -> None:
    """Builds all that the first step would, as Keras does under a strategy.

    A variable that a traced function makes in its first call has no value where that
    call fails.
    """
    optimizer, strategy = model.optimizer, model.distribute_strategy
    # Whatever a model raises that only runs on tensors.
    with contextlib.suppress(Exception), strategy.scope():
        if element_spec is not None:
            trainer.build_from(model, element_spec)
        if model.built and not optimizer.built:
            optimizer.build(model.trainable_variables)


def _num_elements(strategy: tf.distribute.Strategy, data: Any) -> int:
    """Returns how many numbers a batch holds, of all replicas."""
    return sum(
        part.shape.num_elements() or 0
        for leaf in tf.nest.flatten(data, expand_composites=True)
        if leaf is not None
        for part in strategy.experimental_local_results(leaf)
        if tf.is_tensor(part)
    )


def _first_array(data: Any) -> Any:
    return next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)


def _of_all_replicas(strategy: tf.distribute.Strategy, logs: Any) -> Any:
    """Returns the means over the replicas, as Keras does with logs."""

    def mean(leaf: Any) -> Any:
        values = strategy.experimental_local_results(leaf)
        return leaf if len(values) == 1 else tf.reduce_mean(values, axis=0)

    return tf.nest.map_structure(mean, logs)


def _logs_of_all(model: keras.Model, seen: Sequence[Any], counted: list[int]) -> Any:
    """Returns the logs of a whole batch.

    Metrics have counted all micro-batches in the end. What is no metric, such as the
    bare loss of a `train_step` of one's own, is a mean over the examples.
    """
    last = seen[-1]
    if not isinstance(last, Mapping):
        return last
    metrics = model.get_metrics_result()
    logs = dict(last)
    for name, value in last.items():
        if name in metrics and _equal(metrics[name], value):
            continue
        with contextlib.suppress(TypeError, ValueError):  # no numbers
            total = sum(
                num * tf.cast(each[name], tf.float32)
                for num, each in zip(counted, seen, strict=True)
            )
            logs[name] = total / sum(counted)
    return logs


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) or isinstance(other, Mapping):
        return True
    return bool(tf.reduce_all(tf.cast(one, tf.float32) == tf.cast(other, tf.float32)))
