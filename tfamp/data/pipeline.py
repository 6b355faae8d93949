"""The input pipeline: written in any order, run in the right one."""

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from tfamp.data import plan
from tfamp.data.pipeline_selection import PipelineSelection
from tfamp.data.sources.images import FileSource
from tfamp.data.stages import Autotune, Map, Prefetch
from tfamp.data.stages.augment import Augmentation
from tfamp.data.stages.batches import Batch
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.decode import Decode
from tfamp.data.stages.dropped import ErrorLog, OnError, SkippedElement
from tfamp.data.stages.image_reader import ImageReader
from tfamp.records import checks

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass(frozen=True)
class Pipeline(PipelineSelection):
    """An input pipeline that becomes a plain `tf.data.Dataset`.

    Start with a `from_...` method, add stages in any order, and call `build`. The
    stages run in the order in which they are right: map, cache, shuffle, augment,
    batch, prefetch. Where your order changes the result it counts: a `.map` or a
    `.filter` written after `.batch` gets batches, and one that draws at random stays
    behind a `.cache` it is written after. `describe` says what runs ahead of what it
    was written behind. A pipeline never changes: each method returns a new one, so a
    common beginning can be shared by training and validation.

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

    _builds: list[plan.Build] = dataclasses.field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def __repr__(self) -> str:
        """Returns the source and the stages by name, without their data."""
        names = [type(each).__name__ for each in (self.source, *self.stages)]
        return f"Pipeline({', '.join(names)})"

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
            decoder: "tf", or "simplejpeg", which gives the same pixels and is faster
                for large JPEG files at most.
            method: How to resize, as `tf.image.resize` names it.
            antialias: Whether to smooth before an image is made smaller.
            fit: For another aspect ratio: "stretch", "crop" or "pad".
            key: Name of the image where elements, or their first parts, are dicts.

        Returns:
            A pipeline with this stage.

        Raises:
            ImportError: The decoder's package is not installed.
            TypeError: `image_size` is no pair of integers.
            ValueError: An argument is unknown, or does not go with another.
        """
        reader = ImageReader(
            image_size,
            channels=channels,
            decoder=decoder,
            method=method,
            antialias=antialias,
            fit=fit,
            key=key,
            reads_files=isinstance(self.source, FileSource),
        )
        return self._with(Decode(reader))

    def map(self, function: Callable[..., Any]) -> "Self":
        """Calls a function on every element, on all cores, in order.

        It runs before the cache, and once, wherever that gives the same. Written after
        `.batch` or `.bucket` it gets whole batches; written after `.cache`, a function
        that draws at random, keeps a state, reads files or runs Python is called anew
        in each epoch. May come several times; maps and filters run as they are written.

        Args:
            function: As `tf.data.Dataset.map` takes it: called with the parts of
                an element, (x, y) for pairs, and traced once.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `function` cannot be called.
        """
        return self._with(Map(function))

    def on_error(
        self, action: Literal["skip", "raise"], *, max_fraction: float = 0.01
    ) -> "Self":
        """Chooses what happens to an element that cannot be read.

        Skipped is that element and nothing else: a damaged image, a record whose
        bytes changed, a function of `.map` that fails. The first one is logged with
        its file, all are in `skipped`, and a pass ends with their number. Noticing
        costs about 50 us an element; where nothing fails, leave it out.

        Args:
            action: "skip", or "raise" as without this stage.
            max_fraction: Share of elements that may be skipped. Beyond it the
                dataset raises InvalidArgumentError with the first few. While the
                length is unknown, the share is of at least 1,000 elements until the
                pass has ended; where files are read, of ten times the number that
                the first of them lets expect.

        Returns:
            A pipeline with this stage.

        Raises:
            ValueError: Another action, a share outside [0, 1], or one is there
                already.
        """
        checks.choice("action", action, ["skip", "raise"])
        share = checks.fraction("max_fraction", max_fraction)
        if action == "raise":
            return self
        return self._with(OnError(share, ErrorLog(share)))

    def cache(
        self,
        where: str | os.PathLike[str],
        *,
        unseen: Literal["warn", "error"] = "warn",
        version: Any = None,
    ) -> "Self":
        """Keeps the elements after their first pass.

        With a path they lie in a folder that `build` fills in one pass and that serves
        later runs of the same pipeline. Its name carries a fingerprint of the source
        (paths, sizes, times of change; arrays by their bytes), of every step before the
        cache (functions by their code and what they refer to, layers by their state,
        files that constants name) and of the versions, so a pipeline that changed
        builds its own. What it cannot see, such as files that a function reads by a
        name it is given, is logged and stands in `describe`.

        A pass that is broken off leaves nothing, and what a killed process left is
        removed by the next one. A process that finds another one filling waits for it
        (filelock, of the extra `data`). No cache is removed but by you.

        Args:
            where: "memory", or the path that the name of the cache's folder begins
                with; the folder that it lies in exists.
            unseen: "error" to have `build` refuse a cache in files that would not
                notice every change, "warn" to log what it does not notice.
            version: Anything; another one makes another cache. For what is not seen.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `where` is no path.
            ValueError: The folder is missing or cannot be written, `unseen` is
                neither word, or there is a cache already. `build` raises it where
                elements repeat without end, and OSError where the disk is too small.
        """
        return self._with(Cache(where, unseen, version))

    def augment(
        self,
        *steps: Any,
        strength: float = 1.0,
        ramp_epochs: int = 0,
        ramp_from: float = 0.0,
        seed: int | None = None,
        key: str | None = None,
        value_range: tuple[float, float] | None = None,
        initial_epoch: int = 0,
    ) -> "Self":
        """Changes inputs at random, anew each epoch, on all cores; labels stay.

        It runs after the cache and the shuffle, so a file cache serves any strength.
        Shapes and dtypes are kept; integers are rounded once and limited. Where the
        device has time and the cores have none, put `tfamp.data.Augment` into the
        model instead.

        Args:
            *steps: Transforms of `tfamp.data.augmentation` (Flip, Shift, Rotate,
                Brightness, Contrast, Cutout), random layers of Keras such as
                `keras.layers.RandomZoom(0.2)`, and functions of (image, strength) or
                (image, strength, seed); none for the first five, at their defaults,
                which take a quarter of the time of Keras's on a CPU.
            strength: How strong, in [0, 1]; at 0 inputs are untouched, bit for bit.
                Transforms change every image by so much less; a layer of Keras
                changes each image with this probability.
            ramp_epochs: Epochs in which the strength grows from `ramp_from` to
                `strength`, linearly; 0 for full strength at once. Every pass that
                takes the dataset's last batch is an epoch.
            ramp_from: Strength of the first epoch, where there is a ramp.
            seed: Same seed and order of elements, same changes, epoch by epoch. None
                for others each time, which `keras.utils.set_random_seed` sets too.
            key: Name of the input to change, where inputs are a dict.
            value_range: Smallest and largest value of an image, which scales
                brightness; None for 0 to the dtype's largest (uint8, uint16), and 0
                to 1 for floats. Floats are not cut to it.
            initial_epoch: Number of the first epoch, to go on after a restart.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: A step or an argument is of another kind.
            ValueError: An argument is out of its range or would be ignored, or there
                is an augmentation already. `build` raises it where inputs do not suit.

        Example:
            >>> import numpy as np
            >>> import tfamp
            >>> from tfamp.data.augmentation import Flip
            >>> images = np.arange(24, dtype=np.uint8).reshape(8, 1, 3, 1)
            >>> pipeline = tfamp.data.Pipeline.from_arrays(images)
            >>> dataset = pipeline.augment(Flip(), strength=0.5, seed=1).build()
            >>> sorted({int(image[0, 1, 0]) for image in dataset})  # the middle stays
            [1, 4, 7, 10, 13, 16, 19, 22]
        """
        return self._with(
            Augmentation(
                steps,
                strength=strength,
                ramp_epochs=ramp_epochs,
                ramp_from=ramp_from,
                seed=seed,
                key=key,
                value_range=value_range,
                initial_epoch=initial_epoch,
            )
        )

    def batch(self, size: int, drop_remainder: bool = False) -> "Self":
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
        return self._with(Batch(size, bool(drop_remainder)))

    def prefetch(self, num_batches: int | None = None) -> "Self":
        """Prepares batches while the model works on earlier ones.

        Args:
            num_batches: How many to hold ready; None for 2.

        Returns:
            A pipeline with this stage.

        Raises:
            TypeError: `num_batches` is no integer.
            ValueError: It is below 1, or there is a prefetch already.
        """
        return self._with(Prefetch(num_batches))

    def build(self, autotune: Autotune = "auto") -> tf.data.Dataset:
        """Returns the dataset.

        Args:
            autotune: Whether tf.data chooses parallelism and buffer sizes itself.
                "auto" is off: its tuning thread can stall the end of an epoch by
                0.3 to 2.6 s, and one thread for each core was as fast.

        Returns:
            A dataset; each iteration of it is one epoch, in a new order if there is
            a shuffle.

        Raises:
            ValueError: No batch would be left, or stages do not go together.
            OSError: The disk is too small for the cache.
        """
        build = plan.Build(self.stages)
        if build.counts:
            self._builds.append(build)
        return build.dataset(self.source, autotune)

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
        text = plan.describe(self.source, self.stages, self._builds, autotune)
        print(text)
        return text

    @property
    def skipped(self) -> tuple[SkippedElement, ...]:
        """The elements that datasets built from this very pipeline have skipped."""
        stages = plan.counted(self.stages, self._builds)
        found = [stage.log.skipped for stage in stages if isinstance(stage, OnError)]
        return found[0] if found else ()
