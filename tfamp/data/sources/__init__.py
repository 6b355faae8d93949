"""Where elements come from: what every source can do, and a file for each kind."""

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
    """What every source can do."""

    # How `tf.distribute` splits the elements over workers. DATA is exact for any number
    # of files, and behind a cache or a sampling: each worker takes its share of all.
    shard_policy: ClassVar[tf.data.experimental.AutoShardPolicy] = DATA
    skips_errors: ClassVar[bool] = False  # where that is asked for
    gives_examples: ClassVar[bool] = True  # never batches

    @abc.abstractmethod
    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the elements in their own order."""

    @abc.abstractmethod
    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""

    @abc.abstractmethod
    def identity(self) -> Any:
        """Returns what tells this source from a changed one, for a cache in files."""

    def without_damage(self, log: Any) -> "Source":
        """Returns the source as a build that skips errors reads it; `log` counts."""
        del log
        return self

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

    So a shuffle moves 8 bytes an element, which is exact at any size. The origin tells
    where elements lay in the source that this is a part of, if it is one.
    """

    tensors: Any  # a structure of tensors `(examples, ...)` on the CPU
    num_examples: int
    origin: Any = dataclasses.field(default=None, compare=False, kw_only=True)

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the elements; their rows share the tensors' memory."""
        return tf.data.Dataset.from_tensor_slices(self.tensors)

    def rows(self, positions: tf.Tensor) -> Any:
        """Returns the elements at `positions`, a scalar or `(batch,)`."""
        return tf.nest.map_structure(lambda t: tf.gather(t, positions), self.tensors)

    def part(self, positions: tf.Tensor) -> "RandomAccess":
        """Returns a source of the elements at `positions` alone."""
        origin = positions if self.origin is None else tf.gather(self.origin, positions)
        size = int(tf.size(positions))
        kept = {"tensors": self.rows(positions), "num_examples": size}
        return dataclasses.replace(self, **kept, origin=origin)

    def locate(self, position: int) -> str:
        """Returns the number that element `position` has in the whole source."""
        at = position if self.origin is None else int(self.origin[position])
        return super().locate(at)

    def identity(self) -> Any:
        """Returns the tensors, which count by their bytes."""
        return self.tensors
