"""What a pipeline does to its elements: one frozen record per stage.

A stage knows its place (`rank`), how to change a dataset (`apply`) and how to say
what it does and why (`explain`). `_plan.py` puts stages in order; a new stage is
a new record here with a free rank.
"""

import abc
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.data._elements import (
    bytes_of_element,
    bytes_of_first,
    known_length,
    looks_batched,
)

# Elements held for shuffling may take this much memory, unless told otherwise.
SHUFFLE_BUFFER_BYTES = 256 * 2**20
# A buffer below this many elements hardly shuffles, however large they are.
MIN_SHUFFLE_BUFFER = 64
# Where elements have no known size, such as strings, so many are measured. Where that
# fails too, memory is bounded by count.
NUM_MEASURED = 32
DEFAULT_SHUFFLE_BUFFER = 10_000
# One batch in use, one ready. More only holds memory once the input keeps up.
DEFAULT_PREFETCH = 2
# A result that waits for its turn counts as a call too, so with one call for each
# thread a slow element leaves a thread idle: 7 % of the time with photos.
CALLS_A_THREAD = 2
# From `Stage.check` over `_plan.run` and `Pipeline.build` to the caller.
_STACKLEVEL = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """How parallel a dataset is built to run.

    Attributes:
        num_threads: Threads of the dataset's own pool, and elements worked on at
            once by a parallel stage.
        autotune: Whether tf.data chooses parallelism and buffer sizes itself.
        errors: What to do about elements that cannot be read, None to raise.
    """

    num_threads: int
    autotune: bool
    # `_errors.OnError`, which stands above this file.
    errors: Any = None

    @property
    def num_parallel_calls(self) -> int:
        """The value for every `num_parallel_calls` argument of tf.data."""
        return tf.data.AUTOTUNE if self.autotune else CALLS_A_THREAD * self.num_threads

    @property
    def parallelism(self) -> str:
        """The same in words."""
        return "autotuned" if self.autotune else f"{self.num_threads} at once"


def shuffle_buffer_size(num_elements: int | None, element_bytes: int | None) -> int:
    """Returns how many elements to hold for shuffling when the user did not say.

    All of them where they fit `SHUFFLE_BUFFER_BYTES`: only then is the shuffle exact.

    Args:
        num_elements: Length of the dataset, None where unknown or infinite.
        element_bytes: Size of one element, None where that is not known.

    Example:
        >>> shuffle_buffer_size(60_000, 784)  # 45 MiB: all of it
        60000
        >>> shuffle_buffer_size(1_200_000, 224 * 224 * 3)
        1783
        >>> shuffle_buffer_size(None, None)
        10000
    """
    if element_bytes is None:
        fitting = DEFAULT_SHUFFLE_BUFFER
    else:
        held = SHUFFLE_BUFFER_BYTES // max(1, element_bytes)
        fitting = max(MIN_SHUFFLE_BUFFER, held)
    return fitting if num_elements is None else min(num_elements, fitting)


@dataclasses.dataclass(frozen=True)
class Stage(abc.ABC):
    """What every stage can do. `rank` and `name` belong to the class."""

    rank: ClassVar[int]
    name: ClassVar[str]

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises or warns, before anything runs, if `dataset` does not suit."""
        del dataset  # most stages suit any

    @abc.abstractmethod
    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns `dataset` with this stage behind it."""

    def for_build(self) -> "Stage":
        """Returns the stage as one build uses it, with counts of its own."""
        return self

    def after(self, builds: Sequence["Stage"]) -> "Stage":
        """Returns the stage with the counts of builds together, to be described."""
        del builds
        return self

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what `apply` returns as far as `describe` can know it.

        Nothing is read or written here; a stage whose `apply` does either has a
        preview of its own.
        """
        return self.apply(dataset, settings)

    @abc.abstractmethod
    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""


def map_in_order(
    dataset: tf.data.Dataset, function: Callable[..., Any], settings: Settings
) -> tf.data.Dataset:
    """Returns `function` mapped over `dataset` in parallel, order kept."""
    return dataset.map(
        function, num_parallel_calls=settings.num_parallel_calls, deterministic=True
    )


@dataclasses.dataclass(frozen=True)
class ElementMap(Stage):
    """Calls a function on every element; a call may fail on damaged data.

    Where errors are skipped, the plan calls `function` itself, with care.

    Attributes:
        function: Called with the parts of an element.
    """

    function: Callable[..., Any]

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        return map_in_order(dataset, self.function, settings)


@dataclasses.dataclass(frozen=True)
class Map(ElementMap):
    """Calls the user's function on every element."""

    rank: ClassVar[int] = 10
    name: ClassVar[str] = "map"

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        name = getattr(self.function, "__name__", repr(self.function))
        return f"{name}, {settings.parallelism}", "one thread for each core"


@dataclasses.dataclass(frozen=True)
class Shuffle(Stage):
    """Puts the elements in a new random order each epoch."""

    rank: ClassVar[int] = 30
    name: ClassVar[str] = "shuffle"
    buffer_size: int | None
    seed: int | None

    def known_size(self, dataset: tf.data.Dataset) -> int | None:
        """Returns how many elements are held, None where their sizes must tell."""
        length = known_length(dataset)
        if self.buffer_size is not None:
            return self.buffer_size if length is None else min(self.buffer_size, length)
        element_bytes = bytes_of_element(dataset.element_spec)
        if element_bytes is None:
            return None
        return shuffle_buffer_size(length, element_bytes)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Shuffles through a buffer, afresh at every iteration."""
        size = self.known_size(dataset)
        if size is None:
            element_bytes = bytes_of_first(dataset, NUM_MEASURED)
            size = shuffle_buffer_size(known_length(dataset), element_bytes)
        return dataset.shuffle(size, seed=self.seed, reshuffle_each_iteration=True)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset in its own order, without measuring its elements."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        size, length = self.known_size(dataset), known_length(dataset)
        seed = "no seed" if self.seed is None else f"seed {self.seed}"
        limit = f"what fits {SHUFFLE_BUFFER_BYTES // 2**20} MiB"
        if size is None:
            reason = f"by the first {NUM_MEASURED} elements, read at build: approximate"
            return f"{limit}, {seed}", reason
        if length is not None and size >= length:
            reason = "holds every element: an exact shuffle, new each epoch"
        elif self.buffer_size is not None:
            reason = "as asked; elements further apart than this keep their order"
        else:
            reason = f"{limit}: approximate"
        return f"{size:,} elements, {seed}", reason


@dataclasses.dataclass(frozen=True)
class Batch(Stage):
    """Joins elements into batches."""

    rank: ClassVar[int] = 40
    name: ClassVar[str] = "batch"
    size: int
    drop_remainder: bool

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; warns if elements look like batches."""
        self.check_length(known_length(dataset))
        if looks_batched(dataset.element_spec):
            warnings.warn(
                f"Elements {dataset.element_spec} look like batches already: "
                "the first dimension of every part is unknown. Expected single "
                "examples; batching again adds a dimension. Leave out `.batch`, or "
                "pass `ds.unbatch()`. If these are sequences of varying length, pad "
                "them first.",
                stacklevel=_STACKLEVEL,
            )

    def check_length(self, length: int | None) -> None:
        """Raises if no batch would be left of `length` elements."""
        if self.drop_remainder and length is not None and length < self.size:
            raise ValueError(
                f"Batch size {self.size} with `drop_remainder=True` leaves no batch of "
                f"{length} elements; expected a size of at most {length}. Make the "
                "batch smaller, or keep the remainder."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Batches on one thread: a copy is cheaper than handing it to another."""
        return dataset.batch(self.size, drop_remainder=self.drop_remainder)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        length = known_length(dataset)
        rest = None if length is None else length % self.size
        if self.drop_remainder:
            dropped = "the rest" if rest is None else f"{rest} of {length} elements"
            reason = f"every batch has one static shape; drops {dropped}"
        elif rest == 0:
            reason = "every batch is full"
        else:
            last = "may be smaller" if rest is None else f"has {rest} elements"
            reason = f"keeps every element; the last batch {last}"
        return str(self.size), reason


@dataclasses.dataclass(frozen=True)
class Prefetch(Stage):
    """Prepares elements while the model works on earlier ones."""

    rank: ClassVar[int] = 50
    name: ClassVar[str] = "prefetch"
    num_batches: int | None

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Prefetches a fixed number unless tf.data was told to choose."""
        size = self.num_batches
        if size is None:
            size = tf.data.AUTOTUNE if settings.autotune else DEFAULT_PREFETCH
        return dataset.prefetch(size)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        if self.num_batches is not None:
            return str(self.num_batches), "as asked; last, so all before it overlaps"
        if settings.autotune:
            return "autotuned", "last, so all before it overlaps with the model"
        return str(DEFAULT_PREFETCH), "one in use, one ready; last, so all overlaps"
