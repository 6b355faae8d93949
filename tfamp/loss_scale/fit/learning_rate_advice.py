"""A line of advice where the batch of a `fit` changed and the learning rate did not."""

import json
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from absl import logging

_USUAL_BATCH = 32  # Keras's, where `fit` is given arrays and no size
# Stages of tf.data that hand batches on as they are.
_PASSING = frozenset(
    "Prefetch Map ParallelMap Options Cache CacheV2 Shuffle Repeat Take Skip Shard "
    "Model AssertCardinality Filter ParallelFilter MapAndFilter Rebalance Numbered "
    "Concatenate IgnoreErrors Snapshot Save Finalize".split()
)


def batch_size_of(arguments: Mapping[str, Any]) -> int | None:
    """Returns the examples in a batch of `fit`, None where that is not to be seen.

    Nothing is read: a dataset is asked for its shapes and its last stages.

    Args:
        arguments: Those of `fit`, by name.

    Example:
        >>> batch_size_of({"x": tf.zeros((100, 2))})
        32
        >>> data = tf.data.Dataset.range(100).batch(8).prefetch(2)
        >>> batch_size_of({"x": data})
        8
    """
    x = arguments.get("x")
    if isinstance(x, keras.utils.PyDataset):
        return None
    spec = getattr(x, "element_spec", None)
    if spec is not None:
        return _leading(spec) or _batched_by(x)
    length = _leading(x)
    if length is None:
        return None
    return min(length, arguments.get("batch_size") or _USUAL_BATCH)


def update_size_of(arguments: Mapping[str, Any], optimizer: Any) -> int | None:
    """Returns the examples of one update, None where that is not to be seen.

    Under a strategy `fit` splits what is a batch here among the replicas.

    Args:
        arguments: Those of `fit`, by name.
        optimizer: The model's optimizer.
    """
    batch_size = batch_size_of(arguments)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    steps = getattr(optimizer, "accumulation_steps", None)
    steps = steps or getattr(inner, "gradient_accumulation_steps", None) or 1
    return None if batch_size is None else batch_size * int(steps)


def _leading(structure: Any) -> int | None:
    """Returns the first dimension of the first leaf, None where it has none."""
    for leaf in tf.nest.flatten(structure):
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return None
        if len(shape):
            return None if shape[0] is None else int(shape[0])
    return None


def _batched_by(dataset: Any) -> int | None:
    """Returns the size that the last `batch` of a dataset was given."""
    while dataset is not None:
        name = type(dataset).__name__.strip("_").removesuffix("Dataset")
        size = getattr(dataset, "_batch_size", None)
        if name in ("Batch", "ParallelBatch") and size is not None:
            value = tf.get_static_value(size)
            return None if value is None else int(value)
        if name not in _PASSING:
            return None
        dataset = getattr(dataset, "_input_dataset", None)
    return None


# Less than this is within what rates are tuned to.
_NOTICEABLE = 2.0
# These take steps as large as the gradient; others divide by its size.
_LINEAR = ("SGD", "Ftrl")


class Terms(NamedTuple):
    """How a model is trained in one `fit`.

    Attributes:
        update_size: Examples of one update, of all replicas and micro-batches.
        rate: The learning rate, or the configuration of a schedule as text.
        optimizer: Name of the optimizer's class.
    """

    update_size: int
    rate: float | str
    optimizer: str


_LAST: "weakref.WeakKeyDictionary[keras.Model, Terms]" = weakref.WeakKeyDictionary()


def advice(before: Terms, now: Terms, *, model: str = "model") -> str | None:
    """Returns what to do about the rate, None where nothing is to be said.

    That is where the examples of one update changed by a factor of 2 or more while
    optimizer and rate stayed.

    Args:
        before: The terms of the last `fit`.
        now: Those of this one.
        model: The model's name.

    Example:
        >>> print(advice(Terms(64, 0.1, "SGD"), Terms(256, 0.1, "SGD")))
        ... # doctest: +NORMALIZE_WHITESPACE
        `fit` of 'model' takes 256 examples an update, 64 in its last `fit`, at the same
        learning rate 0.1. The usual rule for SGD is "linear": compile with
        `tfamp.training.scale_learning_rate(0.1, batch_size=256, base_batch_size=64,
        rule='linear')`.
        >>> advice(Terms(64, 0.1, "SGD"), Terms(256, 0.4, "SGD")) is None
        True

    Source: P. Goyal et al., Accurate, Large Minibatch SGD, 2017 (linear);
    A. Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014
    (square root).
    """
    larger = max(before.update_size, now.update_size)
    smaller = min(before.update_size, now.update_size)
    if before[1:] != now[1:] or larger < _NOTICEABLE * smaller:
        return None
    rule = "linear" if now.optimizer in _LINEAR else "sqrt"
    if isinstance(now.rate, str):
        told, passed = "schedule", "schedule"
    else:
        told, passed = f"learning rate {now.rate:g}", f"{now.rate:g}"
    return (
        f"`fit` of {model!r} takes {now.update_size} examples an update, "
        f"{before.update_size} in its last `fit`, at the same {told}. The usual rule "
        f'for {now.optimizer} is "{rule}": compile with '
        f"`tfamp.training.scale_learning_rate({passed}, batch_size={now.update_size}, "
        f"base_batch_size={before.update_size}, rule={rule!r})`."
    )


@contextmanager
def watched(model: keras.Model, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Logs the advice on a `fit`, and remembers how it ended for the next one.

    Args:
        model: A compiled model.
        arguments: Those of `fit`, by name.
    """
    optimizer = getattr(model, "optimizer", None)
    size = None if optimizer is None else update_size_of(arguments, optimizer)
    now = None if size is None else _terms(optimizer, size)
    before = _LAST.get(model)
    if before is not None and now is not None:
        text = advice(before, now, model=model.name)
        if text is not None:
            logging.warning("%s", text)
    try:
        yield
    finally:
        # Callbacks change rates; what counts is whether the user does between fits.
        after = None if size is None else _terms(model.optimizer, size)
        if after is not None:
            _LAST[model] = after


def _terms(optimizer: Any, size: int) -> Terms | None:
    """Returns the present terms, None for an optimizer without a rate of its own."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None)
    if rate is None:
        return None
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        try:
            text = json.dumps(rate.get_config(), sort_keys=True, default=repr)
        except NotImplementedError:  # a schedule of the user's that is not to be saved
            text = str(id(rate))
        known: float | str = f"{type(rate).__name__} {text}"
    else:
        known = float(keras.ops.convert_to_numpy(rate))
    return Terms(size, known, type(inner).__name__)
