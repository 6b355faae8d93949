"""Where elements come from: what every source can do, and a file for each kind.

A source with random access lets a shuffle move 8 bytes an element instead of the
element, which is exact at any size and holds nothing twice.
"""

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import Order
from tfamp.data.stages import Settings

DATA = tf.data.experimental.AutoShardPolicy.DATA


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """What every source can do.

    Attributes:
        shard_policy: How `tf.distribute` splits the elements over workers. DATA is
            exact for any number of files, and behind a cache or a sampling: each
            worker reads all and takes its share.
        skips_errors: Whether `dataset` itself leaves out what it cannot read when
            `settings.errors` is given.
        gives_examples: Whether an element is one example, and never a batch.
    """

    shard_policy: ClassVar[tf.data.experimental.AutoShardPolicy] = DATA
    skips_errors: ClassVar[bool] = False
    gives_examples: ClassVar[bool] = True

    @abc.abstractmethod
    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the elements in their own order."""

    @abc.abstractmethod
    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""

    @abc.abstractmethod
    def identity(self) -> Any:
        """Returns what tells this source from a changed one, for a cache in files.

        Files count by path, size and time of change, arrays by their bytes.
        """

    def order(self) -> Order:
        """Returns in how far elements come in one order; those of most sources do."""
        return Order()

    def locate(self, position: int) -> str:
        """Returns where element `position` of this source lies, in words."""
        return f"element {position}"


def files_identity(paths: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    """Returns path, bytes and nanoseconds of the last change of each file."""
    stats = [(path, os.stat(path)) for path in paths]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


@dataclasses.dataclass(frozen=True)
class RandomAccess(Source):
    """A source of which any element can be read by its position.

    Attributes:
        tensors: A structure of tensors `(examples, ...)` on the CPU, whose first
            dimensions are equal.
        num_examples: The size of that first dimension.
        origin: Where the elements lay in the source that this is a part of, int64
            `(examples,)`; None if it is no part.
    """

    tensors: Any
    num_examples: int
    origin: Any = dataclasses.field(default=None, compare=False, kw_only=True)

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the elements; their rows share the tensors' memory."""
        return tf.data.Dataset.from_tensor_slices(self.tensors)

    def rows(self, positions: tf.Tensor) -> Any:
        """Returns the elements at `positions`, a scalar or `(batch,)`."""
        return tf.nest.map_structure(
            lambda tensor: tf.gather(tensor, positions), self.tensors
        )

    def part(self, positions: tf.Tensor) -> "RandomAccess":
        """Returns a source of the elements at `positions` alone."""
        origin = positions if self.origin is None else tf.gather(self.origin, positions)
        size = int(tf.size(positions))
        kept = {"tensors": self.rows(positions), "num_examples": size}
        return dataclasses.replace(self, **kept, origin=origin)

    def locate(self, position: int) -> str:
        """Returns the number that element `position` has in the whole source."""
        return super().locate(
            position if self.origin is None else int(self.origin[position])
        )

    def identity(self) -> Any:
        """Returns the tensors, which count by their bytes."""
        return self.tensors
