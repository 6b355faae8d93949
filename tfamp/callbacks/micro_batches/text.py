"""What MicroBatches refuses, and how it words what cannot be helped."""

from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import structure
from tfamp.records.checks import first_line
from tfamp.records.units import format_bytes
from tfamp.stepping.snapshots.names import optimizers_of

_NOT_MEANS = ("sum", "none", None)
_BY_WEIGHTS = "mean_with_sample_weight"
_REMEDIES = (
    "Store less for the backward pass by `tfamp.remat(model)`, compute in half the "
    'bytes by `tfamp.enable("mixed_bfloat16")`, and on a GPU set '
    "TF_GPU_ALLOCATOR=cuda_malloc_async against fragments, or let processes share it "
    "by `tf.config.experimental.set_memory_growth`."
)


def check_model(model: keras.Model) -> None:
    """Raises where a model's steps cannot be split into parts with the same result.

    Raises:
        ValueError: It is compiled or distributed in another way.
    """
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


def tell_of_single_steps(model: keras.Model) -> None:
    """Logs that the steps of an execution are calls of their own."""
    steps = int(model.steps_per_execution or 1)
    if steps > 1 and not model.run_eagerly:
        logging.info(
            "The %d steps of an execution are a call each under MicroBatches, which "
            "goes back to a single one: callbacks see what they would without it, and "
            "a step takes up to a millisecond more.",
            steps,
        )


def warn_of_split(model: keras.Model, split: Any, num_replicas: int) -> None:
    """Logs that a batch did not fit."""
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


def exhausted(
    model: keras.Model,
    *,
    examples: int,
    num_parts: int,
    max_splits: int,
    in_update: bool,
    sums_bytes: int,
) -> str:
    """Returns the text where a batch fits in no number of parts."""
    strategy = model.distribute_strategy
    if in_update:
        what = (
            f"The update of the weights does not fit into memory, after the gradients "
            f"of {num_parts} micro-batches did; expected it to, and smaller ones would "
            "not change it"
        )
    elif num_parts >= max_splits:
        what = (
            f"A batch of {examples} examples does not fit into memory as {num_parts} "
            f"micro-batches; expected it to with `max_splits={max_splits}`"
        )
        if examples > num_parts * strategy.num_replicas_in_sync:
            what += ", which may be larger"
    else:
        what = (
            f"A batch of {examples} examples does not fit into memory as {num_parts} "
            "micro-batches, down to one example on a replica; expected one to fit"
        )
    weights = sum(_bytes(variable) for variable in model.variables)
    slots = sum(_bytes(v) for o in optimizers_of(model) for v in o.variables)
    sums = f", {format_bytes(sums_bytes)} sums of gradients" if sums_bytes else ""
    return (
        f"{what}. On a device {format_bytes(weights)} are weights, "
        f"{format_bytes(slots)} optimizer state{sums}; the rest are activations and "
        f"what else runs there. The model is as it was before the step. {_REMEDIES}"
    )


def half_written(model: keras.Model) -> str:
    """Returns the text where a step cannot be taken back."""
    return (
        f"A step of {model.name!r} ran out of memory while its weights were written, "
        "or made variables before it did; expected it to before that, since then "
        "nothing is lost. The weights may be those of half an update: go back to a "
        "checkpoint of `tfamp.callbacks.NanRecovery` or "
        "`keras.callbacks.BackupAndRestore`, and choose a smaller batch size; build "
        "the model and its optimizer before `fit`."
    )


def cannot_split(why: str) -> str:
    """Returns the text where a batch has no parts."""
    return (
        f"A batch did not fit into memory, and cannot be split: {why}. Choose a "
        f"smaller batch size. {_REMEDIES}"
    )


def as_error(error: Exception, message: str) -> Exception:
    """Returns an error that is caught wherever `error` is, with another text."""
    message = f"{message} The error was: {first_line(error)}"
    if isinstance(error, tf.errors.OpError):
        return tf.errors.ResourceExhaustedError(error.node_def, error.op, message)
    if isinstance(error, MemoryError):
        return MemoryError(message)
    return tf.errors.ResourceExhaustedError(None, None, message)


def _bytes(variable: Any) -> int:
    value = variable.value
    return int(value.dtype.size * (value.shape.num_elements() or 0))
