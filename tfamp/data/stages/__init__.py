"""What a pipeline does to its elements: what a stage is, and the order they run in.

A stage is a frozen record: it checks its arguments, changes a dataset (`apply`) and
tells its setting. `ORDER` is the one table of the running order, with the reasons;
`plan.py` has the exceptions. Stages of a few lines stand here, the others in files.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tfamp.machine.cpus import num_usable_cpus

Autotune = bool | Literal["auto"]
# A result that waits for its turn counts as a call too: one a thread leaves some idle.
_CALLS_A_THREAD = 2

# First to last, by the names of the verbs: the reason for the place, and roles. A stage
# "cuts" a part out of the source, the same in every epoch; "calls" a function on each
# element, which may fail; "repeats" may be asked for several times; "draws" the
# examples of an epoch; is "seeded"; makes "batches"; "parts" are passed by no other
# stage, since how many come decides what they give.
ORDER = {
    "on_error": ("an element that fails costs itself", ""),
    "subset": ("the same ones each epoch, before all that costs", "cuts"),
    "shard": ("each worker its own; tf.distribute divides no further", "cuts"),
    "decode": ("uint8; EXIF rotation is not applied", "calls"),
    "map": ("before the cache, done once", "calls repeats"),
    "filter": ("before the cache, done once", "repeats"),
    "cache": ("behind what is the same each epoch, before what differs", ""),
    "balance": ("classes equally often, anew each epoch", "draws seeded"),
    "weights": ("in proportion to the weights, anew each epoch", "draws seeded"),
    "shuffle": ("single elements, anew each epoch", "seeded"),
    "augment": ("behind the cache, so each epoch differs", ""),
    "batch": ("behind what looks at single elements", "batches"),
    "bucket": ("like lengths together, padded to few lengths", "batches"),
    "take": ("the first of what the steps above give", "parts repeats"),
    "repeat": ("as one epoch, each pass as an epoch of its own", "parts repeats"),
    "prefetch": ("last, so all before it overlaps with the model", ""),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a dataset runs: its own threads, or tf.data's choice of all numbers."""

    num_threads: int
    autotune: bool
    errors: Any = None

    @property
    def num_parallel_calls(self) -> int:
        """The value for every `num_parallel_calls` argument of tf.data."""
        return tf.data.AUTOTUNE if self.autotune else _CALLS_A_THREAD * self.num_threads


def settings_of(autotune: Autotune) -> Settings:
    """Returns how parallel a dataset runs here."""
    if not isinstance(autotune, bool) and autotune != "auto":
        raise ValueError(
            f"`autotune` is {autotune!r}; expected 'auto', True or False. Leave it "
            "out for fixed parallelism."
        )
    return Settings(num_usable_cpus(), autotune is True)


@dataclasses.dataclass(frozen=True)
class Stage(abc.ABC):
    """What every stage can do; `found` is what builds found and counted.

    One that takes elements by their place needs one order in each "pass", or in all
    "processes" too.
    """

    name: ClassVar[str]
    needs_order = ""
    stays_behind: str = dataclasses.field(default="", compare=False, kw_only=True)
    found: dict[str, Any] = dataclasses.field(
        default_factory=dict, compare=False, kw_only=True, repr=False
    )

    @abc.abstractmethod
    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset with this stage behind it, or raises if it suits not."""

    @property
    @abc.abstractmethod
    def setting(self) -> str:
        """What was asked for, in words."""

    @property
    def reason(self) -> str:
        """Why it runs where it does, and what builds have found."""
        place = self.stays_behind
        text = ORDER.get(self.name, ("",))[0]
        if place:
            text = f"behind `.{place}`, as written: ahead it would differ"
        if place and self.acts_on_batches:
            text = f"on whole batches, as it is written behind `.{place}`"
        return "; ".join(each for each in (text, self.facts) if each)

    @property
    def facts(self) -> str:
        """What builds have found, in words."""
        return "; ".join(self.found.values())

    @property
    def acts_on_batches(self) -> bool:
        """Whether it is given or makes whole batches."""
        return any(has_role(one, "batches") for one in (self.name, self.stays_behind))


@dataclasses.dataclass(frozen=True)
class Step(Stage):
    """A step of a few words: its line in the table, and maybe what it does."""

    name: str  # type: ignore[misc]  # of one step, not of all
    says: str = dataclasses.field(compare=False)
    why: str = dataclasses.field(compare=False)
    of: Any = None
    act: Callable[[tf.data.Dataset], tf.data.Dataset] | None = dataclasses.field(
        default=None, compare=False
    )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset after the step, as it is if there is nothing to do."""
        return dataset if self.act is None else self.act(dataset)

    setting = property(lambda self: self.says)
    reason = property(lambda self: self.why)


def has_role(step: Stage | str, *roles: str) -> bool:
    """States whether a stage, or a step made of one, has any of the roles."""
    name = step if isinstance(step, str) else step.name
    return not set(ORDER.get(name, ("", ""))[1].split()).isdisjoint(roles)


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
                "called. Pass a function of an element, as `lambda x, y: (x, y)`."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Maps in parallel and keeps the order of the elements."""
        return map_in_order(dataset, self.function, settings)

    setting = property(
        lambda self: getattr(self.function, "__name__", repr(self.function))
    )
