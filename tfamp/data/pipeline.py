"""The input pipeline: written in any order, run in the right one."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal

import tensorflow as tf

from tfamp import _checks
from tfamp.data import _arrays, _file_cache, _plan, _sources, _tfds
from tfamp.data._stages import (
    Batch,
    Cache,
    Map,
    Prefetch,
    Settings,
    Shuffle,
    Stage,
    num_usable_cpus,
)

Autotune = bool | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """An input pipeline that becomes a plain `tf.data.Dataset`.

    Start with `from_tfds`, `from_arrays` or `from_dataset`, add stages in any
    order, and call `build`. The stages run in the order in which they are right:
    map, cache, shuffle, batch, prefetch. A pipeline never changes: each method
    returns a new one, so a common beginning can be shared by training and
    validation.

    Dtypes are kept. Leave images in uint8 and scale them in the model's first
    layer, in its compute dtype: they are a quarter of float32's size in the
    cache, in the batch and on the way to the device.

    The dataset works with `fit`, `steps_per_execution`, custom loops and
    `tf.distribute`; its length is known wherever the source's is.

    Args:
        source: What a `from_...` method made; not made by hand.
        stages: The stages so far, as they were written.

    Example:
        >>> import numpy as np
        >>> import tfamp
        >>> images = np.zeros((10, 8, 8, 1), np.uint8)
        >>> labels = np.arange(10)
        >>> pipeline = tfamp.data.Pipeline.from_arrays(images, labels)
        >>> dataset = pipeline.batch(4).shuffle(seed=1).build()
        >>> dataset.element_spec[0]
        TensorSpec(shape=(None, 8, 8, 1), dtype=tf.uint8, name=None)
        >>> int(dataset.cardinality())
        3
    """

    source: _sources.Source
    stages: tuple[Stage, ...] = ()

    @classmethod
    def from_tfds(
        cls,
        name_or_builder: Any,
        split: str = "train",
        *,
        as_supervised: bool = True,
        data_dir: str | None = None,
    ) -> "Pipeline":
        """Starts from a split of a TensorFlow Datasets builder.

        Data that is not prepared yet is prepared here, once. If that needs a
        network and there is none, the error comes within seconds.

        Args:
            name_or_builder: A TFDS name ("mnist", "mnist:3.0.1"), a builder, or a
                builder class.
            split: A split as TFDS writes it: "train", "train[:80%]", "test".
            as_supervised: True gives the pairs (input, target) that `fit` takes,
                False gives dicts of all features.
            data_dir: Where prepared data lies; None for TFDS's own folder, or the
                builder's.

        Returns:
            A pipeline with no stage yet.

        Raises:
            ImportError: tensorflow-datasets is not installed.
            ConnectionError: The data is not here and there is no network.
            TypeError: `name_or_builder` is none of the three.
            ValueError: No such dataset or split, an empty split, or no pairs.
        """
        builder = _tfds.open_builder(name_or_builder, data_dir=data_dir)
        return cls(_sources.tfds_source(builder, split, as_supervised=as_supervised))

    @classmethod
    def from_arrays(
        cls, x: Any, y: Any = None, sample_weight: Any = None
    ) -> "Pipeline":
        """Starts from arrays in memory.

        They are copied once, to the CPU, so later changes to them don't show.

        Args:
            x: An array `(examples, ...)`, or a dict or tuple of such arrays.
            y: Targets, likewise; None for elements that are `x` alone.
            sample_weight: One weight for each example; needs `y`.

        Returns:
            A pipeline of elements x, (x, y) or (x, y, sample_weight).

        Raises:
            TypeError: A list, or something that is no array.
            ValueError: Lengths differ, or there are no examples.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> pairs = tfamp.data.Pipeline.from_arrays(np.arange(3), np.arange(3) * 10)
            >>> [(int(x), int(y)) for x, y in pairs.build()]
            [(0, 0), (1, 10), (2, 20)]
        """
        return cls(_arrays.array_source(x, y, sample_weight))

    @classmethod
    def from_dataset(cls, dataset: tf.data.Dataset) -> "Pipeline":
        """Starts from any `tf.data.Dataset`, usually of single examples.

        Args:
            dataset: What to begin with. If its length is unknown, one element is
                read to see that there is one, which starts a generator once more.

        Returns:
            A pipeline with no stage yet.

        Raises:
            TypeError: `dataset` is something else.
            ValueError: It is empty.
        """
        return cls(_sources.dataset_source(dataset))

    def map(self, function: Callable[..., Any]) -> "Pipeline":
        """Calls a function on every element, on all cores, in order.

        It runs before the cache. Augmentation that should differ each epoch
        therefore belongs into the model, or goes without a cache.

        Args:
            function: As `tf.data.Dataset.map` takes it: called with the parts of
                an element, (x, y) for pairs, and traced once.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `function` cannot be called.
            ValueError: There is a map already.
        """
        if not callable(function):
            raise TypeError(
                f"`function` is {function!r}; expected something that can be called "
                "with one element. Pass a function, such as `lambda x, y: (x, y)`."
            )
        return self._with(Map(function))

    def cache(self, where: str | os.PathLike[str]) -> "Pipeline":
        """Keeps the elements after their first pass.

        A file cache serves later runs too. Recognised: a writer that was killed
        (its leftovers are removed with a warning), a writer that is alive, and
        elements of another shape, dtype or number. **Not recognised: a map
        function, split or file that changed and still gives elements of the same
        shape; delete the cache's files then.** Nor is damage to a finished cache
        or a full disk, which end in TensorFlow's own error, and on Windows or on
        file systems without locks the leftovers are reported, not removed.

        Args:
            where: "memory", or the path that the names of the cache's files begin
                with; its folder exists.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `where` is no path.
            ValueError: The folder is missing or cannot be written, or there is a
                cache already.
        """
        if not isinstance(where, (str, os.PathLike)) or where == "":
            raise TypeError(
                f"`where` is {where!r}; expected 'memory' or a path. Pass 'memory' if "
                "the decoded data fits there."
            )
        return self._with(
            Cache(None if where == "memory" else _file_cache.check_path(where))
        )

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None
    ) -> "Pipeline":
        """Puts the elements in a new random order each epoch.

        Args:
            buffer_size: Elements held to draw from. None for all of them where they
                fit into 256 MiB or the source is arrays, else for what fits there:
                the shuffle is then approximate, and `describe` says so.
            seed: Same seed, same sequence of orders, epoch by epoch. TensorFlow
                mixes it with the global seed if one is set. None for another
                sequence each time.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: An argument is no integer.
            ValueError: `buffer_size` is below 1, `seed` is below 0, or there is a
                shuffle already.
        """
        if buffer_size is not None:
            buffer_size = _checks.positive_int("buffer_size", buffer_size)
        if seed is not None:
            seed = _checks.positive_int("seed", seed, minimum=0)
        return self._with(Shuffle(buffer_size, seed))

    def batch(self, size: int, drop_remainder: bool = False) -> "Pipeline":
        """Joins elements into batches.

        Args:
            size: Elements in a batch; under `tf.distribute` in all replicas
                together.
            drop_remainder: Whether to drop the elements that fill no batch. Then
                all shapes are static, which XLA compiles once instead of twice.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `size` is no integer.
            ValueError: `size` is below 1, or there is a batch already.
        """
        size = _checks.positive_int("size", size)
        return self._with(Batch(size, bool(drop_remainder)))

    def prefetch(self, num_batches: int | None = None) -> "Pipeline":
        """Prepares batches while the model works on earlier ones.

        Args:
            num_batches: How many to hold ready; None for 2.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `num_batches` is no integer.
            ValueError: It is below 1, or there is a prefetch already.
        """
        if num_batches is not None:
            num_batches = _checks.positive_int("num_batches", num_batches)
        return self._with(Prefetch(num_batches))

    def build(self, autotune: Autotune = "auto") -> tf.data.Dataset:
        """Returns the dataset.

        Args:
            autotune: Whether tf.data chooses parallelism and buffer sizes itself.
                "auto" is off: its tuning thread can stall the end of an epoch by
                0.3 to 2.6 s, and one call for each core was as fast.

        Returns:
            A dataset; each iteration of it is one epoch, in a new order if there is
            a shuffle.

        Raises:
            ValueError: No batch would be left, or the cache's files do not suit.
        """
        return _plan.run(self._plan(autotune))

    def describe(self, autotune: Autotune = "auto") -> str:
        """Prints the plan as a table: each stage, its setting, and why.

        Nothing is read or written, and no file of a cache is touched.

        Args:
            autotune: As for `build`.

        Returns:
            What it printed: text of at most 110 columns, stages in the order
            they run in.

        Example:
            >>> import contextlib, io
            >>> import numpy as np
            >>> import tfamp
            >>> pipeline = tfamp.data.Pipeline.from_arrays(np.zeros((10, 4)))
            >>> with contextlib.redirect_stdout(io.StringIO()):  # the table is wide
            ...     text = pipeline.prefetch().batch(4).describe()
            >>> [line.split()[0] for line in text.splitlines()[2:]]
            ['source', 'batch', 'prefetch', 'threads']
        """
        plan = self._plan(autotune)
        if plan.settings.autotune:
            threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
        else:
            off = "autotune=False" if autotune is False else "autotune could stall"
            threads = (str(plan.settings.num_threads), f"one for each core; {off}")
        text = _plan.describe(plan, threads)
        print(text)
        return text

    def _plan(self, autotune: Autotune) -> _plan.Plan:
        if not isinstance(autotune, bool) and autotune != "auto":
            raise ValueError(
                f"`autotune` is {autotune!r}; expected 'auto', True or False. Leave it "
                "out for fixed parallelism."
            )
        settings = Settings(num_usable_cpus(), autotune is True)
        return _plan.make_plan(self.source, self.stages, settings)

    def _with(self, stage: Stage) -> "Pipeline":
        if any(type(stage) is type(other) for other in self.stages):
            advice = (
                "Call both functions from one"
                if stage.name == "map"
                else "Keep the one that is meant"
            )
            raise ValueError(
                f"`.{stage.name}` came twice; expected each stage once, since the "
                f"order they run in does not follow the order of the calls. {advice}."
            )
        return dataclasses.replace(self, stages=(*self.stages, stage))
