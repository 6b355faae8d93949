"""Data that is there already as sources: arrays, a tf.data.Dataset, a split of TFDS."""

import dataclasses
import inspect
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import Order, known_length, never_empty, order_of, runs_python
from tfamp.data.sources import DATA, RandomAccess, Source, files_identity
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.units import format_bytes

_EMPTY = (
    "A pass over `dataset` brought no elements, as its generator gave none; expected "
    "one at least. One that was called already can be read once: pass `from_generator` "
    "a function that makes a new one for each epoch."
)


@dataclasses.dataclass(frozen=True)
class ArraySource(RandomAccess):
    """Tensors in memory."""

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        tensors = tf.nest.flatten(self.tensors)
        total = sum(t.shape.num_elements() * t.dtype.size for t in tensors)
        size = f"{self.num_examples:,} examples, {format_bytes(total)}"
        return f"arrays, {size}", "copied once; dtypes kept, the model casts"


def array_source(x: Any, y: Any = None, sample_weight: Any = None) -> ArraySource:
    """Checks arrays and puts them on the CPU as tensors."""
    if y is None and sample_weight is not None:
        raise ValueError(
            "`sample_weight` came without `y`; expected both or neither, since Keras "
            "reads a pair as (x, y). Pass `y`, or put the weights into `x`."
        )
    given = {"x": x, "y": y, "sample_weight": sample_weight}
    parts, lengths = {}, {}
    for name, part in given.items():
        if part is None and name != "x":
            continue
        if isinstance(part, list):
            raise TypeError(
                f"`{name}` is a list; expected an array, or a dict or tuple of arrays. "
                f"Use `np.asarray({name})` for one array, `tuple({name})` for several "
                "inputs."
            )
        parts[name] = tf.nest.map_structure(lambda a, n=name: _as_array(a, n), part)
        lengths[name] = [int(leaf.shape[0]) for leaf in tf.nest.flatten(parts[name])]
    distinct = {length for part in lengths.values() for length in part}
    if len(distinct) != 1:
        listed = ", ".join(
            f"`{name}` has {' and '.join(map(str, part)) or 'no array'}"
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
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tuple(parts.values()))
    return ArraySource(tensors if len(tensors) > 1 else tensors[0], num_examples)


def _as_array(leaf: Any, name: str) -> Any:
    """Returns `leaf` as a NumPy array or a tensor, with its own dtype."""
    if not hasattr(leaf, "__array__"):
        raise TypeError(
            f"`{name}` holds a {type(leaf).__name__}; expected NumPy arrays or dense "
            "tensors. Convert it with `np.asarray`; for anything that does not fit in "
            "memory use `Pipeline.from_dataset`."
        )
    array = leaf if isinstance(leaf, tf.Tensor) else np.asarray(leaf)
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

    def order(self) -> Order:
        """Returns in how far the elements of the dataset come in one order."""
        return order_of(self.given)

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it was given; an empty pass of a generator raises."""
        given = self.given
        return never_empty(given, _EMPTY) if runs_python(given) else given

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
    # To look at the first element of a generator may take it away.
    is_unknown = is_unknown and not runs_python(dataset)
    if cardinality == 0 or (is_unknown and next(iter(dataset), None) is None):
        raise ValueError(
            "`dataset` has no elements; expected at least one. `fit` on an empty "
            "dataset trains nothing and says nothing: check the files or the filter "
            "that it is made of."
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


def tfds_source(
    name_or_builder: Any, split: str, *, as_supervised: bool, data_dir: str | None
) -> TfdsSource:
    """Returns a split as a source, prepared, with examples, and of pairs if asked.

    `Pipeline.from_tfds` explains the arguments and the errors.
    """
    builder = _builder(name_or_builder, data_dir)
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
                "HTTPS_PROXY, or pass the `data_dir` of a copy that was prepared "
                "elsewhere."
            ) from error
    if as_supervised and builder.info.supervised_keys is None:
        raise ValueError(
            f"Dataset {builder.name!r} names no (input, target) pair among its "
            f"features {tuple(builder.info.features)}; expected one. Pass "
            "`as_supervised=False` and choose in `.map`."
        )
    splits = tuple(builder.info.splits)
    try:
        num_examples = builder.info.splits[split].num_examples
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"Unknown `split` {split!r} of dataset {builder.name!r}; expected one of "
            f"{splits}, or a part such as 'train[:80%]'. Print them with "
            "`builder.info.splits`."
        ) from error
    if num_examples == 0:
        raise ValueError(
            f"Split {split!r} of dataset {builder.name!r} has 0 examples; expected at "
            f"least one. Its splits are {splits}: take a larger part."
        )
    return TfdsSource(builder, split, as_supervised)


def _builder(given: Any, data_dir: str | None) -> Any:
    """Returns the builder of a name or a class, or the builder itself."""
    for module in ("tensorflow_datasets", "importlib_resources"):
        checks.require(module, extra="data", purpose="`Pipeline.from_tfds`")
    import tensorflow_datasets as tfds

    if not hasattr(tfds, "core"):
        # TFDS logs what stopped its import, and leaves an empty module.
        raise ImportError(
            "`Pipeline.from_tfds` needs tensorflow-datasets, which is installed but "
            "cannot be loaded (its error is logged above); expected packages that fit "
            "TensorFlow's protobuf. With TensorFlow 2.19 run `pip install "
            "'tensorflow-metadata<1.18'`.",
            name="tensorflow_datasets",
        )
    if inspect.isclass(given) and issubclass(given, tfds.core.DatasetBuilder):
        return given(data_dir=data_dir)  # type: ignore[call-arg]  # it has no types
    if isinstance(given, tfds.core.DatasetBuilder):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"`name_or_builder` is {given!r}; expected a TFDS name such as "
            "'mnist', a tfds.core.DatasetBuilder, or a class of one. For arrays use "
            "`Pipeline.from_arrays`."
        )
    try:
        # Data that lies here needs no code of it.
        return tfds.builder(given, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        known = tfds.list_builders()
        base = given.partition("/")[0].partition(":")[0]
        close = checks.did_you_mean(base, known)
        hint = f" Did you mean {close!r}?" if close else ""
        raise ValueError(
            f"Unknown dataset {base!r}; expected one of the {len(known)} names "
            f"that `tfds.list_builders()` gives.{hint}"
        ) from error
