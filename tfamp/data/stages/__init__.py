"""What a pipeline does to its elements: what a stage is, and the order they run in.

A stage is a frozen record: it checks its arguments, changes a dataset (`apply`) and
says what it does and why (`explain`). `ORDER` is the one table of the running order;
`plan.py` has the exceptions. Stages of a few lines stand here, the others in files.
"""

import abc
import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.machine.cpus import num_usable_cpus
from tfamp.records import checks

Autotune = bool | Literal["auto"]
# One batch in use, one ready. More only holds memory once the input keeps up.
DEFAULT_PREFETCH = 2
# A result that waits for its turn counts as a call too, so with one call for each
# thread a slow element leaves a thread idle: 7 % of the time with photos.
CALLS_A_THREAD = 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a dataset runs: its own threads, or tf.data's choice of all numbers.

    `errors` is the `OnError` that says what to do about elements that cannot be read,
    None to raise.
    """

    num_threads: int
    autotune: bool
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


class Role(enum.Enum):
    """What rules, and checks of whole plans, must know of a stage."""

    CUTS = "keeps a part of the source, the same one in every epoch"
    CALLS = "calls a function on each element, which fails where that is damaged"
    REPEATS = "may be asked for several times"
    DRAWS = "draws the examples of an epoch by their classes or weights"
    SEEDED = "brings elements in an order that a seed decides"
    BATCHES = "joins elements into batches"
    PARTS = "is passed by no other stage, since how many come decides what they give"


# First to last, by the names of the verbs. `plan.py` has what stays as written.
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


@dataclasses.dataclass(frozen=True)
class Stage(abc.ABC):
    """What every stage can do.

    Attributes:
        name: Of the verb that asks for it; the table and the order know it by this.
        stays_behind: The stage that it stays behind as written, "" for none.
    """

    name: ClassVar[str]
    stays_behind: str = dataclasses.field(default="", compare=False, kw_only=True)

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

    @property
    def acts_on_batches(self) -> bool:
        """Whether it is given or makes whole batches."""
        names = (self.name, self.stays_behind)
        return any(Role.BATCHES in ORDER.get(name, ()) for name in names)

    def why_here(self, otherwise: str) -> str:
        """Returns why it runs behind a stage that it could pass."""
        if not self.stays_behind:
            return otherwise
        if self.acts_on_batches:
            return f"on whole batches, as it is written behind `.{self.stays_behind}`"
        return f"behind `.{self.stays_behind}`, as written: ahead it would differ"


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


def has_role(step: Stage, *roles: Role) -> bool:
    """States whether a stage, or a step made of one, has any of the roles."""
    return not ORDER.get(step.name, set()).isdisjoint(roles)


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
        reason = self.why_here("one thread for each core")
        return f"{name}, {settings.parallelism}", reason


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
        size = tf.data.AUTOTUNE if settings.autotune else DEFAULT_PREFETCH
        return dataset.prefetch(self.num_batches or size)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        chosen = "autotuned" if settings.autotune else f"{DEFAULT_PREFETCH}, one in use"
        size = chosen if self.num_batches is None else str(self.num_batches)
        return size, "last, so all before it overlaps with the model"
