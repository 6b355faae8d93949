"""Where elements come from: what sources can do; arrays, a dataset, a split of TFDS."""

import abc
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import Order, known_length, never_empty, order_of, runs_python
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.units import format_bytes

DATA = tf.data.experimental.AutoShardPolicy.DATA
_EMPTY = (
    "A pass over `dataset` brought no elements, as its generator gave none; expected "
    "one at least. One that was called already can be read once: pass `from_generator` "
    "a function that makes a new one for each epoch."
)


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
    """A source of which any element can be read by its position."""

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


@dataclasses.dataclass(frozen=True)
class ArraySource(RandomAccess):
    """Tensors in memory."""

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        tensors = tf.nest.flatten(self.tensors)
        total = sum(t.shape.num_elements() * t.dtype.size for t in tensors)
        size = f"{self.num_examples:,} examples, {format_bytes(total)}"
        return f"arrays, {size}", "copied once; dtypes kept, the model casts"


def array_source(x: Any, y: Any = None, sample_weight: Any = None) -> ArraySource:
    """Checks arrays and puts them on the CPU as tensors."""
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    parts = {name: part for name, part in given.items() if part is not None}
    lengths = {}
    for name, part in parts.items():
        # Of a list tf.data would make one tensor.
        leaves = [part] if isinstance(part, list) else tf.nest.flatten(part)
        lengths[name] = {_length_of(name, leaf) for leaf in leaves}
        if not tf.is_tensor(part):
            parts[name] = tf.nest.map_structure(np.asarray, part)
    distinct = set().union(*lengths.values())
    if len(distinct) != 1 or distinct == {0} or (y is None and len(parts) > 1):
        raise ValueError(
            f"Arrays have the lengths {lengths}; expected one length above 0 for all, "
            "and `y` where there is a `sample_weight`. Cut them to the same examples, "
            "or check which axis holds the examples (the first)."
        )
    # On a GPU machine `tf.constant` would otherwise put the dataset on the GPU.
    with tf.device("CPU:0"):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(parts.values()))
    return ArraySource(tensors if len(tensors) > 1 else tensors[0], distinct.pop())


def _length_of(name: str, leaf: Any) -> int:
    array = np.asarray(leaf) if hasattr(leaf, "__array__") else None
    what = f"a {type(leaf).__name__}"
    if array is not None and array.dtype == object:
        kinds = {type(value).__name__ for value in array.flat[:100]}
        what = f"an object array of {', '.join(sorted(kinds))}"
        array = None if kinds - {"str", "bytes"} else array
    if array is None or array.ndim == 0:
        raise TypeError(
            f"`{name}` holds {what}; expected an array of numbers or strings, or a "
            "dict or tuple of arrays, whose first dimension counts the examples. "
            "Convert it with `np.asarray`, or use `Pipeline.from_dataset`."
        )
    return len(array)


@dataclasses.dataclass(frozen=True)
class DatasetSource(Source):
    """A dataset that the user made."""

    gives_examples = False
    given: tf.data.Dataset

    @property
    def shard_policy(self) -> Any:
        """What the user chose, or DATA in place of AUTO."""
        chosen = self.given.options().experimental_distribute.auto_shard_policy
        is_auto = chosen == tf.data.experimental.AutoShardPolicy.AUTO
        return DATA if is_auto else chosen

    def identity(self) -> Any:
        """Returns the dataset, which counts by its graph."""
        return self.given

    def order(self) -> Order:
        """Returns in how far the elements of the dataset come in one order."""
        return order_of(self.given)

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it was given; an empty pass of a generator raises."""
        given = self.given
        return never_empty(given, _EMPTY) if runs_python(given) else given

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        length = known_length(self.given)
        size = "length unknown" if length is None else f"{length:,} elements"
        return f"dataset, {size}", "as given; its own stages come first"


def dataset_source(dataset: Any) -> DatasetSource:
    """Checks that a dataset is one and is not empty."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`dataset` is a {type(dataset).__name__}; expected a tf.data.Dataset. For "
            "arrays use `Pipeline.from_arrays`; distribute the result of `build`."
        )
    # To look at the first element of a generator may take it away.
    is_unknown = int(dataset.cardinality()) == int(tf.data.UNKNOWN_CARDINALITY)
    may_look = is_unknown and not runs_python(dataset)
    if known_length(dataset) == 0 or (may_look and next(iter(dataset), None) is None):
        raise ValueError(
            "`dataset` has no elements; expected at least one. Check the files or the "
            "filter that it is made of."
        )
    return DatasetSource(dataset)


@dataclasses.dataclass(frozen=True)
class TfdsSource(Source):
    """One split of a prepared TensorFlow Datasets builder."""

    builder: Any
    split: str
    as_supervised: bool

    def identity(self) -> Any:
        """Returns name, version, split, and when the data was prepared."""
        written = os.path.join(str(self.builder.data_dir), "dataset_info.json")
        name = self.builder.info.full_name
        return (name, self.split, self.as_supervised, files_identity([written]))

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the examples in the order they were written."""
        import tensorflow_datasets as tfds

        calls = settings.num_parallel_calls
        config = tfds.ReadConfig(
            try_autocache=False,
            num_parallel_calls_for_decode=calls,
            num_parallel_calls_for_interleave_files=calls,
        )
        return self.builder.as_dataset(
            split=self.split, as_supervised=self.as_supervised, read_config=config
        )

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        info = self.builder.info
        size = f"{info.splits[self.split].num_examples:,} examples"
        told = f"TFDS {info.full_name}[{self.split}], {size}"
        return told, "in the order written, which TFDS shuffled once"


def tfds_source(
    name_or_builder: Any, split: str, *, as_supervised: bool, data_dir: str | None
) -> TfdsSource:
    """Returns a split as a source, prepared, with examples, and of pairs if asked."""
    for module in ("tensorflow_datasets", "importlib_resources"):
        checks.require(module, extra="data", purpose="`Pipeline.from_tfds`")
    import tensorflow_datasets as tfds

    builder = name_or_builder
    if isinstance(builder, str):
        builder = tfds.builder(builder, data_dir=data_dir)
    elif callable(builder):  # a class of one
        builder = builder(data_dir=data_dir)
    if not builder.is_prepared():
        try:
            builder.download_and_prepare()
        except OSError as error:  # of requests and urllib3, whose own they are
            if "onnection" not in type(error).__name__:
                raise
            raise ConnectionError(
                f"Dataset {builder.info.full_name!r} is not prepared in "
                f"{str(builder.data_dir)!r}, and cannot be downloaded: {error}. "
                "Expected prepared data or a network: connect and try again, set "
                "HTTPS_PROXY, or pass the `data_dir` of a copy."
            ) from error
    if as_supervised and builder.info.supervised_keys is None:
        raise ValueError(
            f"Dataset {builder.name!r} names no (input, target) pair among its "
            f"features {tuple(builder.info.features)}; expected one. Pass "
            "`as_supervised=False` and choose in `.map`."
        )
    if builder.info.splits[split].num_examples == 0:
        raise ValueError(
            f"Split {split!r} of dataset {builder.name!r} has no examples; expected "
            f"one of {tuple(builder.info.splits)}, or a larger part of it."
        )
    return TfdsSource(builder, split, as_supervised)
