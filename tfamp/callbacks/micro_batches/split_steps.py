"""The steps of one model under MicroBatches: whole while they fit, in parts after."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.callbacks._timed_iterator import ITERATORS, without_optionals
from tfamp.callbacks.micro_batches.gradients import (
    CannotSplit,
    Gradients,
    bounds,
    cut,
    num_splits,
    only_after_gradients,
    sizes,
)
from tfamp.callbacks.micro_batches.state import StateBefore
from tfamp.keras_hooks import around_training, structure, trainer
from tfamp.machine.out_of_memory import is_out_of_memory
from tfamp.records.checks import first_line
from tfamp.records.units import format_bytes
from tfamp.stepping.snapshots import optimizers_of, was_skipped

_REMEDIES = (
    "Store less for the backward pass by `tfamp.remat(model)`, compute in half the "
    'bytes by `tfamp.enable("mixed_bfloat16")`, and on a GPU set '
    "TF_GPU_ALLOCATOR=cuda_malloc_async against fragments, or let processes share it "
    "by `tf.config.experimental.set_memory_growth`."
)


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


class SplitSteps:
    """Runs the steps of a model, and cuts batches that do not fit into memory.

    A replica trains on `limit` examples at once, any number where that is None. `step`
    counts the batches of this `fit`, and `splits` are the micro-batches of the last
    one. `on_split` is called with each `BatchSplit`.
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
        self._before: Any = None
        self._tables: set[Any] = set()
        self._largest = 0

    def call(self, function: Callable[[Any], Any], iterator: Any) -> Any:
        """Stands for the training function: trains on the batches of an execution."""
        if function is not self._function:
            self.trace_anew()  # compiled anew, or given other dtypes
            self._function = function
        if self._whole is None:
            _build(self._model, getattr(iterator, "element_spec", None))
            self._whole = around_training.on_batch(self._model)
            self._before = StateBefore(self._model)
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
            logs = self._step(without_optionals(data))
            self.step += 1
        return logs

    def _step(self, data: Any) -> Any:
        before, strategy = self._before, self._model.distribute_strategy
        size = _num_elements(strategy, data)
        is_first = size > self._largest
        num_parts = 1
        if self.limit is not None:
            examples = sizes(strategy, data)
            num_parts = num_splits(examples, self.limit, self._max_splits)
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
        if num_parts > 1:
            return self._train_in_parts(data, num_parts)
        optimizer, begun = self._model.optimizer, self._before.begun
        with only_after_gradients(optimizer, begun, self._tables.add):
            return self._whole(data)

    def _train_in_parts(self, data: Any, num_parts: int) -> Any:
        model, before = self._model, self._before
        if self._gradients is None:
            self._gradients = Gradients(model, before.begun, self._tables)
        gradients = self._gradients
        strategy = model.distribute_strategy
        examples = sizes(strategy, data)
        gradients.clear()
        seen, tables = [], []
        for piece in cut(strategy, data, examples, num_parts):
            logs, rows = gradients.add(piece)
            seen.append(_of_all_replicas(strategy, logs))
            tables.append(rows)
        edges = [bounds(length, num_parts) for length in examples]
        counted = [
            sum(end - begin for begin, end in each) for each in zip(*edges, strict=True)
        ]
        logs = _logs_of_all(model, seen, counted)
        first = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
        gradients.apply(first, tables)
        if was_skipped(model):
            before.restore_statistics()
        return logs

    def _next(self, error: Exception, data: Any, num_parts: int) -> int:
        """Puts the model back, and returns into how many parts the batch goes next.

        Where there is no way on, it raises an error of the class of `error`, if that
        can be made.
        """
        model, before = self._model, self._before
        strategy = model.distribute_strategy
        has_begun = before.has_begun()
        if not before.restore():
            raise as_error(
                error,
                f"A step of {model.name!r} ran out of memory while its weights were "
                "written, or made variables before it did; expected it to before that, "
                "since then nothing is lost. The weights may be those of half an "
                "update: go back to a checkpoint of `tfamp.callbacks.NanRecovery` or "
                "`tfamp.callbacks.Resume`, and choose a smaller batch size; "
                "build the model and its optimizer before `fit`.",
            ) from error
        try:
            examples = sizes(strategy, data)
        except CannotSplit as why:
            raise as_error(
                error,
                f"A batch did not fit into memory, and cannot be split: {why}. Choose "
                f"a smaller batch size. {_REMEDIES}",
            ) from error
        most = min(self._max_splits, min(examples))
        wanted = min(2 * num_parts, most)
        if wanted <= num_parts or (num_parts > 1 and has_begun):
            text = self._exhausted(sum(examples), num_parts, in_update=has_begun)
            raise as_error(error, text) from error
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

    def _exhausted(self, examples: int, num_parts: int, *, in_update: bool) -> str:
        """Returns the text where a batch fits in no number of parts."""
        model = self._model
        num_replicas = model.distribute_strategy.num_replicas_in_sync
        if in_update:
            what = (
                "The update of the weights does not fit into memory, after the "
                f"gradients of {num_parts} micro-batches did; expected it to, and "
                "smaller ones would not change it"
            )
        elif num_parts >= self._max_splits:
            what = (
                f"A batch of {examples} examples does not fit into memory as "
                f"{num_parts} micro-batches; expected it to with "
                f"`max_splits={self._max_splits}`"
            )
            if examples > num_parts * num_replicas:
                what += ", which may be larger"
        else:
            what = (
                f"A batch of {examples} examples does not fit into memory as "
                f"{num_parts} micro-batches, down to one example on a replica; "
                "expected one to fit"
            )
        weights = structure.bytes_of(model.variables)
        slots = sum(structure.bytes_of(o.variables) for o in optimizers_of(model))
        num_bytes = self._gradients.num_bytes if self._gradients is not None else 0
        sums = f", {format_bytes(num_bytes)} sums of gradients" if num_bytes else ""
        return (
            f"{what}. On a device {format_bytes(weights)} are weights, "
            f"{format_bytes(slots)} optimizer state{sums}; the rest are activations "
            "and what else runs there. The model is as it was before the step. "
            f"{_REMEDIES}"
        )


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


def as_error(error: Exception, message: str) -> Exception:
    """Returns an error that is caught wherever `error` is, with another text."""
    message = f"{message} The error was: {first_line(error)}"
    if isinstance(error, tf.errors.OpError):
        return tf.errors.ResourceExhaustedError(error.node_def, error.op, message)
    if isinstance(error, MemoryError):
        return MemoryError(message)
    return tf.errors.ResourceExhaustedError(None, None, message)
