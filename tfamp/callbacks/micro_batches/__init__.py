"""`MicroBatches`: a batch that does not fit, trained in parts."""

from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.callbacks._fit_callback import FitCallback
from tfamp.callbacks.micro_batches.split_steps import BatchSplit, SplitSteps
from tfamp.keras_hooks import around_training, structure
from tfamp.records import checks
from tfamp.stepping.snapshots import optimizers_of

_NOT_MEANS = ("sum", "none", None)
_BY_WEIGHTS = "mean_with_sample_weight"


class MicroBatches(FitCallback):
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
        self._steps: SplitSteps | None = None
        self._stepped_model: keras.Model | None = None

    @property
    def splits(self) -> int:
        """Micro-batches of the last batch; 1 where it was whole."""
        return 1 if self._steps is None else self._steps.splits

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks that the model's steps can be split, and takes its place in `fit`."""
        model = self.model
        _check_model(model)
        num_steps = int(model.steps_per_execution or 1)
        if num_steps > 1 and not model.run_eagerly:
            logging.info(
                "The %d steps of an execution are a call each under MicroBatches, "
                "which goes back to a single one: callbacks see what they would "
                "without it, and a step takes up to a millisecond more.",
                num_steps,
            )
        self._leave()
        if self._steps is None or self._stepped_model is not model:
            self._steps = SplitSteps(
                model, max_splits=self.max_splits, on_split=self._add
            )
            self._stepped_model = model
        self._steps.begin()
        place = around_training.Place.MICRO_BATCHES
        if not self._join(place=place, call=self._steps.call):
            logging.warning(
                "A second MicroBatches in the same `fit` does nothing: use one."
            )
        self._set_events(())

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        if self._steps is not None:
            self._steps.epoch = epoch

    def _add(self, split: BatchSplit) -> None:
        _warn_of_split(self.model, split)
        self._set_events((*self.events, split))

    def _set_events(self, events: tuple[BatchSplit, ...]) -> None:
        self.events = events
        history = getattr(self.model, "history", None)
        if history is not None:
            history.micro_batches = events


def _check_model(model: keras.Model) -> None:
    """Raises where a model's steps cannot be split into parts with the same result."""
    strategy = model.distribute_strategy
    kinds = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)
    if tf.distribute.has_strategy() or strategy is not tf.distribute.get_strategy():
        if not isinstance(strategy, kinds):
            raise ValueError(
                f"MicroBatches was given a model under {type(strategy).__name__}; "
                "expected one process, on one device or with MirroredStrategy, since "
                "nothing makes other workers split with this one. Leave it out, and "
                "choose the batch size by `tfamp.find_batch_size`."
            )
    if type(model).make_train_function is not keras.Model.make_train_function:
        raise ValueError(
            f"{type(model).__name__} has a `make_train_function` of its own; expected "
            "that of Keras, in whose place micro-batches are trained. Put what it does "
            "into `train_step`, or leave MicroBatches out."
        )
    optimizers = optimizers_of(model)
    if len(optimizers) != 1 or optimizers[0] is not model.optimizer:
        names = tuple(type(each).__name__ for each in optimizers)
        raise ValueError(
            f"The model has {len(optimizers)} optimizers, {names}; expected the one "
            "that `compile` was given, since later updates of a step would depend on "
            "earlier ones. Train with a smaller batch size, or leave MicroBatches out."
        )
    for loss in tf.nest.flatten(model.loss):
        if getattr(loss, "reduction", "mean") in _NOT_MEANS:
            raise ValueError(
                f"The loss {loss.name!r} has `reduction={loss.reduction!r}`; expected "
                "a mean over the batch, since micro-batches are weighted by their "
                "sizes. Pass `reduction='sum_over_batch_size'`, with a learning rate "
                "as many times larger as a batch has examples."
            )


def _warn_of_split(model: keras.Model, split: BatchSplit) -> None:
    """Logs that a batch did not fit."""
    num_replicas = model.distribute_strategy.num_replicas_in_sync
    each = -(-split.examples // (split.splits * num_replicas))
    notes = []
    layers = (layer for _, layer, _ in structure.walk(model))
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        notes.append(
            " Statistics of BatchNormalization are those of the micro-batches from "
            "here on."
        )
    if any(
        getattr(loss, "reduction", None) == _BY_WEIGHTS
        for loss in tf.nest.flatten(model.loss)
    ):
        notes.append(
            f" The reduction {_BY_WEIGHTS!r} divides each micro-batch by its own sum "
            "of weights, so that results differ where these do."
        )
    logging.warning(
        "Batch of %d examples did not fit into memory at step %d of epoch %d (%s). It "
        "is trained as %d micro-batches of %d%s with one update, and so are the next "
        "ones.%s That takes longer: `tfamp.find_batch_size` finds the largest batch "
        "that fits, `tfamp.remat` makes more fit.",
        split.examples,
        split.step + 1,
        split.epoch + 1,
        split.error,
        split.splits,
        each,
        f" on each of {num_replicas} replicas" if num_replicas > 1 else "",
        "".join(notes),
    )
