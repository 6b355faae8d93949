"""The batches of `fit`, epoch by epoch: where it stands in them, and how to go there.

Relies on: `fit` making one `TFEpochIterator` for training, which it resets ahead of all
others, and running through it once an epoch; its methods being looked up on the
instance; `_enumerate_iterator` giving for each execution a tuple of its first step and,
last, what the training function draws from; `_get_iterator` being called for each
iterator that is made; `_current_iterator` and `_steps_seen` being all that lasts from
one epoch to the next; `_initial_epoch` being where `fit` begins, where callbacks have
set it when training begins; epoch iterators calling `data_adapters.get_data_adapter` by
this name for all data, as `x`.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator

from tfamp.keras_hooks import around_training
from tfamp.keras_hooks.patches import Function, Patch, PatchSet, wrapper


class Execution(NamedTuple):
    """One call of the training function in an epoch."""

    begin: int  # number of its first step in the epoch
    end: int  # the one after its last step, where data is left for all
    iterator: Any  # what it draws from
    item: tuple[Any, ...]  # what Keras has of it


Around = Callable[[Iterator[Execution]], Iterator[Execution]]
Kind = TypeVar("Kind", bound=type)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an epoch begins in the data.

    `made` are the iterators that were made of the dataset until then: each gives a
    dataset that shuffles itself its next order. `used` says which of them a batch was
    drawn from; some draw random numbers only then. `drawn` are the batches from the
    last one, and `seen` the steps that Keras counts of it, where it lasts over epochs,
    as it does with `steps_per_epoch`.
    """

    made: int
    drawn: int = 0
    seen: int = 0
    used: tuple[bool, ...] = ()


class Feed:
    """The batches that one `fit` trains on.

    `around` takes what Keras goes through in an epoch, and gives what `fit` gets to
    see of it.
    """

    def __init__(self, epochs: Any) -> None:
        self._epochs, adapter = epochs, epochs.data_adapter
        self.around: Around | None = None
        self.drawn = 0
        self.used: list[bool] = []  # of each iterator that was made
        # Steps in one call of the training function.
        self.steps_per_execution = int(epochs.steps_per_execution)
        # Whether Keras brings the examples of arrays in an order of its own.
        self.shuffles = bool(getattr(adapter, "_shuffle", False))
        # Examples in a batch, None where that is not known.
        size = getattr(adapter, "batch_size", None)
        self.batch_size = None if size is None else int(size)
        # Which data it is, and the dataset that was given, None for something else.
        self.kind, self.dataset = "other", None
        if isinstance(adapter, ArrayDataAdapter):
            self.kind = "arrays"
        elif isinstance(adapter, TFDatasetAdapter):
            self.kind, self.dataset = "dataset", adapter.get_tf_dataset()

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, None where that is not known yet."""
        found = self._epochs.num_batches
        return None if found is None else int(found)

    @property
    def spec(self) -> Any:
        """What a trace knows of a batch, None where several replicas share it."""
        dataset = getattr(self._epochs, "_distributed_dataset", None)
        return dataset.element_spec if isinstance(dataset, tf.data.Dataset) else None

    def place(self) -> Place:
        """Returns where the epoch that comes next begins."""
        epochs, used = self._epochs, tuple(self.used)
        if epochs.steps_per_epoch is None or epochs._current_iterator is None:
            return Place(len(used), used=used)
        return Place(len(used), self.drawn, epochs._steps_seen, used)

    def go_to(self, place: Place) -> Any:
        """Brings the data to where an epoch began in another process.

        Returns a batch of another epoch, None where there was none to draw. Where an
        iterator lasts over epochs, all batches up to there are drawn.
        """
        epochs = self._epochs
        iterator, batch = epochs._current_iterator, None
        while len(self.used) < place.made:
            number, iterator = len(self.used), iter(epochs._get_iterator())
            # The batches of the last one may be drawn below.
            is_last = len(self.used) == place.made
            if place.used[number] and not (is_last and place.drawn):
                batch = next(iterator, None)
                self.used[number] = True
        if not place.drawn:
            return next(iterator) if batch is None and iterator is not None else batch
        for _ in range(place.drawn):
            batch = next(iterator)
        epochs._current_iterator, epochs._steps_seen = iterator, place.seen
        self.note_drawn(place.drawn - self.drawn)
        return batch

    def note_drawn(self, num_batches: int) -> None:
        """Notes that batches were drawn from the newest iterator."""
        self.drawn += num_batches
        if self.used:
            self.used[-1] = True

    def first_batch(self) -> Any:
        """Returns the first batch of an iterator of its own."""
        return next(iter(self._epochs._get_iterator()))


def begin_at(model: keras.Model, epoch: int | None) -> None:
    """Has the `fit` that begins now begin at an epoch; None lets later ones be."""
    model._initial_epoch = epoch


def global_seed_state() -> Any:
    """Returns the variable of Keras's own random numbers, None before their use."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return None if generator is None else generator.state


@wrapper
def _wrap_init(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    # What an iterator holds must not hold it.
    epochs, cls = weakref.proxy(self), type(self)
    feed = Feed(epochs)

    def reset() -> None:
        around_training.note_feed(feed)
        cls.reset(epochs)

    def get_iterator() -> Any:
        feed.used.append(False)
        feed.drawn = 0
        return cls._get_iterator(epochs)

    def executions() -> Iterator[Execution]:
        for item in cls._enumerate_iterator(epochs):
            begin, steps = int(item[0]), feed.steps_per_execution
            feed.note_drawn(steps)
            yield Execution(begin, begin + steps, item[-1], item)

    def enumerate_iterator() -> Iterator[tuple[Any, ...]]:
        found = executions() if feed.around is None else feed.around(executions())
        return (each.item for each in found)

    vars(self).update(
        reset=reset,
        _get_iterator=get_iterator,
        _enumerate_iterator=enumerate_iterator,
        _tfamp_feed=feed,
    )


# That of several workers is on the class below.
EPOCH_HOOKS = PatchSet([Patch(EpochIterator, "__init__", _wrap_init)])


def order_patches() -> list[Patch]:
    """Returns the patch that gives each epoch over arrays an order of its own.

    Keras 3.16 draws the order from a number of the epoch that the trace freezes
    (keras#23046). Up to 3.15 TensorFlow draws it, as here.
    """

    @wrapper
    def wrap_shuffle(original: Function, self: Any, tensors: Any) -> Any:
        if getattr(self, "_num_data_shards", 1) > 1:  # each worker needs the same
            return original(self, tensors)
        return tf.random.shuffle(tensors)

    is_due = "_tf_shuffle" in vars(ArrayDataAdapter)
    return [Patch(ArrayDataAdapter, "_tf_shuffle", wrap_shuffle)] * is_due


def built_by_fit(kind: Kind) -> Kind:
    """Has Keras call `build` of objects of a class, for the dataset to read."""

    @wrapper
    def wrap_adapter(original: Function, x: Any, *args: Any, **kwargs: Any) -> Any:
        data: Any = x
        if isinstance(x, kind):
            data = data.build()
        return original(data, *args, **kwargs)

    PatchSet([Patch(data_adapters, "get_data_adapter", wrap_adapter)]).install()
    return kind
