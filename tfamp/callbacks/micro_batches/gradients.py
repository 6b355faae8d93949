"""Adds up the gradients of micro-batches, and hands them to the optimizer as one.

The optimizer itself is never another one, nor has it any setting changed: for the
length of a call something else stands in the place of its `apply`. So clipping, decay,
averages, schedules, loss scale and an accumulation of the user's own see what they
would see of the whole batch.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.callbacks._timed_iterator import first_dimension
from tfamp.keras_hooks import around_training, optimizers
from tfamp.keras_hooks.patches import replaced
from tfamp.loss_scale.replicas import sharing_whole_batch


class CannotSplit(ValueError):
    """A batch that has no examples to tell apart, or arrays of other lengths."""


def sizes(strategy: tf.distribute.Strategy, data: Any) -> tuple[int, ...]:
    """Returns the number of examples that each replica has of a batch.

    `CannotSplit` is raised where its arrays have several lengths, or there is none.
    """
    found: tuple[int, ...] | None = None
    for leaf in tf.nest.flatten(data):
        parts = strategy.experimental_local_results(leaf)
        if any(part is None or part.shape.rank == 0 for part in parts):
            continue
        lengths = tuple(int(first_dimension(part)) for part in parts)
        if found is None:
            found = lengths
        elif found != lengths:
            raise CannotSplit(
                f"its arrays have {found} and {lengths} rows on the replicas; expected "
                "one row for each example in all of them"
            )
    if found is None:
        raise CannotSplit("it holds no array; expected one with a row for each example")
    return found


def num_splits(examples: Sequence[int], limit: int, most: int) -> int:
    """Returns into how many micro-batches replicas cut their examples, at most `most`.

    Example:
        >>> num_splits([512], 128, 64), num_splits([100], 128, 64)
        (4, 1)
        >>> num_splits([2, 1], 1, 64)  # none is left without an example
        1
    """
    return max(1, min(-(-max(examples) // limit), min(examples), most))


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Returns where each part of a sequence begins and ends; lengths differ by 1.

    Example:
        >>> bounds(7, 3)
        [(0, 2), (2, 4), (4, 7)]
    """
    edges = [length * i // parts for i in range(parts + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def cut(
    strategy: tf.distribute.Strategy, data: Any, examples: Sequence[int], parts: int
) -> Iterator[Any]:
    """Yields micro-batches, each with its share of the examples of its replica.

    A share is a float32 scalar in (0, 1]; both are of all replicas. `examples` is what
    `sizes` returned.
    """
    edges = [bounds(length, parts) for length in examples]

    def piece_of(replica: int, number: int) -> tuple[Any, tf.Tensor]:
        begin, end = edges[replica][number]

        def rows(leaf: Any) -> Any:
            local = strategy.experimental_local_results(leaf)
            return _rows(local[replica % len(local)], begin, end)

        share = tf.constant((end - begin) / examples[replica], tf.float32)
        return tf.nest.map_structure(rows, data), share

    for number in range(parts):
        pieces = [piece_of(replica, number) for replica in range(len(examples))]
        if len(pieces) == 1:
            yield pieces[0]
        else:
            yield strategy.experimental_distribute_values_from_function(
                lambda context, p=pieces: p[context.replica_id_in_sync_group]
            )


def _rows(leaf: Any, begin: int, end: int) -> Any:
    """Returns rows of a tensor; numbers belong to each example alike."""
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        shape = leaf.dense_shape
        start = tf.concat([[begin], tf.zeros_like(shape[1:])], 0)
        size = tf.concat([[end - begin], shape[1:]], 0)
        return tf.sparse.slice(leaf, start, tf.cast(size, tf.int64))
    return leaf[begin:end]


class _Kind(NamedTuple):
    """What a train step hands to its optimizer for one variable."""

    variable: Any
    dtype: tf.DType | None
    is_sparse: bool


class _Here(threading.local):
    """The micro-batch of the replica that runs in this thread."""

    share: Any = None
    slices: list[tf.IndexedSlices] | None = None
    num_updates: int = 0


class Gradients:
    """The sums of the gradients of a model, in float32, on each replica for itself.

    `begun` is where it is noted that the optimizer begins to write, and `tables` has
    the keys of the variables whose gradients are rows, as far as known.
    """

    def __init__(self, model: keras.Model, begun: Any, tables: Set[Any]) -> None:
        self._model, self._begun = model, begun
        self._here = _Here()
        self._totals: dict[Any, Any] = {}
        self._kinds: list[_Kind] = []
        self._collect = around_training.on_replicas(model, self._collect_step)
        self._apply = around_training.on_batch(model, self._apply_step)
        self._train_step = model.train_step
        self._reset: Any = None
        optimizer = model.optimizer
        if not model.run_eagerly:
            # Not in the traced function, where they have no value if that fails.
            with model.distribute_strategy.scope():
                for variable in optimizers.trained_by(optimizer):
                    if optimizers.key_of(optimizer, variable) not in tables:
                        self._total_of(variable)

    @property
    def num_bytes(self) -> int:
        """Memory of the sums, on one replica."""
        return sum(
            total.dtype.size * (total.shape.num_elements() or 0)
            for total in self._totals.values()
        )

    def clear(self) -> None:
        """Sets all sums to 0."""
        strategy = self._model.distribute_strategy
        if self._reset is None or self._reset[0] != len(self._totals):
            parts = [
                part
                for total in self._totals.values()
                for part in strategy.experimental_local_results(total)
            ]

            def reset() -> None:
                for part in parts:
                    part.assign(tf.zeros(part.shape, part.dtype))

            self._reset = len(self._totals), tf.function(reset, autograph=False)
        if self._totals:
            self._reset[1]()

    def add(self, micro_batch: Any) -> tuple[Any, Any]:
        """Runs the train step on a micro-batch and its share; adds its gradients up.

        Returns what the step returned, and the gradients that are rows of a table, both
        for each replica.
        """
        with replaced(self._model.optimizer, apply=self._add_up):
            logs, slices = self._collect(micro_batch)
        return logs, slices

    def apply(self, data: Any, slices: Sequence[Any]) -> None:
        """Makes the update.

        By the length of `data`, an array of the whole batch, the optimizer may weight
        it; `slices` has the rows of tables of each micro-batch.
        """
        if not self._kinds:
            return  # nothing that could be trained
        optimizer = self._model.optimizer
        with only_after_gradients(optimizer, self._begun, lambda key: None):
            self._apply((data, list(slices)))

    def _collect_step(self, micro_batch: Any) -> Any:
        here = self._here
        data, here.share = micro_batch
        here.slices, here.num_updates = [], 0
        try:
            with sharing_whole_batch(self._model, data, here.share):
                return self._train_step(data), here.slices
        finally:
            here.share = here.slices = None

    def _apply_step(self, data: Any) -> dict[str, Any]:
        _, slices = data
        gradients: list[Any] = []
        num_tables = 0
        for kind in self._kinds:
            if kind.dtype is None:
                gradients.append(None)
            elif kind.is_sparse:
                gradients.append(_one([each[num_tables] for each in slices]))
                num_tables += 1
            else:
                total = tf.convert_to_tensor(self._total_of(kind.variable))
                gradients.append(tf.cast(total, kind.dtype))
        variables = [kind.variable for kind in self._kinds]
        self._model.optimizer.apply(gradients, variables)
        return {}

    @tf.autograph.experimental.do_not_convert
    def _add_up(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Stands in the place of an optimizer's `apply`."""
        here = self._here
        here.num_updates += 1
        if here.num_updates > 1 or here.slices is None:
            raise RuntimeError(
                f"{type(self._model).__name__}.train_step updates its weights more "
                "than once in a step, and later gradients depend on earlier updates; "
                "expected one update, since micro-batches are made one at its end. "
                "Train with a smaller batch size, or leave MicroBatches out."
            )
        if trainable_variables is None:
            trainable_variables = optimizers.trained_by(self._model.optimizer)
        kinds = []
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            is_sparse = isinstance(gradient, tf.IndexedSlices)
            dtype = None if gradient is None else gradient.dtype
            kinds.append(_Kind(variable, dtype, is_sparse))
            if is_sparse:
                here.slices.append(_times(gradient, here.share))
            elif gradient is not None:
                self._add_to(self._total_of(variable), variable, gradient)
        self._kinds = kinds

    def _add_to(self, total: Any, variable: Any, gradient: Any) -> None:
        gradient = tf.cast(gradient, total.dtype)
        if getattr(variable, "overwrite_with_gradient", False):
            # No gradient but the next value, such as the largest one seen so far.
            total.assign(tf.maximum(tf.convert_to_tensor(total), gradient))
        else:
            total.assign_add(gradient * tf.cast(self._here.share, total.dtype))

    def _total_of(self, variable: Any) -> Any:
        key = optimizers.key_of(self._model.optimizer, variable)
        if key not in self._totals:
            dtype = "float64" if variable.dtype == "float64" else "float32"
            with tf.init_scope():
                self._totals[key] = tf.Variable(
                    tf.zeros(variable.shape, dtype),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                )
        return self._totals[key]


def only_after_gradients(
    optimizer: Any, begun: Any, on_table: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Has an optimizer write nothing before all of its gradients are there.

    Without that a graph updates a weight as soon as its own gradient is there, while
    the backward pass goes on and may run out of memory. Functions that are traced in
    the block keep to it. `begun` is set to 1 just before the optimizer writes, and
    `on_table` is called with the key of each variable whose gradient is rows.
    """
    original: Callable[..., Any] = optimizer.apply

    @tf.autograph.experimental.do_not_convert
    def apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        gradients = list(grads)
        if trainable_variables is None:
            trainable_variables = optimizers.trained_by(optimizer)
        variables = list(trainable_variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                on_table(optimizers.key_of(optimizer, variable))
        tensors = tf.nest.flatten(
            [g for g in gradients if g is not None], expand_composites=True
        )
        with tf.control_dependencies(tensors):
            done = begun.assign(1.0)
        # All of it: the count of iterations depends on no gradient.
        with tf.control_dependencies([done]):
            gradients = [None if g is None else _identity(g) for g in gradients]
            return original(gradients, variables)

    return replaced(optimizer, apply=apply)


def _identity(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.identity(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return tf.identity(gradient)


def _times(gradient: tf.IndexedSlices, share: Any) -> tf.IndexedSlices:
    """Returns a table's gradient times a share, in its own dtype."""
    values = tf.cast(gradient.values, tf.float32) * share
    values = tf.cast(values, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _one(slices: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """Returns rows of several as one: Keras squares each row by itself, so must we."""
    return tf.IndexedSlices(
        tf.concat([each.values for each in slices], 0),
        tf.concat([each.indices for each in slices], 0),
        slices[0].dense_shape,
    )
