"""What a pipeline does to its elements: what a stage is, and the order they run in.

A stage is a frozen record: it checks its arguments, changes a dataset (`apply`) and
says what it does and why (`explain`). `ORDER` is the one table of the running order;
`plan.py` has the exceptions. Stages of a few lines stand here, the others in files.
"""

import abc
import dataclasses
import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tfamp.data._elements import (
    bytes_held,
    bytes_of_first,
    known_length,
    with_length,
)
from tfamp.data._given import begins_anew, runs_python
from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import checks

# From `Stage.apply` over `Build.dataset` and `Pipeline.build` to the caller.
_STACKLEVEL = 4
Autotune = bool | Literal["auto"]

# Elements held for shuffling may take this much memory, unless told otherwise.
SHUFFLE_BUFFER_BYTES = 256 * 2**20
# A buffer below this many elements hardly shuffles, however large they are.
MIN_SHUFFLE_BUFFER = 64
# Where elements have no known size, such as strings, so many are measured. Where that
# fails too, memory is bounded by count.
NUM_MEASURED = 32
DEFAULT_SHUFFLE_BUFFER = 10_000
# A buffer is filled before the first batch comes. Where the end of the elements is not
# known, more than so many would keep a model waiting for seconds.
MAX_OPEN_BUFFER = 2**18
# Positions in a buffer take 25 times their 8 bytes. Beyond so many, 200 MiB, their
# order is drawn as one tensor.
MAX_BUFFERED_POSITIONS = 2**20
# One batch in use, one ready. More only holds memory once the input keeps up.
DEFAULT_PREFETCH = 2
# A result that waits for its turn counts as a call too, so with one call for each
# thread a slow element leaves a thread idle: 7 % of the time with photos.
CALLS_A_THREAD = 2


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


def settings_of(autotune: Autotune) -> Settings:
    """Returns how parallel a dataset runs here."""
    if not isinstance(autotune, bool) and autotune != "auto":
        raise ValueError(
            f"`autotune` is {autotune!r}; expected 'auto', True or False. Leave it "
            "out for fixed parallelism."
        )
    return Settings(num_usable_cpus(), autotune is True)


def seed_text(seed: int | None) -> str:
    """Returns a seed in words."""
    return "no seed" if seed is None else f"seed {seed}"


def shuffle_buffer_size(num_elements: int | None, element_bytes: int | None) -> int:
    """Returns how many elements to hold for shuffling when the user did not say.

    All of them where they fit `SHUFFLE_BUFFER_BYTES`: only then is the shuffle exact.
    Their bytes are those that they take in a buffer (`bytes_held`).

    Example:
        >>> shuffle_buffer_size(60_000, 28 * 28 + 8 + 2 * 200)  # 68 MiB: all of it
        60000
        >>> shuffle_buffer_size(1_200_000, 224 * 224 * 3)
        1783
        >>> shuffle_buffer_size(None, 408)  # of a dataset that may have no end
        262144
        >>> shuffle_buffer_size(None, None)
        10000
    """
    if element_bytes is None:
        fitting = DEFAULT_SHUFFLE_BUFFER
    else:
        held = SHUFFLE_BUFFER_BYTES // max(1, element_bytes)
        fitting = max(MIN_SHUFFLE_BUFFER, held)
    most = MAX_OPEN_BUFFER if num_elements is None else num_elements
    return min(most, fitting)


@dataclasses.dataclass(frozen=True)
class Stage(abc.ABC):
    """What every stage can do.

    Attributes:
        name: Of the verb that asks for it; the table and the order know it by this.
    """

    name: ClassVar[str]
    # Whether it may act on whole batches, where it is written behind these.
    takes_batches: ClassVar[bool] = False

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

    @property
    def needs_order(self) -> str:
        """What takes elements by their place: "pass", or "processes"; "" for nothing.

        They then have to come in one order in each pass, or also in all processes.
        """
        return ""

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


class Role(enum.Enum):
    """What rules, and checks of whole plans, must know of a stage."""

    CUTS = "keeps a part of the source, the same one in every epoch"
    CALLS = "calls a function on each element, which fails where that is damaged"
    REPEATS = "may be asked for several times"
    DRAWS = "draws the examples of an epoch by their classes or weights"
    SEEDED = "brings elements in an order that a seed decides"
    BATCHES = "joins elements into batches"
    PARTS = "is passed by no other stage, since how many come decides what they give"


# First to last, by the names of the verbs. `order.py` has what stays as written.
ORDER: dict[str, set[Role]] = {
    "on_error": set(),  # a setting of what follows
    "subset": {Role.CUTS},  # before all that costs; the same for all workers
    "shard": {Role.CUTS},
    "decode": {Role.CALLS},
    "map": {Role.CALLS, Role.REPEATS},
    "filter": {Role.REPEATS},  # once, as a cache follows
    "cache": set(),  # behind what is the same in all epochs, before what differs
    "balance": {Role.DRAWS, Role.SEEDED},
    "weights": {Role.DRAWS, Role.SEEDED},
    "shuffle": {Role.SEEDED},  # single elements, not batches
    "augment": set(),  # sees elements: each has changes of its own
    "batch": {Role.BATCHES},
    "bucket": {Role.BATCHES},
    "take": {Role.PARTS, Role.REPEATS},  # where they are written
    "repeat": {Role.PARTS, Role.REPEATS},
    "prefetch": set(),  # last, so that all of it overlaps with the model
}


def has_role(step: Stage, *roles: Role) -> bool:
    """States whether a stage, or a step made of one, has any of the roles."""
    return not ORDER.get(step.name, set()).isdisjoint(roles)


def check_once(stage: Stage, stages: Sequence[Stage]) -> None:
    """Raises where a stage is there already that may be asked for once."""
    is_there = any(stage.name == other.name for other in stages)
    if is_there and not has_role(stage, Role.REPEATS):
        raise ValueError(
            f"`.{stage.name}` came twice; expected each stage once, since the order "
            "they run in does not follow the order of the calls. Keep the one that is "
            "meant."
        )


def check_pairs(stages: Sequence[Stage]) -> None:
    """Raises where two stages do the same thing in two ways."""
    if sum(has_role(stage, Role.DRAWS) for stage in stages) > 1:
        raise ValueError(
            "`.balance` and `.weights` came together; expected one of them, since each "
            "draws an epoch of its own. For both, pass `.weights` the weight of the "
            "example over the number of its class."
        )
    if sum(has_role(stage, Role.BATCHES) for stage in stages) > 1:
        raise ValueError(
            "`.batch` and `.bucket` came together; expected one of them. `.bucket` "
            "makes batches: leave `.batch` out."
        )


def acts_on_batches(step: Stage) -> bool:
    """States whether a step is given whole batches."""
    return has_role(step, Role.BATCHES) or (
        getattr(step, "stays_behind", "") in ("batch", "bucket")
    )


def as_written(stays_behind: str) -> str:
    """Returns why a function runs behind a stage that it could pass, "" if none."""
    if not stays_behind:
        return ""
    if stays_behind in ("batch", "bucket"):
        return f"on whole batches, as it is written behind `.{stays_behind}`"
    return f"behind `.{stays_behind}`, as written: ahead of it the result is another"


def map_in_order(
    dataset: tf.data.Dataset, function: Callable[..., Any], settings: Settings
) -> tf.data.Dataset:
    """Returns `function` mapped over `dataset` in parallel, order kept."""
    return dataset.map(
        function, num_parallel_calls=settings.num_parallel_calls, deterministic=True
    )


@dataclasses.dataclass(frozen=True)
class Map(Stage):
    """Calls the user's function on every element.

    Attributes:
        stays_behind: The stage that it stays behind as written, "" for none.
    """

    name: ClassVar[str] = "map"
    takes_batches: ClassVar[bool] = True
    function: Callable[..., Any]
    stays_behind: str = dataclasses.field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"`function` is {self.function!r}; expected something that can be "
                "called with one element. Pass a function, such as `lambda x, y: (x, "
                "y)`."
            )

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        """The user's functions in it."""
        return (self.function,)

    def behind(self, name: str) -> "Map":
        """Returns the stage as it stays behind another one."""
        return dataclasses.replace(self, stays_behind=name)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        return map_in_order(dataset, self.function, settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        name = getattr(self.function, "__name__", repr(self.function))
        reason = as_written(self.stays_behind) or "one thread for each core"
        return f"{name}, {settings.parallelism}", reason


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
        element_bytes = bytes_held(dataset.element_spec)
        if element_bytes is None:
            return None
        return shuffle_buffer_size(length, element_bytes)

    def is_too_large(self, source: Any) -> bool:
        """Whether a buffer of a source's elements would take much memory."""
        dataset = tf.data.Dataset.from_tensor_slices(source.tensors)
        element_bytes = bytes_held(dataset.element_spec)
        held = self.buffer_size or source.num_examples
        return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Shuffles through a buffer, afresh at every iteration."""
        size = self.known_size(dataset)
        if size is None:
            if runs_python(dataset) and not begins_anew(dataset):
                warnings.warn(
                    "`.shuffle` without `buffer_size` looks at the sizes of the first "
                    "elements, and these were others when they were read again. "
                    "Expected the same: a generator that was called already can be "
                    "read once, and has lost what was looked at. Pass `from_generator` "
                    "a function that makes a new one, or pass `buffer_size`, which "
                    "reads nothing.",
                    stacklevel=_STACKLEVEL,
                )
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
        elif size == MAX_OPEN_BUFFER:
            reason = "as many as are soon read, as the end is not known: approximate"
        else:
            reason = f"{limit}: approximate"
        return f"{size:,} elements, {seed}", reason


@dataclasses.dataclass(frozen=True)
class Permutation(Shuffle):
    """Puts all positions of a source in a new random order, drawn as one tensor."""

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the positions in an order that is drawn as an epoch begins."""
        length = known_length(dataset) or 0
        numbers = tf.data.Dataset.random(self.seed, rerandomize_each_iteration=True)

        def drawn(seed: tf.Tensor) -> tf.data.Dataset:
            every = tf.range(length, dtype=tf.int64)
            order = tf.random.experimental.stateless_shuffle(every, seed)
            return tf.data.Dataset.from_tensor_slices(order)

        seeds = numbers.take(2).batch(2, drop_remainder=True)
        return with_length(seeds.flat_map(drawn), length)


@dataclasses.dataclass(frozen=True)
class Take(Stage):
    """Keeps the first elements, or batches, of each pass."""

    name: ClassVar[str] = "take"
    count: int

    def __post_init__(self) -> None:
        checks.positive_int("count", self.count)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the first ones."""
        return dataset.take(self.count)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        length = known_length(dataset)
        of = "" if length is None else f" of {length:,}"
        return f"{self.count:,}{of}", "the first of what the steps above give"


@dataclasses.dataclass(frozen=True)
class Repeat(Stage):
    """Passes over the elements several times, or without end."""

    name: ClassVar[str] = "repeat"
    count: int | None

    def __post_init__(self) -> None:
        if self.count is not None:
            checks.positive_int("count", self.count)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the passes one after another."""
        return dataset.repeat(self.count)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        if self.count is None:
            return "without end", "give `fit` `steps_per_epoch`"
        return f"{self.count:,} times", "as one epoch, each pass as an epoch of its own"


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
