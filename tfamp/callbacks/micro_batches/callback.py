"""`MicroBatches`: goes on where a batch does not fit into memory, in smaller parts."""

from typing import Any

import keras
from absl import logging

from tfamp.callbacks.micro_batches.course import BatchSplit, Course
from tfamp.callbacks.micro_batches.text import (
    check_model,
    tell_of_single_steps,
    warn_of_split,
)
from tfamp.keras_hooks import around_training
from tfamp.loss_scale.fit.hooks import FIT_HOOKS
from tfamp.records import checks


class MicroBatches(keras.callbacks.Callback):
    """Trains a batch that does not fit into memory as micro-batches, with one update.

    Where a step of `fit` runs out of memory, the model is put back to before it, bit by
    bit, and the same batch is trained again in 2 parts, then 4, and so on, on all
    replicas together. Their gradients are added up in float32, weighted by the sizes of
    the parts, and the optimizer is given the sum once: the effective batch stays what
    it was, and so do learning rate, `iterations`, schedules, clipping, averages, loss
    scale and an accumulation of your own. Metrics and losses in the logs are those of
    the whole batch, and callbacks see one step. A log line says so, and later batches
    are cut to the same size at once, in later calls of `fit` too. Batches that are
    smaller than that stay whole. It stands in any order beside other callbacks.

    What differs from the whole batch, as the model sees the parts one by one:

    - BatchNormalization normalizes by the statistics of a micro-batch, and its moving
      statistics move once for each;
    - random numbers, as of Dropout, are drawn for each;
    - a loss with `reduction="mean_with_sample_weight"`, or masked time steps, divides
      by the weights of a micro-batch, so that results differ where these sums do;
    - a `train_step` of your own runs once for each: what it writes besides metrics and
      by its optimizer is written as often.

    Weights and optimizer state are copied to the host's memory before the first step
    of a `fit`, and of a larger batch than any before, as that is where memory runs out.
    Later a step is taken back where it had not begun to write to its weights; its
    update begins only when all gradients are there. Else, as where the update itself
    does not fit, training ends with an error.

    Cost: until a batch does not fit, up to a millisecond a step, also of those that
    `steps_per_execution` would join, the copy, and in graph mode gradients are kept
    until the last of them is there. Then a copy of the gradients in float32 on each
    device, and the time of smaller batches.

    Args:
        max_splits: Most micro-batches that a batch is cut into. Where even these, or
            single examples, do not fit, the error of TensorFlow is raised with what
            holds memory and what helps.

    Attributes:
        splits: Micro-batches of the last batch; 1 where it was whole.
        events: A `BatchSplit` for each time that a batch did not fit, in the last
            `fit`; also in `model.history.micro_batches`.

    Raises:
        TypeError: `max_splits` is no integer.
        ValueError: `max_splits` is below 2; or, when training begins, the model has
            several optimizers, a loss that is no mean over the batch, or runs on
            several workers.

    Example:
        >>> class Small(keras.Model):  # as if no more than 4 examples fitted
        ...     def train_step(self, data):
        ...         if len(data[0]) > 4:
        ...             raise MemoryError("that is too much")
        ...         return super().train_step(data)
        >>> inputs = keras.Input((2,))
        >>> model = Small(inputs, keras.layers.Dense(1)(inputs))
        >>> model.compile("sgd", "mse", run_eagerly=True)
        >>> data, micro_batches = keras.ops.ones((16, 2)), MicroBatches()
        >>> run = model.fit(
        ...     data, data, batch_size=8, verbose=0, callbacks=[micro_batches]
        ... )
        >>> micro_batches.splits, int(model.optimizer.iterations)
        (2, 2)
        >>> [(event.examples, event.splits) for event in micro_batches.events]
        [(8, 2)]
    """

    def __init__(self, max_splits: int = 64) -> None:
        super().__init__()
        self.max_splits = checks.positive_int("max_splits", max_splits, minimum=2)
        self.events: tuple[BatchSplit, ...] = ()
        self._course: Course | None = None
        self._course_model: keras.Model | None = None
        self._member: around_training.Member | None = None
        FIT_HOOKS.hold(self)

    @property
    def splits(self) -> int:
        """Micro-batches of the last batch; 1 where it was whole."""
        return 1 if self._course is None else self._course.splits

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the model's steps can be split, and takes its place in `fit`."""
        model = self.model
        check_model(model)
        tell_of_single_steps(model)
        self._leave()
        if self._course is None or self._course_model is not model:
            self._course = Course(
                model, max_splits=self.max_splits, on_split=self._note
            )
            self._course_model = model
        self._course.begin()
        self._member = around_training.join(
            model,
            self._close,
            place=around_training.Place.MICRO_BATCHES,
            call=self._course.call,
        )
        if not self._member.has_place:
            logging.warning(
                "A second MicroBatches in the same `fit` does nothing: use one."
            )
        self._tell(())

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Sees that it is in the place of the training function still."""
        if self._member is not None:
            self._member.surround()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        if self._course is not None:
            self._course.epoch = epoch

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Gives the training function back."""
        self._leave()

    def _leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    def _close(self, error: BaseException | None) -> None:
        self._member = None

    def _note(self, split: BatchSplit) -> None:
        warn_of_split(
            self.model, split, self.model.distribute_strategy.num_replicas_in_sync
        )
        self._tell((*self.events, split))

    def _tell(self, events: tuple[BatchSplit, ...]) -> None:
        self.events = events
        history = getattr(self.model, "history", None)
        if history is not None:
            history.micro_batches = events
