"""The input pipeline: written in any order, run in the right one."""

import dataclasses
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

import tfamp
from tfamp.data import plan, sources
from tfamp.data._elements import known_length
from tfamp.data.sources import Source, csv, images, text, tfrecord
from tfamp.data.stages import ORDER, Autotune, Map, Stage, Step, has_role
from tfamp.data.stages.augment import Augmentation
from tfamp.data.stages.batches import DEFAULT_MAX_SHAPES, Batch, Bucket, Shuffle
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.dropped import Filter, OnError, SkippedElement
from tfamp.data.stages.sampling import Balance, Subset, Weights
from tfamp.data.stages.workers import Shard
from tfamp.data.statistics import Statistics
from tfamp.keras_hooks.epochs import built_by_fit
from tfamp.machine.clusters import cluster
from tfamp.records import checks

if TYPE_CHECKING:
    from typing_extensions import Self


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in arguments.items() if k not in ("self", "cls")}


class _Advised(type):
    """Has a class answer a name that it lacks by the one that is probably meant."""

    if not TYPE_CHECKING:

        def __getattr__(cls, name: str) -> Any:
            names = [each for each in dir(cls) if not each.startswith("_")]
            meant = tfamp._ELSEWHERE.get(name) or checks.did_you_mean(name, names)
            if hasattr(tf.data.Dataset, name) and not name.startswith("from_"):
                meant = f"pipeline.build().{name}, of the dataset that it makes"
            advice = f" Did you mean {meant}?" if meant else ""
            raise AttributeError(f"`Pipeline` has no `{name}`.{advice}")


@built_by_fit
@dataclasses.dataclass(frozen=True)
class Pipeline(metaclass=_Advised):
    """An input pipeline that becomes a plain `tf.data.Dataset`.

    Start with a `from_...` method, add stages in any order, and call `build`, or hand
    the pipeline itself to `fit` or a tool of tfamp. Stages run in the order in which
    they are right: map, cache, shuffle, augment, batch, prefetch. Where yours changes
    the result it counts: a `.map` or `.filter` written after `.batch` gets batches, and
    one that draws at random stays behind a `.cache` it is written after. A pipeline
    never changes: each verb returns a new one. `len` is the number of its batches.

    Example:
        >>> import numpy as np
        >>> import tfamp
        >>> images = np.zeros((10, 8, 8, 1), np.uint8)
        >>> pipeline = tfamp.data.Pipeline.from_arrays(images, np.arange(10))
        >>> int(pipeline.batch(4).shuffle(seed=1).build().cardinality())
        3
    """

    source: Source
    stages: tuple[Stage, ...] = ()
    _built: dict[str, int | None] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.source, Source):
            raise TypeError(
                f"`Pipeline` was called with a {type(self.source).__name__}; expected "
                "one of its `from_...` methods. Call `Pipeline.from_arrays(x, y)`."
            )

    def __repr__(self) -> str:
        """Returns the source and the stages by name, without their data."""
        names = [type(each).__name__ for each in (self.source, *self.stages)]
        return f"Pipeline({', '.join(names)})"

    def __iter__(self) -> Iterator[Any]:
        """Iterates what `build` gives."""
        return iter(self.build())

    def __len__(self) -> int:
        """Returns the number of batches, or elements; it builds if nothing did yet."""
        if "length" not in self._built:
            self.build()
        if (length := self._built["length"]) is None:
            raise TypeError(
                "The length of this pipeline is unknown or infinite; expected a known "
                "one. Count by `sum(1 for _ in pipeline)`, or pass `steps_per_epoch`."
            )
        return length

    def __bool__(self) -> bool:
        """Returns True, without building."""
        return True

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            return getattr(type(self), name)  # an error that says what to write

    @classmethod
    def from_tfds(
        cls,
        name_or_builder: Any,
        split: str = "train",
        *,
        as_supervised: bool = True,
        data_dir: str | None = None,
    ) -> "Self":
        """Starts from a split of TensorFlow Datasets, prepared if need be.

        By name ("mnist:3.0.1"), builder, or a class of one; splits are as TFDS writes
        them. Elements are pairs (input, target), or dicts where not `as_supervised`.
        """
        return cls(sources.tfds_source(**_given(locals())))

    @classmethod
    def from_arrays(cls, x: Any, y: Any = None, sample_weight: Any = None) -> "Self":
        """Starts from arrays in memory: elements x, (x, y) or (x, y, sample_weight).

        Each is an array `(examples, ...)`, or a dict or tuple of such, copied once.
        """
        return cls(sources.array_source(x, y, sample_weight))

    @classmethod
    def from_images(
        cls,
        folder: Any,
        *,
        labels: Literal["inferred"] | None = "inferred",
    ) -> "Self":
        """Starts from image files below a folder, for `.decode`: (path, int32 label).

        Labels are the sorted folders in it, one a class; None for images alone.
        """
        return cls(images.folder_source(folder, labels))

    @classmethod
    def from_tfrecord(
        cls, paths: Any, *, features: Mapping[str, Any] | None = None
    ) -> "Self":
        """Starts from TFRecord files, plain or compressed with GZIP.

        A damaged record of a plain file is an error that names file and byte. With
        `.on_error("skip")` `build` reads each file once, and leaves out those with a
        record that is damaged or does not fit the features.

        Args:
            paths: A file, a folder, a pattern such as `data/train-*`, or a list.
            features: As `tf.io.parse_example` takes them, for elements that are dicts.
        """
        return cls(tfrecord.tfrecord_source(paths, features))

    @classmethod
    def from_csv(
        cls,
        paths: Any,
        *,
        label: str | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, Any] | None = None,
    ) -> "Self":
        """Starts from the rows of CSV files, which Arrow reads: dicts of scalars.

        The first line has the names of the columns, parted by commas, semicolons, tabs
        or bars; gzip is unpacked. Types are inferred from 1,000 rows. A missing value
        ("", "NA", "null", "?" and such) is NaN in floats, and an error in integers.

        Args:
            paths: A file, a folder, a pattern, or a list; all have the same columns.
            label: The column that is the target; elements are then (dict, label).
            columns: Which columns to give, None for all.
            dtypes: {column: "float32", "float64", "int32", "int64" or "string"}.
        """
        return cls(csv.csv_source(**_given(locals())))

    @classmethod
    def from_text(cls, paths: Any) -> "Self":
        """Starts from text files, a folder, a pattern or a list: a string a line."""
        return cls(text.text_source(paths))

    @classmethod
    def from_dataset(cls, dataset: tf.data.Dataset) -> "Self":
        """Starts from any `tf.data.Dataset`, usually of single examples."""
        return cls(sources.dataset_source(dataset))

    @classmethod
    def from_generator(cls, generator: Any, output_signature: Any) -> "Self":
        """Starts from a function that makes a generator, as tf.data's own does."""
        made = tf.data.Dataset.from_generator(
            generator, output_signature=output_signature
        )
        return cls.from_dataset(made)

    def decode(
        self,
        image_size: tuple[int, int] | None = None,
        *,
        channels: int = 3,
        key: str | None = None,
    ) -> "Self":
        """Decodes JPEG, PNG and GIF to uint8 and resizes to (height, width).

        The key names the image where elements, or their first parts, are dicts.
        """
        reads_files = isinstance(self.source, images.FileSource)
        return self._with(images.Decode(images.ImageReader(**_given(locals()))))

    @checks.knows_other_names
    def map(self, function: Callable[..., Any]) -> "Self":
        """Calls a function on the parts of every element, on all cores, in order.

        Before the cache, unless it is written after and draws at random, keeps a state,
        reads files or runs Python. Written after `.batch` it gets whole batches.
        """
        return self._with(Map(function))

    def on_error(
        self, action: Literal["skip", "raise"], *, max_fraction: float = 0.01
    ) -> "Self":
        """Chooses what happens to an element that cannot be read.

        Skipped is that element, row or line and nothing else; of TFRecord the file. The
        first one is logged, all are in `skipped`, and a pass ends with their number, or
        in an error if their share is above `max_fraction`.
        """
        checks.choice("action", action, ["skip", "raise"])
        skip = OnError(max_fraction)
        return self if action == "raise" else self._with(skip)

    def filter(
        self,
        predicate: Callable[..., Any] | None = None,
        *,
        missing: str | None = None,
        outliers: Any = None,
        statistics: Statistics | None = None,
    ) -> "Self":
        """Drops elements, and counts them; a pass that keeps none is an error.

        Args:
            predicate: Called with the parts of an element, or of a batch where it is
                written after one; returns True to keep it.
            missing: "drop" for NaN in any input.
            outliers: What goes, by `statistics`: "iqr" or ("iqr", 1.5) for Tukey's
                fences, ("zscore", 3.0), or quantiles as (0.01, 0.99).
            statistics: What `tfamp.data.fit_statistics` found in the training data.
        """
        return self._with(Filter(**_given(locals())))

    def augment(
        self,
        *steps: Any,
        strength: float = 1.0,
        ramp_epochs: int = 0,
        seed: int | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> "Self":
        """Changes inputs at random, anew each epoch, on all cores; labels stay.

        Args:
            *steps: Transforms of `tfamp.data.augmentation` (Flip, Shift, Rotate,
                Brightness, Contrast), and functions of (image, strength) or
                (image, strength, seed); none for those five.
            strength: How strong, in [0, 1]; at 0 inputs are untouched, bit for bit.
            ramp_epochs: Epochs, or whole passes, in which it grows from 0.
            seed: Same seed, same changes, epoch by epoch.
            value_range: Of an image; None for the dtype's own, and 0 to 1 for floats.
        """
        return self._with(Augmentation(**_given(locals())))

    def subset(self, size: int | float, *, seed: int = 0) -> "Self":
        """Keeps so many examples, or that share, the same ones in each epoch."""
        return self._with(Subset(size, seed=seed))

    def shard(self, num_shards: int | str, index: int | None = None) -> "Self":
        """Keeps the part of one worker of several that train together.

        Without it every worker of `tf.distribute` reads everything and keeps its share
        of the batches. With it a worker reads, caches and shuffles each n-th element of
        the source alone. A batch is that of all workers. "auto" finds the numbers by
        `tfamp.distribute.cluster()`.
        """
        if isinstance(num_shards, str):
            checks.choice("num_shards", num_shards, ("auto",))
            here = cluster()
            return self._with(Shard(here.num_workers, here.index, cluster=here))
        return self._with(Shard(num_shards, index))  # type: ignore[arg-type]  # it checks

    def balance(
        self, by: Callable[..., Any] | str | None = None, *, seed: int | None = None
    ) -> "Self":
        """Makes all classes come equally often, by a new exact plan each epoch.

        An epoch has as many examples as there are. Arrays and images are drawn by
        position. Elements of anything else are repeated or dropped: shuffle them.
        Classes are by the target, a key of dict elements, or a function of parts.
        """
        return self._with(Balance(by, seed=seed))

    def weights(self, weights: Any, *, seed: int | None = None) -> "Self":
        """Draws examples in proportion to weights, with replacement, anew each epoch.

        An epoch has as many examples as there are. Weights are one for each of them, or
        a function of an element's parts.
        """
        return self._with(Weights(**_given(locals())))

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None
    ) -> "Self":
        """Puts the elements in a new random order each epoch.

        Without a `buffer_size` all are held where they fit into 256 MiB or the source
        is arrays, else what fits: approximate then. Several workers need a seed.
        """
        return self._with(Shuffle(buffer_size, seed))

    def cache(
        self,
        where: str | os.PathLike[str] = "memory",
        *,
        unseen: Literal["warn", "error"] = "warn",
        version: Any = None,
    ) -> "Self":
        """Keeps the elements after their first pass.

        With a path they lie in a folder that `build` fills in one pass and that serves
        later runs of the same pipeline. Its name carries a fingerprint of the source
        (files by path, size and time of change), of all steps before the cache with
        what they refer to, and of the versions. No cache is removed but by you.

        Args:
            where: "memory", or the path that the name of the folder begins with.
            unseen: What it cannot see, such as files that a function reads: "warn" to
                log and describe it, "error" to refuse the cache.
            version: Another one makes another cache. For what is not seen.
        """
        return self._with(Cache(where, unseen, version))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "Self":
        """Joins elements into batches, of all replicas together."""
        return self._with(Batch(batch_size, bool(drop_remainder)))

    def bucket(
        self,
        batch_size: int,
        *,
        boundaries: str | Sequence[int] = "auto",
        max_shapes: int = DEFAULT_MAX_SHAPES,
        drop_remainder: bool = False,
    ) -> "Self":
        """Joins sequences of about one length into batches; in place of `.batch`.

        Sequences are the parts of an element whose first dimension is unknown. They are
        padded with zeros to the boundaries, ascending. "auto" reads all lengths once,
        and chooses `max_shapes` multiples of 8 at most, with the least padding.
        """
        return self._with(Bucket(**_given(locals())))

    def take(self, count: int) -> "Self":
        """Keeps the first elements, or batches, of what is written before it."""
        checks.positive_int("count", count)
        act = operator.methodcaller("take", count)
        return self._with(Step("take", f"{count:,}", ORDER["take"][0], count, act))

    def repeat(self, count: int | None = None) -> "Self":
        """Passes several times over what is written before it, without end for None."""
        told = "without end; give `fit` `steps_per_epoch`"
        if count is not None:
            told = f"{checks.positive_int('count', count):,} times"
        act = operator.methodcaller("repeat", count)
        return self._with(Step("repeat", told, ORDER["repeat"][0], count, act))

    def prefetch(self, num_batches: int | None = None) -> "Self":
        """Prepares batches while the model works on earlier ones, 2 unless told."""
        is_told = num_batches not in (None, tf.data.AUTOTUNE)
        count = checks.positive_int("num_batches", num_batches if is_told else 2)
        act = operator.methodcaller("prefetch", count)
        return self._with(Step("prefetch", f"{count}", ORDER["prefetch"][0], act=act))

    def _with(self, stage: Stage) -> "Self":
        """Returns the pipeline with one more stage, and counts of its own."""
        is_there = any(stage.name == other.name for other in self.stages)
        if is_there and not has_role(stage, "repeats"):
            raise ValueError(
                f"`.{stage.name}` came twice; expected each stage once, since they do "
                "not run in the order of the calls. Keep the one that is meant."
            )
        before = [dataclasses.replace(each, found={}) for each in self.stages]
        return dataclasses.replace(self, stages=(*before, stage))

    def build(self, autotune: Autotune = "auto") -> tf.data.Dataset:
        """Returns the dataset; each iteration of it is one epoch.

        With `autotune` tf.data chooses parallelism itself; "auto" is off, as its tuning
        can stall the end of an epoch by seconds.
        """
        dataset = plan.build(self.source, self.stages, autotune)
        self._built["length"] = known_length(dataset)
        return dataset

    def describe(self, autotune: Autotune = "auto") -> str:
        """Prints and returns the plan: each stage as it runs, its setting, and why."""
        text = plan.describe(self.source, self.stages, autotune)
        print(text)
        return text

    @property
    def makes_batches(self) -> bool | None:
        """Whether elements are batches, None where only their shapes can tell."""
        if any(has_role(stage, "batches") for stage in self.stages):
            return True
        return False if self.source.gives_examples else None

    @property
    def skipped(self) -> tuple[SkippedElement, ...]:
        """The elements that datasets built from this very pipeline have skipped."""
        stages = [stage for stage in self.stages if isinstance(stage, OnError)]
        return tuple(one for stage in stages for one in stage.found.values())
