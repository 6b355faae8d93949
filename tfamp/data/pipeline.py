"""The input pipeline: written in any order, run in the right one."""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from tfamp.data import plan
from tfamp.data.features import Statistics
from tfamp.data.sources import Source, csv, datasets, images, text, tfrecord
from tfamp.data.sources.csv import NA_VALUES
from tfamp.data.stages import (
    Autotune,
    Map,
    Prefetch,
    Repeat,
    Role,
    Stage,
    Take,
    has_role,
)
from tfamp.data.stages.augment import Augmentation
from tfamp.data.stages.batches import Batch, Shuffle
from tfamp.data.stages.bucket import DEFAULT_MAX_SHAPES, Bucket
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.decode import Decode, ImageReader
from tfamp.data.stages.dropped import ErrorLog, OnError, SkippedElement
from tfamp.data.stages.filter import Filter
from tfamp.data.stages.sampling import Balance, Subset, Weights
from tfamp.data.stages.workers import Shard, cluster_shard
from tfamp.keras_hooks.epochs import built_by_fit
from tfamp.records import checks

if TYPE_CHECKING:
    from typing_extensions import Self


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a verb, by the `locals()` that it begins with."""
    return {k: v for k, v in arguments.items() if k not in ("self", "cls")}


@built_by_fit
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """An input pipeline that becomes a plain `tf.data.Dataset`.

    Start with a `from_...` method, add stages in any order, and call `build`, or hand
    the pipeline itself to `fit`, `evaluate`, `predict` or a tool of tfamp. Stages run
    in the order in which they are right: map, cache, shuffle, augment, batch, prefetch.
    Where yours changes the result it counts: a `.map` or `.filter` written after
    `.batch` gets batches, and one that draws at random stays behind a `.cache` it is
    written after; `describe` says what runs ahead of what it was written behind. A
    pipeline never changes: each verb returns a new one.

    Dtypes are kept: leave images in uint8 and scale them in the model's first layer.

    Example:
        >>> import numpy as np
        >>> import tfamp
        >>> images = np.zeros((10, 8, 8, 1), np.uint8)
        >>> pipeline = tfamp.data.Pipeline.from_arrays(images, np.arange(10))
        >>> dataset = pipeline.batch(4).shuffle(seed=1).build()
        >>> dataset.element_spec[0]
        TensorSpec(shape=(None, 8, 8, 1), dtype=tf.uint8, name=None)
        >>> int(dataset.cardinality())
        3
    """

    source: Source
    stages: tuple[Stage, ...] = ()
    _builds: list[plan.Build] = dataclasses.field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.source, Source):
            raise TypeError(
                f"`Pipeline` was called with a {type(self.source).__name__}; expected "
                "one of its `from_...` methods. Call `Pipeline.from_arrays(x, y)` for "
                "arrays, `Pipeline.from_dataset` for a `tf.data.Dataset`."
            )

    def __repr__(self) -> str:
        """Returns the source and the stages by name, without their data."""
        names = [type(each).__name__ for each in (self.source, *self.stages)]
        return f"Pipeline({', '.join(names)})"

    def __iter__(self) -> Iterator[Any]:
        """Iterates what `build` gives."""
        return iter(self.build())

    @classmethod
    def from_tfds(
        cls,
        name_or_builder: Any,
        split: str = "train",
        *,
        as_supervised: bool = True,
        data_dir: str | None = None,
    ) -> "Self":
        """Starts from a split of a TensorFlow Datasets builder.

        Data that is not prepared yet is downloaded and prepared here, once.

        Args:
            name_or_builder: A TFDS name ("mnist:3.0.1"), a builder, or a class of one.
            split: A split as TFDS writes it: "train", "train[:80%]", "test".
            as_supervised: True for pairs (input, target), False for dicts.
            data_dir: Where prepared data lies; None for TFDS's folder.
        """
        return cls(datasets.tfds_source(**_given(locals())))

    @classmethod
    def from_arrays(cls, x: Any, y: Any = None, sample_weight: Any = None) -> "Self":
        """Starts from arrays in memory: elements x, (x, y) or (x, y, sample_weight).

        They are copied once, to the CPU, so later changes to them don't show.

        Args:
            x: An array `(examples, ...)`, or a dict or tuple of such arrays.
            y: Targets, likewise; None for elements that are `x` alone.
            sample_weight: One weight for each example; needs `y`.
        """
        return cls(datasets.array_source(x, y, sample_weight))

    @classmethod
    def from_images(
        cls,
        folder: Any,
        *,
        labels: Any = "inferred",
        class_names: Sequence[str] | None = None,
        extensions: Sequence[str] = images.EXTENSIONS,
    ) -> "Self":
        """Starts from image files, one folder for each class: (image, int32 label).

        Add `.decode(image_size)`; without it, elements hold paths, which shuffling and
        sampling move instead of pixels.

        Args:
            folder: Has a folder for each class, or images anywhere below it.
            labels: "inferred"; None for images alone; or a sequence of integers, one
                for each image in the order of the paths.
            class_names: Names in the order of their numbers, None for all, sorted.
                Class folders that are not named here are left out.
            extensions: Endings of image files, with the dot.
        """
        return cls(images.folder_source(**_given(locals())))

    @classmethod
    def from_tfrecord(
        cls,
        paths: Any,
        *,
        features: Mapping[str, Any] | None = None,
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from TFRecord files, plain or compressed with GZIP.

        A damaged record is a `tf.errors.DataLossError`, which gives its byte;
        `.on_error("skip")` leaves it out and names the file too.

        Args:
            paths: A file, a folder, a pattern such as `data/train-*`, or a list.
            features: {name: feature} as `tf.io.parse_example` takes it: elements are
                then dicts. None for the records as strings.
            num_examples: Records in all. "auto" counts plain files of about 100,000
                records or fewer, "count" counts in any case, None leaves it unknown.
        """
        return cls(tfrecord.tfrecord_source(**_given(locals())))

    @classmethod
    def from_csv(
        cls,
        paths: Any,
        *,
        label: str | None = None,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        delimiter: str = ",",
        na_values: Sequence[str] = NA_VALUES,
        num_infer_rows: int = 1000,
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from the rows of CSV files, which Arrow reads: dicts of scalars.

        Files are in UTF-8 as RFC 4180 has them, with the names of the columns in their
        first line. Empty lines do not count; gzip is unpacked.

        Args:
            paths: A file, a folder (its files ending in .csv, .tsv, .txt or .gz), a
                pattern, or a list of these. All have the same columns.
            label: The column that is the target; elements are then (dict, label).
            columns: Which columns to give, None for all.
            dtypes: {column: "float32", "float64", "int32", "int64" or "string"}. A
                missing value is NaN in floats, "" in text, and an error in integers.
            delimiter: One character.
            na_values: What stands for a missing value, in text columns too. The empty
                field always does; among numbers "nan" too and, unless you pass others,
                "N/A", "null", "?", "-" and more.
            num_infer_rows: Rows of the first file that types are inferred from.
            num_examples: Rows in all. "auto" counts files of 64 MiB together at most,
                "count" counts in any case, None leaves the length unknown.
        """
        return cls(csv.csv_source(**_given(locals())))

    @classmethod
    def from_text(
        cls,
        paths: Any,
        *,
        labels: Any = None,
        class_names: Sequence[str] | None = None,
        extensions: Sequence[str] = text.EXTENSIONS,
        num_examples: int | str | None = "auto",
    ) -> "Self":
        """Starts from text files, each line that is not empty: (string, int32 label).

        Args:
            paths: A folder, searched with all below it; a file, a pattern, or a list.
            labels: None for texts alone; else as for images. A file's label is that of
                each of its lines.
            class_names: Names in the order of their numbers, as for images.
            extensions: Endings of the files that count inside a folder.
            num_examples: Examples in all, as for CSV files.
        """
        return cls(text.text_source(**_given(locals())))

    @classmethod
    def from_dataset(cls, dataset: tf.data.Dataset) -> "Self":
        """Starts from any `tf.data.Dataset`, usually of single examples.

        If its length is unknown, one element is read to see that there is one; of a
        generator that shows in the pass.
        """
        return cls(datasets.dataset_source(dataset))

    def decode(
        self,
        image_size: tuple[int, int] | None = None,
        *,
        channels: int = 3,
        decoder: str = "tf",
        method: str = "bilinear",
        antialias: bool = False,
        fit: str = "stretch",
        key: str | None = None,
    ) -> "Self":
        """Decodes images to uint8 and resizes them, on all cores.

        Args:
            image_size: (height, width) of all images, None to keep each one's own.
            channels: 3 for color, 1 for gray.
            decoder: "tf", or "simplejpeg", of the same pixels, for large JPEG files.
            method: How to resize, as `tf.image.resize` names it.
            antialias: Whether to smooth before an image is made smaller.
            fit: For another aspect ratio: "stretch", "crop" or "pad".
            key: Name of the image where elements, or their first parts, are dicts.
        """
        reads_files = isinstance(self.source, images.FileSource)
        return self._with(Decode(ImageReader(**_given(locals()))))

    def map(self, function: Callable[..., Any]) -> "Self":
        """Calls a function on every element, on all cores, in order.

        It gets the parts of an element, (x, y) for pairs, and is traced once. It runs
        before the cache, wherever that gives the same. Written after `.batch` or
        `.bucket` it gets whole batches; written after `.cache`, one that draws at
        random, keeps a state, reads files or runs Python is called anew in each epoch.
        """
        return self._with(Map(function))

    def on_error(
        self, action: Literal["skip", "raise"], *, max_fraction: float = 0.01
    ) -> "Self":
        """Chooses what happens to an element that cannot be read.

        Skipped is that element and nothing else. The first one is logged with its file,
        all are in `skipped`, and a pass ends with their number. Costs 50 us an element.

        Args:
            action: "skip", or "raise" as without this stage.
            max_fraction: Share of elements that may be skipped. Beyond it the dataset
                raises InvalidArgumentError with the first few, as soon as that is
                certain, at the latest at the end of the pass.
        """
        checks.choice("action", action, ["skip", "raise"])
        share = checks.fraction("max_fraction", max_fraction)
        if action == "raise":
            return self
        return self._with(OnError(share, ErrorLog(share)))

    def filter(
        self,
        predicate: Callable[..., Any] | None = None,
        *,
        missing: str | None = None,
        outliers: Any = None,
        statistics: Statistics | None = None,
    ) -> "Self":
        """Drops elements, and counts them: for missing values, outliers, a predicate.

        `describe` says how many were dropped, and why. A pass that keeps nothing is an
        error. To fill and limit values instead, put `Statistics.as_layer` in the model.

        Args:
            predicate: Called with the parts of an element, or of a batch where it is
                written after one; returns one boolean, True to keep it.
            missing: "drop" for elements with a missing value in any input: NaN, and
                what `statistics` were told.
            outliers: ("zscore", 3.0), ("iqr", 1.5) or ("quantile", 0.01, 0.99) of
                `statistics`. inf lies beyond every limit, NaN beyond none.
            statistics: What `fit_statistics` found in the training data.
        """
        return self._with(Filter(**_given(locals())))

    def augment(
        self,
        *steps: Any,
        strength: float = 1.0,
        ramp_epochs: int = 0,
        seed: int | None = None,
        key: str | None = None,
        value_range: tuple[float, float] | None = None,
    ) -> "Self":
        """Changes inputs at random, anew each epoch, on all cores; labels stay.

        It runs after the cache and the shuffle, so a cache serves any strength. Shapes
        and dtypes are kept.

        Args:
            *steps: Transforms of `tfamp.data.augmentation` (Flip, Shift, Rotate,
                Brightness, Contrast), and functions of (image, strength) or
                (image, strength, seed); none for those five, which take a quarter
                of the time of Keras's layers on a CPU.
            strength: How strong, in [0, 1]; at 0 inputs are untouched, bit for bit.
            ramp_epochs: Epochs, or whole passes, in which it grows from 0.
            seed: Same seed, same changes, epoch by epoch; as for `.shuffle`.
            key: Name of the input to change, where inputs are a dict.
            value_range: Smallest and largest value of an image, which scales
                brightness; None for 0 to the dtype's largest, and 0 to 1 for floats.
        """
        return self._with(Augmentation(**_given(locals())))

    def subset(
        self,
        size: int | float,
        *,
        stratify: Callable[..., Any] | str | None = None,
        seed: int = 0,
    ) -> "Self":
        """Keeps a part of the examples, the same in every epoch and process.

        Args:
            size: How many, or which share, above 0 and below 1.
            stratify: None for a uniform draw; "target", a key or a function keeps the
                proportions of classes.
            seed: Same seed, same subset.
        """
        return self._with(Subset(size, stratify=stratify, seed=seed))

    def shard(self, num_shards: int | str, index: int | None = None) -> "Self":
        """Keeps the part of one worker of several that train together.

        Without it every worker of `tf.distribute` reads everything and keeps its share
        of the batches. With it a worker reads, caches and shuffles each n-th element of
        the source alone, from `index` on. All workers make equally many steps: the last
        batches of some may be empty; where batches drop their remainder, "auto" makes
        parts of one size. The size of a batch is that of all workers together.

        Args:
            num_shards: Workers in all; "auto" takes both from
                `tfamp.distribute.cluster()`, which is all elements without a cluster.
            index: Which one this is, from 0.
        """
        if not isinstance(num_shards, str):
            return self._with(Shard(num_shards, index))  # type: ignore[arg-type]  # it checks
        checks.choice("num_shards", num_shards, ("auto",))
        if index is not None:
            raise ValueError(
                f"`index` is {index!r} with `num_shards` 'auto', which finds it; "
                "expected none. Leave it out, or pass the number of shards."
            )
        return self._with(cluster_shard())

    def balance(
        self,
        by: Callable[..., Any] | str | None = None,
        *,
        method: str = "resample",
        seed: int | None = None,
    ) -> "Self":
        """Makes all classes come equally often, by a new exact plan each epoch.

        Arrays and image files are drawn by position. Anything else is read once by
        `build` for its labels, and each element is repeated or dropped: shuffle behind
        it.

        Args:
            by: None for the target, a key of dict elements, or a function of parts.
            method: "resample" keeps the number of examples, "oversample" brings every
                class up to the largest, "undersample" down to the smallest.
            seed: Same seed, same sequence of epochs.
        """
        return self._with(Balance(by, method=method, seed=seed))

    def weights(
        self,
        weights: Any,
        *,
        replacement: bool = True,
        num_examples: int | None = None,
        seed: int | None = None,
    ) -> "Self":
        """Draws examples in proportion to weights, by a new exact plan each epoch.

        Args:
            weights: One for each example, or a function of an element's parts.
            replacement: Whether an example may come more than once in an epoch.
            num_examples: How many to draw; None for as many as there are.
            seed: Same seed, same sequence of epochs.
        """
        return self._with(Weights(**_given(locals())))

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None
    ) -> "Self":
        """Puts the elements in a new random order each epoch.

        Args:
            buffer_size: Elements held to draw from. None for all of them where they
                fit into 256 MiB of memory or the source is arrays, else for what fits:
                approximate then, as `describe` says. Where sizes vary, `build` reads 32
                elements; with no known end 262,144 are held.
            seed: Same seed, same sequence of orders; mixed with the global seed if one
                is set. Several workers need one, or `.shard`.
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
        (files by path, size and time of change, arrays by their bytes), of all steps
        before the cache with what they refer to, and of the versions, so a pipeline
        that changed builds its own. What it cannot see, such as files that a function
        reads by a name it is given, is logged and stands in `describe`. A pass that is
        broken off leaves nothing. A process that finds another one filling waits for it
        (filelock, of the extra `data`). No cache is removed but by you.

        Args:
            where: "memory", or the path that the name of the cache's folder begins
                with; the folder that it lies in exists.
            unseen: "error" to refuse a cache in files that would not notice every
                change, "warn" to log what it does not notice.
            version: Another one makes another cache. For what is not seen.
        """
        return self._with(Cache(where, unseen, version))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> "Self":
        """Joins elements into batches.

        Args:
            batch_size: Elements in a batch; of all replicas together.
            drop_remainder: Whether to drop what fills no batch. Then XLA compiles once.
        """
        return self._with(Batch(batch_size, bool(drop_remainder)))

    def bucket(
        self,
        batch_size: int,
        *,
        boundaries: str | Sequence[int] = "auto",
        max_shapes: int = DEFAULT_MAX_SHAPES,
        drop_remainder: bool = False,
        padding_value: Any = None,
        too_long: str = "error",
    ) -> "Self":
        """Joins sequences of about one length into batches; in place of `.batch`.

        They are padded to the boundary of their bucket. Sequences are the parts of an
        element whose first dimension is unknown. `describe` says what share is padding.

        Args:
            batch_size: Sequences in a batch.
            boundaries: What sequences are padded to, ascending. "auto" chooses those
                with the least padding, for which all lengths are read once in `build`.
            max_shapes: How many boundaries "auto" may choose, multiples of 8.
            drop_remainder: Whether to leave out batches that are not full.
            padding_value: What numbers are padded with, or texts; None for zeros and
                empty texts.
            too_long: What to do above the last boundary: "error", "truncate" or "drop".
        """
        return self._with(Bucket(**_given(locals())))

    def take(self, count: int) -> "Self":
        """Keeps the first elements of each pass, or batches where it is written behind.

        No other stage passes it: what is written before it runs before it.
        """
        return self._with(Take(count))

    def repeat(self, count: int | None = None) -> "Self":
        """Passes several times over what is written before it, without end for None.

        An epoch of `fit` reads the dataset once anyway: give it `steps_per_epoch` for
        one without end.
        """
        return self._with(Repeat(count))

    def prefetch(self, num_batches: int | None = None) -> "Self":
        """Prepares batches while the model works on earlier ones, 2 unless told.

        `tf.data.AUTOTUNE` leaves it to the pipeline too.
        """
        is_told = num_batches not in (None, tf.data.AUTOTUNE)
        return self._with(Prefetch(num_batches if is_told else None))

    def _with(self, stage: Stage) -> "Self":
        """Returns the pipeline with one more stage."""
        plan.check_once(stage, self.stages)
        return dataclasses.replace(self, stages=(*self.stages, stage))

    def build(self, autotune: Autotune = "auto") -> tf.data.Dataset:
        """Returns the dataset; each iteration of it is one epoch.

        Args:
            autotune: Whether tf.data chooses parallelism and buffer sizes itself.
                "auto" is off: its tuning thread can stall the end of an epoch by
                0.3 to 2.6 s, and one thread for each core was as fast.
        """
        build = plan.Build(self.stages)
        if build.counts:
            self._builds.append(build)
        return build.dataset(self.source, autotune)

    def describe(self, autotune: Autotune = "auto") -> str:
        """Prints the plan as a table, and returns it: each stage, its setting, and why.

        In the order they run in. Nothing is read or written.
        """
        text = plan.describe(self.source, self.stages, self._builds, autotune)
        print(text)
        return text

    @property
    def makes_batches(self) -> bool | None:
        """Whether elements are batches, None where only their shapes can tell."""
        if any(has_role(stage, Role.BATCHES) for stage in self.stages):
            return True
        return False if self.source.gives_examples else None

    @property
    def skipped(self) -> tuple[SkippedElement, ...]:
        """The elements that datasets built from this very pipeline have skipped."""
        stages = plan.counted(self.stages, self._builds)
        found = [stage.log.skipped for stage in stages if isinstance(stage, OnError)]
        return found[0] if found else ()
