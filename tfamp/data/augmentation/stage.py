"""Augmentation as a stage: behind the cache, on all cores, anew in each epoch."""

import dataclasses
import random
import threading
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import (
    bytes_of_element,
    inputs_of,
    known_length,
    with_inputs,
    with_length_of,
)
from tfamp.data.augmentation.chain import Chain
from tfamp.data.stages.base import Settings, Stage, map_in_order
from tfamp.records import checks

# A block of small images costs a half of what they cost one by one; in float32 it
# should fit into a core's own cache.
_BLOCK_BYTES = 2**20
_MAX_BLOCK = 32


class EpochCounter:
    """Counts the passes over one dataset that gave their last element.

    One that was left early, as a look at the first batch is, does not count.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()

    def read(self) -> np.int64:
        """Returns the number of the epoch that begins."""
        return np.int64(self._epoch)

    def finish(self, epoch: np.int64) -> np.int64:
        """Notes that an epoch has given its last element; twice does no harm."""
        with self._lock:
            self._epoch = max(self._epoch, int(epoch) + 1)
        return epoch

    def number(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns triples (epoch, index, element); the length stays known."""

        # A call into Python at the first element only.
        def endless(_: tf.Tensor) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensors(self._read_tensor()).repeat()

        epochs = tf.data.Dataset.range(1).flat_map(endless)
        numbered = tf.data.Dataset.zip(epochs, dataset.enumerate())
        numbered = with_length_of(dataset, numbered)
        return numbered.map(lambda epoch, item: (epoch, *item))

    def count(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset; that it was read to its end is noted here."""
        length = known_length(dataset)
        if length is None:
            # Whose end is not known, is read until there is no more.
            last = tf.data.Dataset.range(1).filter(
                lambda _: self._finish_tensor(self._read_tensor()) < 0
            )
            return dataset.concatenate(last.flat_map(lambda _: dataset.take(0)))

        # Where it is known, readers such as `fit` stop at the last element.
        def step(epoch: tf.Tensor, item: Any) -> tuple[tf.Tensor, Any]:
            index, element = item
            epoch = tf.cond(index == 0, self._read_tensor, lambda: epoch)
            is_last = index == length - 1
            epoch = tf.cond(is_last, lambda: self._finish_tensor(epoch), lambda: epoch)
            return epoch, element

        return dataset.enumerate().scan(tf.constant(0, tf.int64), step)

    def _read_tensor(self) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(self.read, [], tf.int64), ())

    def _finish_tensor(self, epoch: tf.Tensor) -> tf.Tensor:
        found = tf.numpy_function(self.finish, [epoch], tf.int64)
        return tf.ensure_shape(found, ())


@dataclasses.dataclass(frozen=True)
class CountEpochs(Stage):
    """Notes where whole passes end, behind everything that reads ahead.

    A look at the first batch lets a prefetch read on, to the end of a small dataset.
    Only what leaves the pipeline tells whether an epoch was used. The counter is that
    of the stage that acts by epochs.
    """

    name: ClassVar[str] = "epochs"
    counter: EpochCounter = dataclasses.field(compare=False)
    first: int

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset, counted."""
        return self.counter.count(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return f"counted from {self.first}", "whole passes; each has its own changes"


@dataclasses.dataclass(frozen=True)
class Augmentation(Stage):
    """Changes elements at random, anew in each epoch, as the chain says.

    `Pipeline.augment` explains the arguments. Seed, epoch and number of an element
    decide its changes; the plan gives each dataset a counter of its own.
    """

    name: ClassVar[str] = "augment"
    chain: Chain
    strength: float = 1.0
    ramp_epochs: int = 0
    ramp_from: float = 0.0
    seed: int | None = None
    key: str | None = None
    initial_epoch: int = 0
    counter: EpochCounter = dataclasses.field(
        default_factory=lambda: EpochCounter(0), compare=False
    )

    def __post_init__(self) -> None:
        checks.fraction("strength", self.strength)
        checks.positive_int("ramp_epochs", self.ramp_epochs, minimum=0)
        checks.fraction("ramp_from", self.ramp_from)
        checks.positive_int("initial_epoch", self.initial_epoch, minimum=0)
        if self.ramp_from and not self.ramp_epochs:
            raise ValueError(
                f"`ramp_from` is {self.ramp_from!r} and `ramp_epochs` is 0; expected "
                "both or neither. Pass the number of epochs that the ramp takes."
            )
        if self.key is not None and not isinstance(self.key, str):
            raise TypeError(
                f"`key` is {self.key!r}; expected the name of one input. Pass a string."
            )
        if self.seed is None:
            object.__setattr__(self, "seed", random.randrange(2**31))
        checks.positive_int("seed", self.seed, minimum=0)

    def with_epochs(self) -> tuple[Stage, Stage] | None:
        """Returns the stage for one dataset, and what counts its epochs."""
        if self.max_strength == 0:
            return None
        counter = EpochCounter(self.initial_epoch)
        stage = dataclasses.replace(self, counter=counter)
        return stage, CountEpochs(counter, self.initial_epoch)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises, before anything runs, if `dataset` does not suit."""
        self.chain.check(_part(dataset.element_spec, self.key))
        if self.ramp_epochs and int(dataset.cardinality()) == int(
            tf.data.INFINITE_CARDINALITY
        ):
            raise ValueError(
                f"`ramp_epochs` is {self.ramp_epochs} and the dataset has no end; "
                "expected epochs to count. Leave `repeat` to `fit`, or leave out "
                "`ramp_epochs`."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Numbers elements and epochs, then changes elements in parallel."""
        if self.max_strength == 0:
            return dataset
        numbered = self.counter.number(dataset)
        size = self._block_size(dataset.element_spec)
        if size == 1:
            return map_in_order(numbered, self._change_one, settings)
        blocks = map_in_order(numbered.batch(size), self._change_block, settings)
        return with_length_of(dataset, blocks.unbatch())

    def _change_one(self, epoch: tf.Tensor, index: tf.Tensor, element: Any) -> Any:
        image = _part(element, self.key)
        changed = self._run(image[None], epoch, index)[0]
        return _with_part(element, self.key, changed)

    def _change_block(self, epochs: tf.Tensor, indices: tf.Tensor, block: Any) -> Any:
        changed = self._run(_part(block, self.key), epochs[0], indices[0])
        return _with_part(block, self.key, changed)

    def _run(self, images: tf.Tensor, epoch: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
        number = self.seed or 0
        words = [number % 2**31, number // 2**31 % 2**31]
        seed = tf.constant(words, tf.int32)
        seed = tf.random.experimental.stateless_fold_in(seed, epoch)
        seed = tf.random.experimental.stateless_fold_in(seed, index)
        return self.chain.run(images, self.strength_at(epoch), seed)

    def _block_size(self, spec: Any) -> int:
        """Returns how many elements are changed by one call."""
        size = bytes_of_element(spec)
        if size is None or not self.chain.takes_batches:
            return 1
        num_values = _part(spec, self.key).shape.num_elements()
        return max(1, min(_MAX_BLOCK, _BLOCK_BYTES // (4 * max(1, num_values))))

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it is: elements keep shape and dtype."""
        return dataset

    @property
    def max_strength(self) -> float:
        """The largest strength in any epoch."""
        return max(self.strength, self.ramp_from)

    def strength_at(self, epoch: tf.Tensor) -> tf.Tensor:
        """Returns the strength in an epoch, float32."""
        if not self.ramp_epochs:
            return tf.constant(self.strength, tf.float32)
        way = tf.minimum(tf.cast(epoch, tf.float32) / self.ramp_epochs, 1.0)
        return self.ramp_from * (1 - way) + self.strength * way

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        strength = f"strength {self.strength:g}"
        if self.ramp_epochs:
            strength = (
                f"strength {self.ramp_from:g} to {self.strength:g} in "
                f"{self.ramp_epochs} epochs"
            )
        names = ", ".join(self.chain.names)
        reason = f"after the cache, so each epoch differs; {settings.parallelism}"
        return f"{names}; {strength}", reason


def _part(element: Any, key: str | None) -> Any:
    """Returns the input of an element, or of its spec, that is to be changed."""
    inputs = inputs_of(element)
    if isinstance(inputs, dict) and key in inputs:
        return inputs[key]
    if isinstance(inputs, dict) or key is not None:
        names = tuple(inputs) if isinstance(inputs, dict) else "no dict"
        raise ValueError(
            f"`key` is {key!r} and the inputs are {names!r}; expected the name of one "
            "of them, and None where they are no dict. Pass the name of the images."
        )
    return inputs


def _with_part(element: Any, key: str | None, changed: tf.Tensor) -> Any:
    """Returns an element with its input changed."""
    new = changed if key is None else {**inputs_of(element), key: changed}
    return with_inputs(element, new)
