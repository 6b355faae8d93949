"""What a pipeline does to its elements: a file for each stage, and what they share."""

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
    with_length,
)
from tfamp.records import checks

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
# From `Stage.check` over `Build.dataset` and `Pipeline.build` to the caller.
_STACKLEVEL = 4


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a dataset runs: its own threads, or tf.data's choice of all numbers.

    `errors` is what to do about elements that cannot be read, None to raise.
    """

    num_threads: int
    autotune: bool
    # `stages.errors.OnError`, which stands above this file.
    errors: Any = None

    @property
    def num_parallel_calls(self) -> int:
        """The value for every `num_parallel_calls` argument of tf.data."""
        return tf.data.AUTOTUNE if self.autotune else CALLS_A_THREAD * self.num_threads

    @property
    def parallelism(self) -> str:
        """The same in words."""
        return "autotuned" if self.autotune else f"{self.num_threads} at once"


def seed_text(seed: int | None) -> str:
    """Returns a seed in words."""
    return "no seed" if seed is None else f"seed {seed}"


def shuffle_buffer_size(num_elements: int | None, element_bytes: int | None) -> int:
    """Returns how many elements to hold for shuffling when the user did not say.

    All of them where they fit `SHUFFLE_BUFFER_BYTES`: only then is the shuffle exact.

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
    """What every stage can do.

    Attributes:
        name: Of the verb that asks for it; the table and the order know it by this.
    """

    name: ClassVar[str]

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises or warns, before anything runs, if `dataset` does not suit."""
        del dataset  # most stages suit any

    @abc.abstractmethod
    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns `dataset` with this stage behind it."""

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what `describe` can know of `apply`; nothing is read or written."""
        return self.apply(dataset, settings)

    @abc.abstractmethod
    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""

    def for_build(self) -> "Stage":
        """Returns the stage as one build uses it, with counts of its own."""
        return self

    def with_counts_of(self, builds: Sequence[Any]) -> "Stage":
        """Returns the stage with the counts of its builds together, to be described."""
        del builds
        return self

    def numbered(self) -> "Stage":
        """Returns the stage as it acts on pairs (position, element)."""
        return self

    def with_epochs(self) -> tuple["Stage", "Stage"] | None:
        """Returns a stage that acts by epochs and the step that counts them, if any."""
        return None


@dataclasses.dataclass(frozen=True)
class Step(Stage):
    """A step that only plans have: its line in the table, and maybe what it does.

    `of` is what counts of it where caches are told apart.
    """

    name: str  # type: ignore[misc]  # of one step, not of all
    setting: str = dataclasses.field(compare=False)
    reason: str = dataclasses.field(compare=False)
    of: Any = None
    act: Callable[[tf.data.Dataset], tf.data.Dataset] | None = dataclasses.field(
        default=None, compare=False
    )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset after the step, as it is if there is nothing to do."""
        return dataset if self.act is None else self.act(dataset)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason."""
        return self.setting, self.reason


def map_in_order(
    dataset: tf.data.Dataset, function: Callable[..., Any], settings: Settings
) -> tf.data.Dataset:
    """Returns `function` mapped over `dataset` in parallel, order kept."""
    return dataset.map(
        function, num_parallel_calls=settings.num_parallel_calls, deterministic=True
    )


@dataclasses.dataclass(frozen=True)
class Map(Stage):
    """Calls the user's function on every element."""

    name: ClassVar[str] = "map"
    function: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"`function` is {self.function!r}; expected something that can be "
                "called with one element. Pass a function, such as `lambda x, y: (x, "
                "y)`."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        return map_in_order(dataset, self.function, settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        name = getattr(self.function, "__name__", repr(self.function))
        return f"{name}, {settings.parallelism}", "one thread for each core"


@dataclasses.dataclass(frozen=True)
class Shuffle(Stage):
    """Puts the elements in a new random order each epoch."""

    name: ClassVar[str] = "shuffle"
    buffer_size: int | None
    seed: int | None

    def __post_init__(self) -> None:
        if self.buffer_size is not None:
            checks.positive_int("buffer_size", self.buffer_size)
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

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
        seed = seed_text(self.seed)
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

    name: ClassVar[str] = "batch"
    size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        checks.positive_int("size", self.size)

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
class Rebatch(Batch):
    """Makes batches out of chunks of rows; their number is None where unknown."""

    num_rows: int | None = None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; the source made the chunks for this."""
        self.check_length(self.num_rows)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Cuts and joins whole chunks."""
        batches = dataset.rebatch(self.size, drop_remainder=self.drop_remainder)
        if self.num_rows is None:
            return batches
        whole, rest = divmod(self.num_rows, self.size)
        count = whole + (rest > 0 and not self.drop_remainder)
        return with_length(batches, count)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        last = "drops the rest" if self.drop_remainder else "the last may be smaller"
        return str(self.size), f"from chunks, rows are never taken apart; {last}"


@dataclasses.dataclass(frozen=True)
class Prefetch(Stage):
    """Prepares elements while the model works on earlier ones."""

    name: ClassVar[str] = "prefetch"
    num_batches: int | None

    def __post_init__(self) -> None:
        if self.num_batches is not None:
            checks.positive_int("num_batches", self.num_batches)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Prefetches a fixed number unless tf.data is to choose."""
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
