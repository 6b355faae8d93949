"""Where elements come from: one frozen record per kind of source.

A source gives a dataset of elements in their own order. `_arrays.py` holds the one
with random access.
"""

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data._stages import Settings

DATA = tf.data.experimental.AutoShardPolicy.DATA


@dataclasses.dataclass(frozen=True)
class Source(abc.ABC):
    """What every source can do.

    Attributes:
        shard_policy: How `tf.distribute` splits the elements over workers. DATA is
            exact for any number of files, and behind a cache or a sampling.
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
        """Returns what tells this source from a changed one.

        A file cache is built again when it differs. Files count by path, size and
        time of change (`files_identity`), arrays by their bytes.
        """

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

    def positions(self) -> tf.data.Dataset:
        """Returns the numbers of all elements, int64."""
        return tf.data.Dataset.range(self.num_examples)

    def rows(self, positions: tf.Tensor) -> Any:
        """Returns the elements at `positions`, a scalar or `(batch,)`."""
        return tf.nest.map_structure(
            lambda tensor: tf.gather(tensor, positions), self.tensors
        )

    def part(self, positions: tf.Tensor) -> "RandomAccess":
        """Returns a source of the elements at `positions` alone."""
        origin = positions if self.origin is None else tf.gather(self.origin, positions)
        return dataclasses.replace(
            self,
            tensors=self.rows(positions),
            num_examples=int(tf.size(positions)),
            origin=origin,
        )

    def locate(self, position: int) -> str:
        """Returns the number that element `position` has in the whole source."""
        return super().locate(
            position if self.origin is None else int(self.origin[position])
        )

    def identity(self) -> Any:
        """Returns the tensors, which count by their bytes."""
        return self.tensors


@dataclasses.dataclass(frozen=True)
class DatasetSource(Source):
    """A dataset that the user made."""

    gives_examples = False
    given: tf.data.Dataset

    @property
    def shard_policy(self) -> Any:
        """What the user chose, or DATA in place of AUTO.

        AUTO may divide files, even those behind a file cache, which every worker
        would then read whole.
        """
        chosen = self.given.options().experimental_distribute.auto_shard_policy
        is_auto = chosen == tf.data.experimental.AutoShardPolicy.AUTO
        return DATA if is_auto else chosen

    def identity(self) -> Any:
        """Returns the dataset, which counts by its graph."""
        return self.given

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it was given."""
        return self.given

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        length = known_length(dataset)
        size = "length unknown" if length is None else f"{length:,} elements"
        return f"dataset, {size}", "as given; its own stages come first"


@dataclasses.dataclass(frozen=True)
class TfdsSource(Source):
    """One split of a prepared TensorFlow Datasets builder."""

    builder: Any
    split: str
    as_supervised: bool
    # Exact for any number of files; sharding by file needs one for each worker.
    shard_policy = DATA

    def identity(self) -> Any:
        """Returns name, version, split, and when the data was prepared."""
        info = self.builder.info
        written = os.path.join(str(self.builder.data_dir), "dataset_info.json")
        return (info.full_name, self.split, files_identity([written]))

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the examples in the order they were written."""
        import tensorflow_datasets as tfds

        calls = settings.num_parallel_calls
        config = tfds.ReadConfig(
            # Caching is a stage of the pipeline, not a surprise below it.
            try_autocache=False,
            num_parallel_calls_for_decode=calls,
            num_parallel_calls_for_interleave_files=calls,
        )
        return self.builder.as_dataset(
            split=self.split, as_supervised=self.as_supervised, read_config=config
        )

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        length = known_length(dataset)
        size = "length unknown" if length is None else f"{length:,} examples"
        name = f"{self.builder.info.full_name}[{self.split}]"
        return f"TFDS {name}, {size}", "in the order written, which TFDS shuffled once"


def dataset_source(dataset: Any) -> DatasetSource:
    """Checks that a dataset is one and is not empty.

    Raises:
        TypeError: `dataset` is no `tf.data.Dataset`.
        ValueError: It has no elements.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`dataset` is a {type(dataset).__name__}; expected a tf.data.Dataset. For "
            "arrays use `Pipeline.from_arrays`; distribute the result of `build`."
        )
    cardinality = int(dataset.cardinality())
    is_unknown = cardinality == int(tf.data.UNKNOWN_CARDINALITY)
    if cardinality == 0 or (is_unknown and next(iter(dataset), None) is None):
        raise ValueError(
            "`dataset` has no elements; expected at least one. `fit` on an empty "
            "dataset trains nothing and says nothing: check the files or the filter "
            "that it is made of."
        )
    return DatasetSource(dataset)


def tfds_source(builder: Any, split: str, *, as_supervised: bool) -> TfdsSource:
    """Checks that a prepared builder has what is asked of it.

    Raises:
        ValueError: No such split, no examples in it, or no (input, target) pairs.
    """
    if as_supervised and builder.info.supervised_keys is None:
        raise ValueError(
            f"Dataset {builder.name!r} names no (input, target) pair among its "
            f"features {tuple(builder.info.features)}; expected one. Pass "
            "`as_supervised=False` and choose in `.map`."
        )
    try:
        num_examples = builder.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"Unknown `split` {split!r} of dataset {builder.name!r}; expected one of "
            f"{tuple(builder.info.splits)}, or a part such as 'train[:80%]'. Print "
            "them with `builder.info.splits`."
        ) from error
    if num_examples == 0:
        raise ValueError(
            f"Split {split!r} of dataset {builder.name!r} has 0 examples; expected at "
            f"least one. Its splits are {tuple(builder.info.splits)}: take a larger "
            "part."
        )
    return TfdsSource(builder, split, as_supervised)
