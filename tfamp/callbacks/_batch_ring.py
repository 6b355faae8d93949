"""Keeps the last batches that a model trained on, without a copy of them.

In `fit` the traced function draws the batch, out of Python's sight. There an operation
puts the tensors by, which takes a few microseconds: they are only held, whatever their
shapes and dtypes. Now and then Python fetches them, and lets the oldest go.
"""

import collections
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.callbacks._timed_iterator import ITERATORS, Meter, without_optionals

# One for a model: traces of its training function are kept by the ring, so that the
# next `fit` finds them.
_RINGS: "weakref.WeakKeyDictionary[keras.Model, BatchRing]" = (
    weakref.WeakKeyDictionary()
)
# Fetching costs Python time whatever the number, so it waits for many small batches.
_MAX_CALLS_BETWEEN = 64
# The part of the bound that may be held on top of it until batches are fetched.
_SHARE_BETWEEN = 1 / 16


class Kept(NamedTuple):
    """A batch that is kept.

    Attributes:
        number: How many batches were drawn before it.
        parts: For each replica its part, as its `train_step` gets it.
        num_bytes: Size of all parts.
        shapes: For the identity of each dense tensor the shape that the graph knew,
            with None where it varied.
    """

    number: int
    parts: tuple[Any, ...]
    num_bytes: int
    shapes: dict[int, list[int | None]]


class _Form(NamedTuple):
    """What batches of one iterator are like, and the name where they are put by.

    `shapes` has None where they vary, and `structure` is what they are packed into.
    """

    name: str
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[Any, ...]
    structure: Any


class BatchRing(Meter):
    """Holds the last batches that were drawn by way of it.

    At most `keep` of them, and no more than `max_bytes`, but the newest whatever its
    size. `num_drawn` counts those that were fetched, and `was_cut` says whether some
    were let go for their size.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy, *, keep: int = 8, max_bytes: int = 2**28
    ) -> None:
        super().__init__(strategy)
        self._replicas = strategy
        self._forms: list[_Form] = []
        self._eager_batches: list[Any] = []
        self._kept: collections.deque[tuple[int, Any, int]] = collections.deque()
        self.begin(keep=keep, max_bytes=max_bytes)

    def begin(self, *, keep: int, max_bytes: int) -> None:
        """Begins anew, with nothing kept."""
        self.keep, self.max_bytes = keep, max_bytes
        self.clear()
        self.num_drawn, self.was_cut = 0, False
        self._num_bytes = self._largest = 0

    def clear(self) -> None:
        """Lets all batches go."""
        for form in self._forms:
            with tf.device("CPU:0"):
                tf.raw_ops.StageClear(dtypes=form.dtypes, shared_name=form.name)
        self._eager_batches.clear()
        self._kept.clear()
        self._num_bytes = 0

    def forget_before(self, number: int) -> None:
        """Lets go of batches before a number."""
        while self._kept and self._kept[0][0] < number:
            self._num_bytes -= self._kept.popleft()[2]

    def release(self) -> None:
        """Lets all batches and the iterator go, at the end of a `fit`."""
        self.clear()
        self.let_iterator_go()

    @property
    def num_that_fit(self) -> int:
        """How many batches are kept, as far as their sizes are known."""
        if not self._largest:
            return self.keep
        return max(1, min(self.keep, self.max_bytes // self._largest))

    @property
    def calls_between(self) -> int:
        """After how many batches they should be fetched, so that few pile up."""
        if not self._largest:
            return 1
        room = int(self.max_bytes * _SHARE_BETWEEN) // self._largest
        return max(1, min(_MAX_CALLS_BETWEEN, room))

    def fetch(self) -> int:
        """Takes over what was drawn meanwhile; returns how many were drawn so far."""
        for form in self._forms:
            with tf.device("CPU:0"):
                size = tf.raw_ops.StageSize(dtypes=form.dtypes, shared_name=form.name)
                for _ in range(int(size)):
                    flat = tf.raw_ops.Unstage(dtypes=form.dtypes, shared_name=form.name)
                    self._hold((form, flat), sum(map(_size_of, flat)))
        for data in self._eager_batches:
            self._hold((None, data), sum(map(_size_of, _flat(data))))
        self._eager_batches.clear()
        return self.num_drawn

    def batches(self) -> list[Kept]:
        """Returns the batches that are kept, the oldest first."""
        self.fetch()
        return [
            Kept(number, self._parts(*held), size, _shapes(*held))
            for number, held, size in self._kept
        ]

    def draw(self, iterator: Any) -> Any:
        """Returns the next batch of an iterator."""
        data = iterator.get_next()
        if tf.executing_eagerly():
            self._eager_batches.append(data)
            return data
        return _after(self._put_by(data), data)

    def draw_optional(self, iterator: Any) -> Any:
        """Returns the next batch of an iterator, or that there is none."""
        data = iterator.get_next_as_optional()
        if tf.executing_eagerly():
            if bool(data.has_value()):
                self._eager_batches.append(data.get_value())
            return data

        def put_by() -> tf.Tensor:
            with tf.control_dependencies([self._put_by(data.get_value())]):
                return tf.constant(True)

        done = tf.cond(data.has_value(), put_by, lambda: tf.constant(False))
        return _after(done, data)

    def _put_by(self, data: Any) -> Any:
        """Puts a batch by in the graph, where Python can fetch it."""
        self.num_traces += 1
        flat = _flat(data)
        form = self._form_of(data, flat)
        with tf.device("CPU:0"):
            return tf.raw_ops.Stage(values=flat, shared_name=form.name)

    def _form_of(self, data: Any, flat: Sequence[tf.Tensor]) -> _Form:
        structure = tf.nest.map_structure(tf.type_spec_from_value, data)
        for form in self._forms:
            if form.structure == structure:
                return form
        self._forms.append(
            _Form(
                name=f"tfamp_batches_{self.key}_{len(self._forms)}",
                dtypes=tuple(tensor.dtype for tensor in flat),
                shapes=tuple(
                    tensor.shape.as_list() if tensor.shape.rank is not None else None
                    for tensor in flat
                ),
                structure=structure,
            )
        )
        return self._forms[-1]

    def _hold(self, held: Any, size: int) -> None:
        self._kept.append((self.num_drawn, held, size))
        self.num_drawn += 1
        self._num_bytes += size
        self._largest = max(self._largest, size)
        while len(self._kept) > self.keep:
            self._num_bytes -= self._kept.popleft()[2]
        while self._num_bytes > self.max_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popleft()[2]
            self.was_cut = True

    def _parts(self, form: _Form | None, held: Any) -> tuple[Any, ...]:
        if form is not None:
            held = tf.nest.pack_sequence_as(
                form.structure, held, expand_composites=True
            )
        leaves = [
            self._replicas.experimental_local_results(leaf)
            for leaf in tf.nest.flatten(held)
        ]
        num_parts = max((len(parts) for parts in leaves), default=1)
        each = [[parts[i % len(parts)] for parts in leaves] for i in range(num_parts)]
        return tuple(
            without_optionals(tf.nest.pack_sequence_as(held, part)) for part in each
        )


def ring_of(model: keras.Model, *, keep: int, max_bytes: int) -> BatchRing:
    """Returns the ring of a model, with nothing in it."""
    if model not in _RINGS:
        _RINGS[model] = BatchRing(model.distribute_strategy)
    ring = _RINGS[model]
    ring.begin(keep=keep, max_bytes=max_bytes)
    return ring


# What may be held of batches since the last good state, in number and size.
_MAX_SINCE, _MAX_BYTES_SINCE = 1000, 2**28


class BatchesSince:
    """Holds the batches that were trained since a good state, for the triage.

    In `fit` the traced function draws its batches out of Python's sight, so they are
    held on their way, the newest where not all may be. A `FlightRecorder` in the same
    `fit` holds them already.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._steps = int(model.steps_per_execution or 1)
        self._ring: BatchRing | None = None
        self._num_calls = self._first = 0

    def through(self, iterator: Any, *, is_held: bool) -> Any:
        """Returns what the training function draws from in place of an iterator."""
        if is_held or not isinstance(iterator, ITERATORS):
            return iterator
        if self._ring is None:
            self._ring = BatchRing(
                self._model.distribute_strategy,
                keep=max(_MAX_SINCE, self._steps),
                max_bytes=_MAX_BYTES_SINCE,
            )
        elif not self._ring.num_drawn:
            self._ring.fetch()  # it learns their size, and so how many may pile up
        self._num_calls += 1
        if self._num_calls > max(1, self._ring.calls_between // self._steps):
            self._num_calls = 0
            self._ring.fetch()
        return self._ring.around(iterator)

    def mark(self) -> int:
        """Returns how many batches were drawn so far."""
        ring = self._ring_now()
        return 0 if ring is None else ring.fetch()

    def begin_at(self, number: int) -> None:
        """Forgets the batches before a number that `mark` gave."""
        self._first = number
        if self._ring is not None:
            self._ring.forget_before(number)

    def kept(self) -> list[Any]:
        """Returns the batches that are held, the oldest first."""
        ring = self._ring_now()
        held = [] if ring is None else ring.batches()
        return [whole(each.parts) for each in held if each.number >= self._first]

    def clear(self) -> None:
        """Lets all batches go."""
        if self._ring is not None:
            self._ring.release()

    def _ring_now(self) -> BatchRing | None:
        return self._ring or _RINGS.get(self._model)


def _flat(data: Any) -> list[tf.Tensor]:
    """Returns the dense tensors that a batch is made of."""
    flat = tf.nest.flatten(data, expand_composites=True)
    return [tensor for tensor in flat if tensor is not None]


def _after(done: Any, data: Any) -> Any:
    """Returns `data` as tensors that are there only once it is put by.

    Else a step that raises could take its own batch with it.
    """
    with tf.control_dependencies([done]):
        return tf.nest.map_structure(
            lambda tensor: None if tensor is None else tf.identity(tensor),
            data,
            expand_composites=True,
        )


def _shapes(form: _Form | None, flat: Any) -> dict[int, list[int | None]]:
    """Returns what the graph knew of the shapes of tensors, by their identity."""
    if form is None:
        return {}
    pairs = zip(flat, form.shapes, strict=True)
    return {id(tensor): shape for tensor, shape in pairs if shape is not None}


def _size_of(tensor: Any) -> int:
    if tensor.dtype == tf.string:
        return sum(map(len, np.ravel(tensor.numpy()))) + tensor.shape.num_elements()
    if tensor.dtype == tf.variant:
        return 0
    return int(tensor.shape.num_elements() * tensor.dtype.size)


def whole(parts: tuple[Any, ...]) -> Any:
    """Returns a batch of all replicas as one."""
    if len(parts) == 1:
        return parts[0]
    return tf.nest.map_structure(
        lambda *leaves: leaves[0] if leaves[0] is None else tf.concat(leaves, 0), *parts
    )


def holds_nonfinite(batch: Any) -> bool:
    """Returns whether a batch holds NaN or inf."""
    return any(
        not np.all(np.isfinite(np.asarray(leaf)))
        for leaf in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_tensor(leaf) and leaf.dtype.is_floating
    )
