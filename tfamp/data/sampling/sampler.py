"""What balancing and weighting share: a new draw of the examples each epoch.

It works in two ways. By position, where any example can be read by its number: what
the draw leaves out is never read. On a stream, where examples come one after
another: each is repeated or dropped as the draw says.
"""

import abc
import dataclasses
from typing import ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._sources import RandomAccess
from tfamp.data._stages import Settings, Stage
from tfamp.data.sampling.labels import Memory, Reader, count
from tfamp.data.sampling.streams import (
    Draw,
    Expected,
    drawn_elements,
    drawn_positions,
)
from tfamp.records import checks

# From `advise` to the caller of `Pipeline.build`, on a stream and by position.
_STREAM_STACKLEVEL, _POSITION_STACKLEVEL = 5, 6


@dataclasses.dataclass(frozen=True)
class Sampler(Stage):
    """Draws anew in each epoch which examples come, and how often.

    Attributes:
        seed: Same seed, same sequence of epochs; None for another each time. Workers
            of `tf.distribute` need a seed, so that they agree.
        memory: What was read of the last dataset.
    """

    rank: ClassVar[int] = 25
    seed: int | None = dataclasses.field(default=None, kw_only=True)
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    @property
    @abc.abstractmethod
    def reader(self) -> Reader | None:
        """What to read of each example, None for nothing."""

    @abc.abstractmethod
    def draw(self, values: np.ndarray | None, num_examples: int) -> Draw:
        """Returns the plan of an epoch, given what was read."""

    def advise(self, values: np.ndarray | None, stacklevel: int) -> None:
        """Warns if what was read makes the stage useless."""
        del values, stacklevel  # most stages have nothing to say

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends or has not what is read of it."""
        check_ends(dataset, self.name)
        if self.reader is not None:
            self.reader.check(dataset)

    def positions(self, source: RandomAccess, settings: Settings) -> tf.data.Dataset:
        """Returns the positions of the examples to take, shuffled, anew each epoch."""
        values = self.memory.get(source, lambda: self._values(source, settings))
        self.advise(values, _POSITION_STACKLEVEL)
        return drawn_positions(self.draw(values, source.num_examples), self.seed)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the examples to take, in the order they have, copies together."""

        def look() -> tuple[np.ndarray | None, int]:
            values = self._values(dataset, settings)
            return values, count(dataset) if values is None else len(values)

        values, num_examples = self.memory.get(dataset, look)
        self.advise(values, _STREAM_STACKLEVEL)
        expected = None
        if self.reader is not None:
            expected = Expected(self.reader, values)
        draw = self.draw(values, num_examples)
        return drawn_elements(dataset, draw, self.seed, expected)

    def _values(
        self, data: RandomAccess | tf.data.Dataset, settings: Settings
    ) -> np.ndarray | None:
        return None if self.reader is None else self.reader.read(data, settings)


def check_ends(dataset: tf.data.Dataset, name: str) -> None:
    """Raises if a dataset has no end."""
    if int(dataset.cardinality()) == int(tf.data.INFINITE_CARDINALITY):
        raise ValueError(
            f"`.{name}` got a dataset without end; expected one that ends, since what "
            "comes in an epoch is chosen from all of it. Leave `.repeat()` out: an "
            "epoch of `fit` reads the dataset once."
        )


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of the same elements whose length tf.data does not know."""
    return dataset.filter(lambda *parts: True)


def seed_text(seed: int | None) -> str:
    """Returns a seed in words."""
    return "no seed" if seed is None else f"seed {seed}"
