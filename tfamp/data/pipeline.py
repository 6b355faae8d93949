"""The input pipeline: written in any order, run in the right one."""

import dataclasses
from typing import Literal

import tensorflow as tf

from tfamp.data import _plan, _running
from tfamp.data._choosing import Choosing
from tfamp.data._cpus import num_usable_cpus
from tfamp.data._errors import OnError, SkippedElement
from tfamp.data._stages import Settings, Stage
from tfamp.data._staging import Staging
from tfamp.data._starting import Starting

Autotune = bool | Literal["auto"]


@dataclasses.dataclass(frozen=True)
class Pipeline(Starting, Staging, Choosing):
    """An input pipeline that becomes a plain `tf.data.Dataset`.

    Start with `from_tfds`, `from_arrays` or `from_dataset`, add stages in any
    order, and call `build`. The stages run in the order in which they are right:
    map, cache, shuffle, augment, batch, prefetch. A pipeline never changes: each method
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

    # The stages of each build of this pipeline, with what they counted.
    _builds: list[tuple[Stage, ...]] = dataclasses.field(
        default_factory=list, init=False, compare=False, repr=False
    )

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
        stages = tuple(stage.for_build() for stage in self.stages)
        self._builds.append(stages)
        return _running.run(self._plan(stages, autotune))

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
        plan = self._plan(self._counted(), autotune)
        if plan.settings.autotune:
            threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
        else:
            off = "autotune=False" if autotune is False else "autotune could stall"
            threads = (str(plan.settings.num_threads), f"one for each core; {off}")
        text = _running.describe(plan, threads)
        print(text)
        return text

    @property
    def skipped(self) -> tuple[SkippedElement, ...]:
        """The elements that datasets built from this very pipeline have skipped."""
        logs = [stage.log for stage in self._counted() if isinstance(stage, OnError)]
        return tuple(one for log in logs for one in log.skipped)

    def _counted(self) -> tuple[Stage, ...]:
        """Returns the stages with the counts of all builds."""
        return tuple(
            stage.after([build[number] for build in self._builds])
            for number, stage in enumerate(self.stages)
        )

    def _plan(self, stages: tuple[Stage, ...], autotune: Autotune) -> _plan.Plan:
        if not isinstance(autotune, bool) and autotune != "auto":
            raise ValueError(
                f"`autotune` is {autotune!r}; expected 'auto', True or False. Leave it "
                "out for fixed parallelism."
            )
        settings = Settings(num_usable_cpus(), autotune is True)
        return _plan.make_plan(self.source, stages, settings)
