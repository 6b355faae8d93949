"""Where elements come from: one frozen record per kind of source.

Here stand arrays and the user's own datasets; `sources/` has the kinds that read
files. A source with random access lets a shuffle move 8 bytes an element instead of
the element, which is exact at any size and holds nothing twice.
"""

import abc
import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.data.stages.base import Settings, Step, map_in_order

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


def gather_step(source: RandomAccess, settings: Settings, what: str) -> Step:
    """Returns the step that reads elements, or batches of them, by their positions.

    Where errors are skipped it gives pairs (position, element).
    """

    def read(position: tf.Tensor) -> Any:
        rows = source.rows(position)
        return rows if settings.errors is None else (position, rows)

    setting = f"one {what} a call, {settings.parallelism}"
    reason = "order drawn on positions, then read: exact at any size"
    act = functools.partial(map_in_order, function=read, settings=settings)
    return Step("gather", setting, reason, act=act)


@dataclasses.dataclass(frozen=True)
class ArraySource(RandomAccess):
    """Tensors in memory."""

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        total = sum(
            int(np.prod(tensor.shape)) * tensor.dtype.size
            for tensor in tf.nest.flatten(self.tensors)
        )
        size = f"{self.num_examples:,} examples, {total / 2**20:.1f} MiB"
        return f"arrays, {size}", "copied once; dtypes kept, the model casts"


def array_source(x: Any, y: Any = None, sample_weight: Any = None) -> ArraySource:
    """Checks arrays and puts them on the CPU as tensors."""
    if y is None and sample_weight is not None:
        raise ValueError(
            "`sample_weight` came without `y`; expected both or neither, since Keras "
            "reads a pair as (x, y). Pass `y`, or put the weights into `x`."
        )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    parts = {
        name: _arrays(part, name)
        for name, part in given.items()
        if part is not None or name == "x"
    }
    lengths = {
        name: tuple(int(leaf.shape[0]) for leaf in tf.nest.flatten(part))
        for name, part in parts.items()
    }
    distinct = {length for part in lengths.values() for length in part}
    if len(distinct) != 1:
        listed = ", ".join(
            f"`{name}` has {' and '.join(str(n) for n in part) or 'no array'}"
            for name, part in lengths.items()
        )
        raise ValueError(
            f"Arrays differ in length: {listed}; expected one length for all. Cut them "
            "to the same examples, or check which axis holds the examples (the first)."
        )
    num_examples = distinct.pop()
    if num_examples == 0:
        raise ValueError(
            "`x` has 0 examples; expected at least one. `fit` on an empty dataset "
            "trains nothing and says nothing: check the filter or the file before it."
        )
    # On a GPU machine `tf.constant` would otherwise put the dataset on the GPU.
    with tf.device("CPU:0"):
        tensors = tuple(
            tf.nest.map_structure(tf.convert_to_tensor, part) for part in parts.values()
        )
    return ArraySource(tensors if len(tensors) > 1 else tensors[0], num_examples)


def _arrays(part: Any, name: str) -> Any:
    """Returns the structure `part` with every leaf as an array."""
    if isinstance(part, list):
        raise TypeError(
            f"`{name}` is a list; expected an array, or a dict or tuple of arrays. Use "
            f"`np.asarray({name})` for one array, `tuple({name})` for several inputs."
        )
    return tf.nest.map_structure(lambda leaf: _as_array(leaf, name), part)


def _as_array(leaf: Any, name: str) -> Any:
    """Returns `leaf` as a NumPy array or a tensor, with its own dtype."""
    if isinstance(leaf, tf.Tensor):
        array = leaf
    elif hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
    else:
        raise TypeError(
            f"`{name}` holds a {type(leaf).__name__}; expected NumPy arrays or dense "
            "tensors. Convert it with `np.asarray`; for anything that does not fit in "
            "memory use `Pipeline.from_dataset`."
        )
    if len(array.shape) == 0:
        raise ValueError(
            f"`{name}` holds a scalar; expected arrays whose first dimension counts "
            "the examples. Pass one value for each example."
        )
    if isinstance(array, np.ndarray) and array.dtype == object:
        kinds = {type(value).__name__ for value in array.flat[:100]}
        if kinds - {"str", "bytes"}:
            raise TypeError(
                f"`{name}` is an object array of {', '.join(sorted(kinds))}; expected "
                "numbers or strings. Give it one dtype with `.astype`."
            )
    return array


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


def dataset_source(dataset: Any) -> DatasetSource:
    """Checks that a dataset is one and is not empty."""
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
