"""An iterator that takes the time of its draws inside the training function.

In `fit` the traced function draws the batch, out of Python's sight, so the clock has
to stand in the graph: before and after the draw. Nothing is drawn twice, elsewhere or
earlier than without it.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# What `fit` draws from that can be timed.
ITERATORS = (tf.data.Iterator, tf.distribute.DistributedIterator)
_KEYS = itertools.count()
# Only what is alive is found by its key.
_METERS: "weakref.WeakValueDictionary[int, Meter]" = weakref.WeakValueDictionary()


class Drawn(NamedTuple):
    """What was drawn so far.

    Attributes:
        wait_seconds: Time between asking for batches and having them.
        examples: Examples in them, of all replicas.
        batches: Their number.
    """

    wait_seconds: float
    examples: int
    batches: int


class Meter:
    """Adds up the waits, examples and batches that timed iterators draw.

    `num_traces` counts how often a draw was traced; a call that traces is a slow one.
    No other meter has the same `key`.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_traces = 0
        self.key = next(_KEYS)
        _METERS[self.key] = self
        self._strategy, self._clock = strategy, clock
        # Sums of the fields of `Drawn`. On the CPU, where batches are drawn: reading
        # them waits for no accelerator.
        with tf.device("CPU:0"):
            self._sums = tf.Variable(tf.zeros([3], tf.float64), trainable=False)
        self._eager = Drawn(0.0, 0, 0)
        self._around: tuple[Any, Any] = (None, None)

    def around(self, iterator: Any) -> Any:
        """Returns an iterator by way of this meter; one that cannot be timed itself."""
        if self._around[0] is not iterator:
            is_known = isinstance(iterator, ITERATORS)
            timed = TimedIterator(iterator, self) if is_known else iterator
            self._around = iterator, timed
        return self._around[1]

    def let_iterator_go(self) -> None:
        """Holds the last iterator no longer."""
        self._around = None, None

    def read(self) -> Drawn:
        """Returns what was drawn; it takes a twentieth of a millisecond."""
        sums = self._strategy.experimental_local_results(self._sums)[0]
        wait, examples, batches = sums.numpy().tolist()
        eager = self._eager
        return Drawn(
            wait + eager.wait_seconds,
            round(examples) + eager.examples,
            round(batches) + eager.batches,
        )

    def draw(self, iterator: Any) -> Any:
        """Returns the next batch of an iterator."""
        if tf.executing_eagerly():
            start = self._clock()
            data = iterator.get_next()
            self._add_eagerly(self._clock() - start, data)
            return data
        self.num_traces += 1
        start = _now(after=[])
        with tf.control_dependencies([start]):
            data = iterator.get_next()
        end = _now(after=tf.nest.flatten(data, expand_composites=True))
        self._add(end - start, self._examples_of(data), tf.constant(1.0, tf.float64))
        return data

    def draw_optional(self, iterator: Any) -> Any:
        """Returns the next batch of an iterator, or that there is none."""
        if tf.executing_eagerly():
            start = self._clock()
            data = iterator.get_next_as_optional()
            seconds = self._clock() - start
            if bool(data.has_value()):
                self._add_eagerly(seconds, data.get_value())
            return data
        self.num_traces += 1
        start = _now(after=[])
        with tf.control_dependencies([start]):
            data = iterator.get_next_as_optional()
            has_value = data.has_value()
        examples = tf.cond(
            has_value,
            lambda: self._examples_of(data.get_value()),
            lambda: tf.constant(0.0, tf.float64),
        )
        wait = _now(after=[has_value]) - start
        self._add(wait, examples, tf.cast(has_value, tf.float64))
        return data

    def _add(self, wait: tf.Tensor, examples: tf.Tensor, batches: tf.Tensor) -> None:
        with tf.device("CPU:0"):
            sums = tf.stack([wait, examples, batches])
            self._sums.assign_add(sums, read_value=False)

    def _add_eagerly(self, seconds: float, data: Any) -> None:
        wait, examples, batches = self._eager
        examples += int(self._examples_of(data))
        self._eager = Drawn(wait + seconds, examples, batches + 1)

    def _examples_of(self, data: Any) -> tf.Tensor:
        """Returns the number of examples in a batch, of all replicas; 0 if unknown.

        That of the first part with more than a number in it, in the order of
        `tf.nest`: of the inputs, where the batch is `(x, y, sample_weight)`.
        """
        for leaf in tf.nest.flatten(data):
            parts = self._strategy.experimental_local_results(leaf)
            sizes = [first_dimension(part) for part in parts]
            if all(size is not None for size in sizes):
                with tf.device("CPU:0"):
                    return tf.add_n([tf.cast(size, tf.float64) for size in sizes])
        return tf.constant(0.0, tf.float64)


class TimedIterator(tf.data.Iterator):
    """Draws from an iterator of a dataset by way of a meter.

    It goes wherever an iterator goes.
    """

    def __init__(self, iterator: Any, meter: Meter, kind: Any = None) -> None:
        self.inner = iterator
        self._meter = meter
        self._kind = kind or _TimedSpec(tf.type_spec_from_value(iterator), meter.key)
        self._handles: list[Any] | None = None

    def __iter__(self) -> "TimedIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next batch; ends as an iterator of Python does."""
        try:
            return self.get_next()
        except tf.errors.OutOfRangeError as error:
            raise StopIteration from error

    def get_next(self) -> Any:
        """Returns the next batch."""
        return self._meter.draw(self.inner)

    def get_next_as_optional(self) -> Any:
        """Returns the next batch, or that there is none."""
        return self._meter.draw_optional(self.inner)

    @property
    def element_spec(self) -> Any:
        """What a batch is like."""
        return self.inner.element_spec

    @property
    def _type_spec(self) -> "_TimedSpec":
        return self._kind

    def handles(self) -> list[Any]:
        """Returns the tensors that stand for the iterator, always the same."""
        if self._handles is None:
            self._handles = self._kind.inner.to_tensors(self.inner)
        return self._handles


class _TimedSpec(tf.TypeSpec):
    """The type of a timed iterator: that of the one inside, and its meter.

    `tf.function` finds a trace by it at each call. What it asks for then is kept at
    hand, so a call with this type costs no more than one with TensorFlow's own.
    """

    value_type = TimedIterator

    def __init__(self, inner: Any, meter_key: int) -> None:
        self.inner = inner
        # A type is described by plain values, and kept while the meter is needed.
        self._meter = _METERS[meter_key]
        self._hash = hash((inner, meter_key))

    def to_tensors(self, value: TimedIterator) -> list[Any]:
        return value.handles()

    def cast(self, value: Any, casting_context: Any) -> Any:
        if isinstance(value, TimedIterator) and value._type_spec is self:
            return value
        return super().cast(value, casting_context)

    def is_subtype_of(self, other: Any) -> bool:
        return self._is_like(other) and self.inner.is_subtype_of(other.inner)

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Any:
        if not all(self._is_like(other) for other in others):
            return None
        inners = [other.inner for other in others]
        inner = self.inner.most_specific_common_supertype(inners)
        return None if inner is None else _TimedSpec(inner, self._meter.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, _TimedSpec) and (
            self._meter is other._meter and self.inner == other.inner
        )

    def _is_like(self, other: Any) -> bool:
        return isinstance(other, _TimedSpec) and self._meter is other._meter

    def _serialize(self) -> tuple[Any, ...]:
        return self.inner, self._meter.key

    @property
    def _component_specs(self) -> tuple[Any]:
        return (self.inner,)

    def _to_components(self, value: TimedIterator) -> tuple[Any]:
        return (value.inner,)

    def _from_components(self, components: tuple[Any]) -> TimedIterator:
        return TimedIterator(components[0], self._meter, self)


def _now(*, after: Sequence[Any]) -> tf.Tensor:
    """Returns the time in seconds once `after` is there."""
    with tf.control_dependencies(after), tf.device("CPU:0"):
        return tf.timestamp()


def without_optionals(data: Any) -> Any:
    """Returns a batch as `train_step` gets it: Keras turns empty optionals to None."""
    return tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data
    )


def first_dimension(part: Any) -> Any:
    """Returns the first dimension of a tensor, None where it has none.

    A ragged tensor has rows, a sparse one its dense shape.
    """
    shape = getattr(part, "shape", None)
    if not isinstance(shape, tf.TensorShape) or shape.rank == 0:
        return None
    if shape.rank is not None and shape[0] is not None:
        return shape[0]
    if isinstance(part, tf.RaggedTensor):
        return part.nrows()
    dense = part.dense_shape if isinstance(part, tf.SparseTensor) else tf.shape(part)
    return dense[0]
