"""The order in which a pipeline's stages run, and what becomes of them on the way.

`ORDER` is the one table of that order. `RULES` are the exceptions from it, each for
speed or exactness, and each a function of its own. `make_plan` applies both;
`builds.py` makes the dataset of a plan and its description from the same steps.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, Literal

import tensorflow as tf

from tfamp.data._elements import bytes_of_element, is_endless, known_length
from tfamp.data.fingerprints import Fingerprint, fingerprint
from tfamp.data.sources import (
    RandomAccess,
    Source,
    gather_step,
)
from tfamp.data.sources._files import ChunkedSource
from tfamp.data.sources.datasets import ArraySource, DatasetSource
from tfamp.data.stages import SHUFFLE_BUFFER_BYTES, Rebatch, Settings, Stage, Step
from tfamp.data.stages.cache import FileCache
from tfamp.data.stages.decode import with_whole_batches
from tfamp.data.stages.dropped import Careful
from tfamp.data.stages.workers import Service, Shard, before_service


class Role(enum.Enum):
    """What rules, and checks of whole plans, must know of a stage."""

    CUTS = "keeps a part of the source, the same one in every epoch"
    CALLS = "calls a function on each element, which fails where that is damaged"
    REPEATS = "may be asked for several times"
    DRAWS = "draws the examples of an epoch by their classes or weights"
    SEEDED = "brings elements in an order that a seed decides"
    BATCHES = "joins elements into batches"


# First to last, by the names of the verbs.
ORDER: dict[str, set[Role]] = {
    "on_error": set(),  # a setting of what follows
    "subset": {Role.CUTS},  # before all that costs; the same for all workers
    "shard": {Role.CUTS},
    "decode": {Role.CALLS},
    "map": {Role.CALLS},
    "service": set(),  # behind what costs, before what looks at other elements
    "filter": {Role.REPEATS},  # sees what `.map` made, and once, as a cache follows
    "cache": set(),  # behind what is the same in all epochs, before what differs
    "balance": {Role.DRAWS, Role.SEEDED},
    "weights": {Role.DRAWS, Role.SEEDED},
    "shuffle": {Role.SEEDED},  # single elements, not batches
    "augment": set(),  # sees elements: each has changes of its own
    "batch": {Role.BATCHES},
    "bucket": {Role.BATCHES},
    "prefetch": set(),  # last, so that all of it overlaps with the model
}
_PLACES = {name: place for place, name in enumerate(ORDER)}
# Parts of a fingerprint that say which data it is.
_DATA_PARTS = ("source", *(name for name in ORDER if Role.CUTS in ORDER[name]))


def has_role(step: Stage, *roles: Role) -> bool:
    """States whether a stage, or a step made of one, has any of the roles."""
    return not ORDER.get(step.name, set()).isdisjoint(roles)


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A source and its steps in running order.

    Attributes:
        rest: Steps on elements, or on chunks of them, first to last.
        first: Steps before these, on the source as a whole or on positions in it.
        reads: What the first step is given.
    """

    source: Source
    settings: Settings
    rest: tuple[Stage, ...]
    first: tuple[Stage, ...] = ()
    reads: Literal["elements", "positions", "chunks"] = "elements"

    @property
    def steps(self) -> tuple[Stage, ...]:
        """All steps, first to last."""
        return (*self.first, *self.rest)

    def start(self) -> tf.data.Dataset:
        """Returns the dataset that the first step acts on."""
        if self.reads == "positions":
            return self.source.positions()  # type: ignore[attr-defined]
        read = getattr(self.source, "chunks" if self.reads == "chunks" else "dataset")
        return read(self.settings)

    def next_is(self, name: str) -> bool:
        """States whether the first of the steps on elements has a name."""
        return bool(self.rest) and self.rest[0].name == name


def make_plan(
    source: Source, stages: Sequence[Stage], settings: Settings
) -> PipelinePlan:
    """Returns the plan of stages that were asked for in any order."""
    rest = sorted(stages, key=lambda stage: _PLACES[stage.name])
    _check_pairs(rest)
    if rest and rest[0].name == "on_error":
        calls = any(has_role(stage, Role.CALLS) for stage in rest)
        if not (calls or source.skips_errors):
            raise ValueError(
                "`.on_error('skip')` has nothing to act on: this source reads what is "
                "in memory or raises its own errors, and there is no `.map` or "
                "`.decode`; expected one of them. Leave `.on_error` out."
            )
        on_error: Any = rest.pop(0)
        on_error = dataclasses.replace(on_error, is_last=not calls)
        settings = dataclasses.replace(settings, errors=on_error)
    plan = PipelinePlan(source, settings, tuple(rest))
    for rule in RULES:
        plan = rule(plan)
    return plan


def _even_parts(plan: PipelinePlan) -> PipelinePlan:
    """Where batches drop a remainder, workers get parts of one size.

    One would else have a batch more than another.
    """
    batch: Any = next((step for step in plan.rest if step.name == "batch"), None)
    if batch is None or not batch.drop_remainder:
        return plan
    rest = tuple(
        dataclasses.replace(step, is_even=True)
        if isinstance(step, Shard) and step.cluster is not None
        else step
        for step in plan.rest
    )
    return dataclasses.replace(plan, rest=rest)


def _cut_source(plan: PipelinePlan) -> PipelinePlan:
    """Where any element can be read by its position, a part is chosen before all."""
    if not isinstance(plan.source, RandomAccess):
        return plan
    source, first = plan.source, []
    rest = [step for step in plan.rest if not has_role(step, Role.CUTS)]
    for stage in plan.rest:
        if has_role(stage, Role.CUTS):
            every = tf.data.Dataset.range(source.num_examples)
            setting, reason = stage.explain(every, plan.settings)
            reason += f"; of {source.num_examples:,}, before any is read"
            first.append(Step(stage.name, setting, reason, of=stage))
            if getattr(stage, "num_shards", 0) == 1:
                continue  # all of it: a part would be a copy
            positions = stage.chosen(source, plan.settings)  # type: ignore[attr-defined]
            source = source.part(positions)
    return dataclasses.replace(
        plan, source=source, first=tuple(first), rest=tuple(rest)
    )


def _divide_for_service(plan: PipelinePlan) -> PipelinePlan:
    """Where workers of a data service read, parts are such that these may divide."""
    if not any(isinstance(step, Service) for step in plan.rest):
        return plan
    source, rest = before_service(plan.source, plan.rest, plan.settings)
    return dataclasses.replace(plan, source=source, rest=rest)


def _leave_out_memory_cache(plan: PipelinePlan) -> PipelinePlan:
    """A memory cache of bare arrays is left out: it would hold them twice."""
    is_array = isinstance(plan.source, ArraySource)
    if not (is_array and plan.next_is("cache")) or plan.rest[0].path is not None:  # type: ignore[attr-defined]
        return plan
    left_out = Step("cache", "left out", "the arrays are in memory already")
    return dataclasses.replace(plan, rest=(left_out, *plan.rest[1:]))


def _draw_positions(plan: PipelinePlan) -> PipelinePlan:
    """Where that is possible, samplers and shuffles act on positions, not elements.

    They are then exact at any size. A filter must have judged the elements that are
    balanced, and a cache would freeze the order: behind one they act on elements.
    """
    source = plan.source
    left = [step for step in plan.rest if not isinstance(step, Step)]
    names = {step.name for step in left}
    if "service" in names or not isinstance(source, RandomAccess) or "cache" in names:
        return plan
    samplers: list[Any] = [step for step in left if has_role(step, Role.DRAWS)]
    drawn = samplers if "filter" not in names else []
    found: list[Any] = [
        dataclasses.replace(sampler, source=source) for sampler in drawn
    ]
    shuffle: Any = next((step for step in left if step.name == "shuffle"), None)
    # Elements that a sampler draws on the stream are shuffled behind it.
    is_free = shuffle is not None and samplers == drawn
    if is_free and (drawn or _is_too_large_to_buffer(source, shuffle)):
        size = shuffle.buffer_size or source.num_examples
        found.append(dataclasses.replace(shuffle, buffer_size=size))
        drawn = [*drawn, shuffle]
    if not found:
        return plan
    rest = [step for step in plan.rest if step not in drawn]
    # A batch of positions is read at once.
    split = 1 if rest and rest[0].name == "batch" else 0
    rest.insert(
        split, gather_step(source, plan.settings, "batch" if split else "element")
    )
    return dataclasses.replace(
        plan, first=(*plan.first, *found), rest=tuple(rest), reads="positions"
    )


def _batch_chunks(plan: PipelinePlan) -> PipelinePlan:
    """Rows of a table that nothing looks at one by one go from chunks to batches."""
    if not isinstance(plan.source, ChunkedSource) or not plan.next_is("batch"):
        return plan
    batch: Any = plan.rest[0]
    num_rows = known_length(plan.source.dataset(plan.settings))
    rebatch = Rebatch(batch.size, batch.drop_remainder, num_rows)
    return dataclasses.replace(plan, reads="chunks", rest=(rebatch, *plan.rest[1:]))


def _skip_errors(plan: PipelinePlan) -> PipelinePlan:
    """Where damaged elements are skipped, one careful step makes all calls.

    It acts on numbered elements, so that those it skips can be named.
    """
    on_error = plan.settings.errors
    calls: list[Any] = [step for step in plan.rest if has_role(step, Role.CALLS)]
    if on_error is None or not calls:
        rest = plan.rest if on_error is None else (on_error, *plan.rest)
        return dataclasses.replace(plan, rest=rest)
    careful = Careful(
        tuple(step.function for step in calls),
        tuple(step.name for step in calls),
        plan.source.locate,
        on_error,
    )
    at = plan.rest.index(calls[0])
    before = [step.numbered() for step in plan.rest[:at]]
    if not any(step.name == "gather" for step in before):
        reason = "so that a skipped element can be named"
        act = tf.data.Dataset.enumerate
        before.insert(0, Step("number", "positions", reason, act=act))
    behind = [step for step in plan.rest[at:] if step not in calls]
    return dataclasses.replace(plan, rest=(*before, careful, on_error, *behind))


def _decode_batches(plan: PipelinePlan) -> PipelinePlan:
    """Images that OpenCV decodes and that are batched next are decoded by the batch."""
    if plan.settings.errors is not None:
        return plan
    return dataclasses.replace(plan, rest=tuple(with_whole_batches(list(plan.rest))))


def _count_epochs(plan: PipelinePlan) -> PipelinePlan:
    """Where a stage acts by the number of the epoch, the last step counts epochs."""
    for at, step in enumerate(plan.rest):
        counted = step.with_epochs()
        if counted is not None:
            stage, count = counted
            rest = (*plan.rest[:at], stage, *plan.rest[at + 1 :], count)
            return dataclasses.replace(plan, rest=rest)
    return plan


def _cache_in_files(plan: PipelinePlan) -> PipelinePlan:
    """A cache with a path lies in files that know what comes before it."""
    for at, step in enumerate(plan.rest):
        path = getattr(step, "path", None)
        if step.name == "cache" and path is not None:
            before = (*plan.first, *plan.rest[:at])
            found = _fingerprint(plan.source, before)
            endless = _is_endless(plan.source, before)
            cache = FileCache(path, found, step.unseen, endless, _DATA_PARTS)  # type: ignore[attr-defined]
            rest = (*plan.rest[:at], cache, *plan.rest[at + 1 :])
            return dataclasses.replace(plan, rest=rest)
    return plan


# The exceptions, in the order in which they are looked at.
RULES = (
    _even_parts,
    _cut_source,
    _divide_for_service,
    _leave_out_memory_cache,
    _draw_positions,
    _batch_chunks,
    _skip_errors,
    _decode_batches,
    _count_epochs,
    _cache_in_files,
)


def _is_too_large_to_buffer(source: RandomAccess, shuffle: Any) -> bool:
    """Whether a buffer of elements, which may copy them, would take much memory."""
    dataset = tf.data.Dataset.from_tensor_slices(source.tensors)
    element_bytes = bytes_of_element(dataset.element_spec)
    held = shuffle.buffer_size or source.num_examples
    return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES


def _is_endless(source: Source, steps: Sequence[Stage]) -> bool:
    """Whether a source without end comes through steps, of which a filter hides it."""
    if not isinstance(source, DatasetSource):
        return False
    is_cut = any(step.name == "subset" for step in steps)
    return is_endless(source.given) and not is_cut


def _fingerprint(source: Source, steps: Sequence[Stage]) -> Fingerprint:
    """Returns the fingerprint of a source and the steps before a cache."""
    parts: dict[str, Any] = {"source": (type(source).__name__, source.identity())}
    for step in steps:
        if step.name in ("on_error", "service"):
            continue  # the careful step tells what is skipped; any reader will do
        same = sum(name.split(" ")[0] == step.name for name in parts)
        parts[f"{step.name} {same + 1}" if same else step.name] = step
    return fingerprint(parts)


def _check_pairs(stages: Sequence[Stage]) -> None:
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
