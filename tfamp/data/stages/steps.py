"""Steps that stand only in plans: stages in another form, or in another place."""

import dataclasses
from typing import Any

import tensorflow as tf

from tfamp.data._sources import RandomAccess
from tfamp.data.stages.base import Batch, Settings, Stage
from tfamp.data.stages.cache import Cache


@dataclasses.dataclass(frozen=True)
class AlreadyInMemory(Stage):
    """Stands for a memory cache of arrays, which would hold them a second time."""

    name = Cache.name

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it is."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return "left out", "the arrays are in memory already"


@dataclasses.dataclass(frozen=True)
class Chosen(Stage):
    """Tells of a part that the source was cut to before anything is read.

    The stage `chooser` chose among `num_examples`.
    """

    chooser: Stage
    num_examples: int

    @property
    def name(self) -> str:  # type: ignore[override]
        """What the stage is called."""
        return self.chooser.name

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it is."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        all_of_them = tf.data.Dataset.range(self.num_examples)
        setting, reason = self.chooser.explain(all_of_them, settings)
        return setting, f"{reason}; of {self.num_examples:,}, before any is read"


@dataclasses.dataclass(frozen=True)
class ByPosition(Stage):
    """Draws positions in a source by its labels or weights, as `sampler` asks for."""

    sampler: Any
    source: RandomAccess = dataclasses.field(compare=False)

    @property
    def name(self) -> str:  # type: ignore[override]
        """What the stage is called."""
        return self.sampler.name

    @property
    def seed(self) -> int | None:
        """What decides the order, None for another one in each process."""
        return self.sampler.seed

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a new draw of positions for each epoch, in place of all in order."""
        return self.sampler.positions(self.source, settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        setting, reason = self.sampler.explain(dataset, settings)
        return setting, f"{reason}; by position, exact"


@dataclasses.dataclass(frozen=True)
class Number(Stage):
    """Pairs each element with its position in the source."""

    name = "number"

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns pairs (position, element)."""
        return dataset.enumerate()

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return "positions", "so that a skipped element can be named"


@dataclasses.dataclass(frozen=True)
class Rebatch(Batch):
    """Makes batches out of chunks of `num_rows` rows in all, None where unknown."""

    num_rows: int | None = None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; the source made the chunks for this."""
        self.check_length(self.num_rows)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Cuts and joins whole chunks."""
        batches = dataset.rebatch(self.size, drop_remainder=self.drop_remainder)
        if self.num_rows is None:
            return batches
        whole, rest = divmod(self.num_rows, self.size)
        count = whole + (rest > 0 and not self.drop_remainder)
        return batches.apply(tf.data.experimental.assert_cardinality(count))

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        last = "drops the rest" if self.drop_remainder else "the last may be smaller"
        return str(self.size), f"from chunks, rows are never taken apart; {last}"
