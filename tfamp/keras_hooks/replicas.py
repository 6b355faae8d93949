"""Weights the losses of replicas by their examples, and has them draw random numbers.

Keras divides a mean over the batch by the number of replicas, which is wrong where they
have different numbers of examples. Inside `sharing` a mean is multiplied by the
replica's share of the batch, so that sums over the replicas are the means of one
device. Every replica holds the same state of a seed generator, so what it hands out is
changed by the number of the replica; the first draws what one device does.

Relies on: `reduce_weighted_values` of Keras's losses calling `reduce_values`, and that
one `scale_loss_for_distribution` where it has divided, by their names in that module;
the trainer calling it for additional losses, and the other way round ahead of the
trackers of losses, which are `Mean`s in `_loss_tracker` and `_compile_loss.metrics`; a
plain optimizer reducing its gradients by `_all_reduce_sum_gradients`; what draws asking
`SeedGenerator.next` for a seed, of which every pair of integers is one.
"""

import contextlib
import dataclasses
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging
from keras.src.losses import loss as losses

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import CALLS
from tfamp.keras_hooks.patches import Function, Patch, replaced, wrapper
from tfamp.keras_hooks.workers import summed
from tfamp.records import checks

_MEANS = ("sum_over_batch_size", "mean")
_BY_WEIGHTS = "mean_with_sample_weight"
# No divisor of 2**31 - 2, by which Keras takes the remainder of a seed.
_BETWEEN_REPLICAS = 1_013_904_223


@dataclasses.dataclass(frozen=True)
class Share:
    """What a replica has of a batch."""

    count: tf.Tensor  # its examples, a float32 scalar
    total: tf.Tensor  # those of all replicas, a float32 scalar
    may_be_empty: bool  # whether `count` may be 0, as far as a trace knows
    graph: Any  # the graph in which the step runs, None in eager code
    trackers: frozenset[int]  # identities of the metrics of losses


class _Here(threading.local):
    """What this thread, that of a replica, is doing."""

    share: Share | None = None
    of_weights: Callable[[Any], tf.Tensor] | None = None


_HERE = _Here()


@contextlib.contextmanager
def sharing(model: keras.Model, data: Any) -> Iterator[None]:
    """Weights the means of a training step by the examples that each replica has.

    `data` is the part of a batch that this one has; nothing is done where it holds no
    array.
    """
    context, count = tf.distribute.get_replica_context(), batch_size_of(data)
    if count is None or context is None or context.num_replicas_in_sync == 1:
        yield
        return
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, count)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    loss = getattr(model, "_compile_loss", None)
    trackers = [getattr(model, "_loss_tracker", None), *getattr(loss, "metrics", ())]
    may_be_empty = not _array_of(data).shape[0]
    share = Share(count, total, may_be_empty, graph, frozenset(map(id, trackers)))
    with replaced(_HERE, share=share):
        yield


def batch_size_of(data: Any) -> tf.Tensor | None:
    """Returns the number of examples in a batch, None where it has none."""
    leaf = _array_of(data)
    if leaf is None:
        return None
    shape = leaf.dense_shape if hasattr(leaf, "dense_shape") else tf.shape(leaf)
    return tf.cast(shape[0], tf.float32)


def _array_of(data: Any) -> Any:
    """Returns the first array of a batch, None where it has none."""
    arrays = (x for x in tf.nest.flatten(data) if tf.is_tensor(x) and x.shape.rank != 0)
    return next(arrays, None)


def averaging(model: keras.Model) -> Callable[[], Any]:
    """Returns what gives all replicas the mean of their moving statistics."""
    variables = [
        variable
        for layer in structure.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and (layer.built and layer.trainable and not layer.synchronized)
        for variable in layer.non_trainable_weights
    ]
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1 or not variables:
        return lambda: None
    logging.log_first_n(
        logging.INFO,
        "Replicas normalize by their own parts of a batch in BatchNormalization; at "
        "the end of an epoch of `fit` all get the mean of their moving statistics. "
        "Pass the layers `synchronized=True` to normalize by the whole batch.",
        1,
    )

    def on_replica() -> None:
        context = tf.distribute.get_replica_context()
        # A value that is only read belongs to no device, for workers to send it.
        values = [tf.identity(v.value) for v in variables]
        for variable, total in zip(variables, summed(context, values), strict=True):
            num = tf.cast(context.num_replicas_in_sync, total.dtype)
            variable.value.assign(total / num)

    return tf.function(lambda: strategy.run(on_replica), autograph=False)


def is_empty() -> tf.Tensor | None:
    """Returns whether this replica has no example; None where it has some for sure."""
    share = _HERE.share
    if share is None or not share.may_be_empty:
        return None
    return tf.equal(share.count, 0.0)


def of_examples(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients, which are 0, not NaN, where this replica has no example."""
    empty = is_empty()
    present = [g for g in gradients if g is not None]
    if empty is None or not present:
        return list(gradients)

    def zero(g: Any) -> Any:
        if isinstance(g, tf.IndexedSlices):
            return tf.IndexedSlices(tf.zeros_like(g.values), g.indices, g.dense_shape)
        return tf.zeros_like(g)

    kept = iter(tf.cond(empty, lambda: [*map(zero, present)], lambda: [*present]))
    return [None if g is None else next(kept) for g in gradients]


def _quotient(part: Any, whole: Any, dtype: Any) -> tf.Tensor:
    """Returns a share in a loss's dtype; 0 of nothing."""
    dtype = tf.as_dtype(dtype)
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    return tf.cast(
        tf.math.divide_no_nan(tf.cast(part, wide), tf.cast(whole, wide)), dtype
    )


@wrapper
def _wrap_scale(original: Function, value: Any) -> Any:
    share = _HERE.share
    if share is None:
        return original(value)
    if _HERE.of_weights is None:
        part = _quotient(share.count, share.total, value.dtype)
    else:
        part = _HERE.of_weights(value.dtype)
    if share.may_be_empty:
        value = tf.where(tf.equal(share.count, 0.0), tf.zeros_like(value), value)
    return value * part


@wrapper
def _wrap_reduce(
    original: Function,
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: Any = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Has a mean over weights, or what a mask leaves, be one over all replicas."""
    share = _HERE.share
    if share is None:
        return original(values, sample_weight, mask, reduction, dtype)
    of_weights, weights = _HERE.of_weights, None
    # In float32, what Keras divides by the sum of.
    if reduction in _MEANS and mask is not None:
        weights = tf.cast(mask, tf.float32)
    elif reduction == _BY_WEIGHTS and (sample_weight is not None or mask is not None):
        given = None if sample_weight is None else tf.cast(sample_weight, tf.float32)
        held = None if mask is None else tf.convert_to_tensor(mask)
        options = {"dtype": "float32", "reduction": reduction}
        weights = losses.apply_mask(given, held, **options)
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Replicas cannot meet in a branch, a loop or a function.
    is_inside = tf.distribute.in_cross_replica_context() or graph is not share.graph
    if weights is not None and not is_inside:
        part = tf.reduce_sum(weights)
        context = tf.distribute.get_replica_context()
        whole = context.all_reduce(tf.distribute.ReduceOp.SUM, part)
        of_weights = lambda dtype: _quotient(part, whole, dtype)  # noqa: E731
    with replaced(_HERE, of_weights=of_weights):
        loss = original(values, sample_weight, mask, reduction, dtype)
    # Keras leaves no values, of shape (0,), as they are.
    is_left = reduction not in (None, "none") and tuple(loss.shape) == (0,)
    return tf.reduce_sum(loss) if is_left else loss


@wrapper
def _wrap_track(
    original: Function, self: Any, values: Any, sample_weight: Any = None
) -> Any:
    """Has each replica count its part of all examples: Keras's shapes do not tell.

    A loss comes multiplied by the number of replicas, as Keras does for its trackers.
    """
    share = _HERE.share
    if share is not None and id(self) in share.trackers:
        context = tf.distribute.get_replica_context()
        sample_weight = share.total / context.num_replicas_in_sync
    return original(self, values, sample_weight=sample_weight)


@wrapper
def _wrap_sum(original: Function, self: Any, grads_and_vars: Any) -> Any:
    pairs = list(grads_and_vars)
    gradients = of_examples([gradient for gradient, _ in pairs])
    variables = [variable for _, variable in pairs]
    dtypes = {g.dtype for g in gradients if g is not None}
    context = tf.distribute.get_replica_context()
    if len(dtypes) < 2 or context is None or context.num_replicas_in_sync == 1:
        return original(self, list(zip(gradients, variables, strict=True)))
    sums = iter(summed(context, [g for g in gradients if g is not None]))
    given = [None if g is None else next(sums) for g in gradients]
    return list(zip(given, variables, strict=True))


@wrapper
def _wrap_next(original: Function, self: Any, ordered: bool = True) -> Any:
    """Changes a seed, of shape (2,), by the number of the replica."""
    seed, context = original(self, ordered), tf.distribute.get_replica_context()
    # Models that are not managed draw what they draw in Keras.
    is_ours = CALLS.stack or _HERE.share is not None
    if not is_ours or context is None or context.num_replicas_in_sync == 1:
        return seed
    number = tf.cast(context.replica_id_in_sync_group, seed.dtype)
    return seed + number * tf.constant([_BETWEEN_REPLICAS, 0], seed.dtype)


def patches() -> list[Patch]:
    """Returns the patches on losses and their trackers, optimizers and seeds."""
    return [
        Patch(losses, "scale_loss_for_distribution", _wrap_scale),
        Patch(losses, "reduce_weighted_values", _wrap_reduce),
        Patch(keras.metrics.Mean, "update_state", _wrap_track),
        Patch(keras.random.SeedGenerator, "next", _wrap_next),
        Patch(keras.optimizers.Optimizer, "_all_reduce_sum_gradients", _wrap_sum),
    ]


_TOLD: "weakref.WeakSet[Any]" = weakref.WeakSet()


def warn_of_idle_distribution(*_: Any) -> None:
    """Warns once of each `keras.distribution` that is set, and does nothing."""
    found = keras.distribution.distribution()
    if found is not None and found not in _TOLD:
        _TOLD.add(found)
        warnings.warn(
            f"`keras.distribution` is set to {type(found).__name__}, which Keras does "
            "not follow on TensorFlow: all stays on the first device. Take it away by "
            "`keras.distribution.set_distribution(None)`, and make the model in the "
            "scope of `tfamp.distribute.strategy()`; for a model that is too large for "
            f"one device use `tfamp.remat` or Keras on JAX. {checks.see('scale')}",
            UserWarning,
            stacklevel=2,
        )
