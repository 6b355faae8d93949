"""The order in which a pipeline's stages run, and what becomes of them on the way.

`stages.ORDER` is the one table of that order. `RULES` are the exceptions from it, each
for speed or exactness, and each a function of its own. `make_plan` applies both;
`Build` makes the dataset of a plan, and `describe` its description, of the same steps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import rich.box
import tensorflow as tf

from tfamp.data._elements import known_length, of_unknown_length
from tfamp.data.order import in_order
from tfamp.data.sources import RandomAccess, Source, gather_step
from tfamp.data.sources._files import ChunkedSource
from tfamp.data.sources.datasets import ArraySource
from tfamp.data.stages import (
    MAX_BUFFERED_POSITIONS,
    Autotune,
    Permutation,
    Role,
    Settings,
    Stage,
    Step,
    acts_on_batches,
    check_pairs,
    has_role,
    settings_of,
    workers,
)
from tfamp.data.stages.batches import Rebatch
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.dropped import Careful
from tfamp.data.stages.workers import Shard
from tfamp.records import console


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """A source and its steps in running order.

    Attributes:
        rest: Steps on elements, or on chunks of them, first to last.
        passed: Of stages, by name, those that were written before and run after them.
        first: Steps before these, on the source as a whole or on positions in it.
        reads: What the first step is given.
    """

    source: Source
    settings: Settings
    rest: tuple[Stage, ...]
    passed: Mapping[str, tuple[str, ...]]
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

    @property
    def head(self) -> tuple[Stage, ...]:
        """The steps on elements ahead of a `.take` or `.repeat`, if there is one."""
        parted = (at for at, one in enumerate(self.rest) if has_role(one, Role.PARTS))
        return self.rest[: next(parted, len(self.rest))]

    def next_is(self, name: str) -> bool:
        """States whether the first of the steps on elements has a name."""
        return bool(self.rest) and self.rest[0].name == name


def make_plan(
    source: Source, stages: Sequence[Stage], settings: Settings
) -> PipelinePlan:
    """Returns the plan of stages that were asked for in any order."""
    check_pairs(stages)
    workers.check_order(source, stages)
    placed = in_order(source, stages, settings)
    passed = {one.stage.name: one.passed for one in placed if one.passed}
    rest = [one.stage for one in placed]
    if rest and rest[0].name == "on_error":
        calls = any(map(_calls_with_care, rest))
        if not (calls or source.skips_errors):
            raise ValueError(
                "`.on_error('skip')` has nothing to act on: this source reads what is "
                "in memory or raises its own errors, and there is no `.map` or "
                "`.decode`; expected one of them. Leave `.on_error` out."
            )
        on_error: Any = rest.pop(0)
        on_error = dataclasses.replace(on_error, is_last=not calls)
        settings = dataclasses.replace(settings, errors=on_error)
    plan = PipelinePlan(source, settings, tuple(rest), passed)
    for rule in RULES:
        plan = rule(plan)
    return plan


def _even_parts(plan: PipelinePlan) -> PipelinePlan:
    """Where batches drop a remainder, workers get parts of one size.

    One would else have a batch more than another.
    """
    batch: Any = next((o for o in plan.rest if has_role(o, Role.BATCHES)), None)
    if batch is None or not batch.drop_remainder:
        return plan
    parts: Any = [one for one in plan.rest if isinstance(one, Shard) and one.cluster]
    if batch.name == "bucket" and any(one.num_shards > 1 for one in parts):
        raise ValueError(
            "`.bucket(drop_remainder=True)` came with `.shard('auto')` for several "
            "workers; expected the remainder to be kept, as equal parts fill unequal "
            "numbers of buckets, and a worker with fewer batches stops all. Leave "
            "`drop_remainder` out."
        )
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
    cuts = [step for step in plan.head if has_role(step, Role.CUTS)]
    rest = [step for step in plan.rest if step not in cuts]
    for stage in cuts:
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
    left = [step for step in plan.head if not isinstance(step, Step)]
    names = {step.name for step in left}
    if not isinstance(source, RandomAccess) or "cache" in names:
        return plan
    samplers: list[Any] = [step for step in left if has_role(step, Role.DRAWS)]
    judges = [one for one in left if one.name == "filter" and not one.stays_behind]  # type: ignore[attr-defined]
    drawn = samplers if not judges else []
    found: list[Any] = [
        dataclasses.replace(sampler, source=source) for sampler in drawn
    ]
    shuffle: Any = next((step for step in left if step.name == "shuffle"), None)
    # Elements that a sampler draws on the stream are shuffled behind it.
    is_free = shuffle is not None and samplers == drawn
    if is_free and (drawn or shuffle.is_too_large(source)):
        found.append(_shuffled_positions(shuffle, source.num_examples, bool(drawn)))
        drawn = [*drawn, shuffle]
    if not found:
        return plan
    rest = [step for step in plan.rest if not any(step is one for one in drawn)]
    # A batch of positions is read at once.
    split = 1 if rest and rest[0].name == "batch" else 0
    following = [step for step in rest if not isinstance(step, Step)][:1]
    numbered = plan.settings.errors is not None and any(
        map(_calls_with_care, following)
    )
    what = "batch" if split else "element"
    rest.insert(split, gather_step(source, plan.settings, what, is_numbered=numbered))
    return dataclasses.replace(
        plan, first=(*plan.first, *found), rest=tuple(rest), reads="positions"
    )


def _shuffled_positions(shuffle: Any, num_examples: int, are_drawn: bool) -> Any:
    """Returns a shuffle as it acts on positions, which a sampler has drawn, or all."""
    size = shuffle.buffer_size or num_examples
    if size < num_examples or num_examples <= MAX_BUFFERED_POSITIONS:
        return dataclasses.replace(shuffle, buffer_size=size)
    if are_drawn:  # in random order already
        return dataclasses.replace(shuffle, buffer_size=MAX_BUFFERED_POSITIONS)
    return Permutation(num_examples, shuffle.seed)


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

    It acts on numbered elements, so that those it skips can be named. Calls behind a
    filter or a cache make a step of their own.
    """
    on_error = plan.settings.errors
    if on_error is None:
        return plan
    done: list[Stage] = []
    careful: list[int] = []  # their places
    for is_called, run in itertools.groupby(plan.rest, _calls_with_care):
        calls: list[Any] = list(run)
        if not is_called:
            done += calls
            continue
        locate = plan.source.locate
        if all(map(_keeps_positions, done)):
            if not any(step.name == "gather" for step in done):
                done.insert(0, _numbers())
        else:
            done.append(_numbers())
            locate = functools.partial(_place_behind, calls[0].name)
        careful.append(len(done))
        functions = tuple(step.function for step in calls)
        names = tuple(step.name for step in calls)
        done.append(Careful(functions, names, locate, on_error))
    for at in careful:
        ends = {"is_first": at == careful[0], "is_last": at == careful[-1]}
        done[at] = dataclasses.replace(done[at], **ends)
    done.insert(careful[-1] + 1 if careful else 0, on_error)
    return dataclasses.replace(plan, rest=tuple(done))


def _calls_with_care(step: Stage) -> bool:
    """States whether a step calls a function on single elements, which may fail."""
    return has_role(step, Role.CALLS) and not acts_on_batches(step)


def _keeps_positions(step: Stage) -> bool:
    """States whether elements behind a step can be told by their place in a source."""
    return isinstance(step, Step) and (step.act is None or step.name == "gather")


def _numbers() -> Step:
    reason = "so that a skipped element can be named"
    return Step("number", "positions", reason, act=tf.data.Dataset.enumerate)


def _place_behind(name: str, position: int) -> str:
    return f"element {position} of those that reach `.{name}`"


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
        if isinstance(step, Cache) and step.path is not None:
            cache = step.in_files(plan.source, (*plan.first, *plan.rest[:at]))
            rest = (*plan.rest[:at], cache, *plan.rest[at + 1 :])
            return dataclasses.replace(plan, rest=rest)
    return plan


# The exceptions, in the order in which they are looked at.
RULES = (
    _even_parts,
    _cut_source,
    _leave_out_memory_cache,
    _draw_positions,
    _batch_chunks,
    _skip_errors,
    _count_epochs,
    _cache_in_files,
)


class Build:
    """Copies of a pipeline's stages with counts of their own, for one dataset.

    A pipeline keeps its builds for these counts. So a build holds neither the plan nor
    the dataset, which may hold a copy of a part of the data.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stage.for_build() for stage in stages)
        pairs = zip(self.stages, stages, strict=True)
        self.counts = any(own is not given for own, given in pairs)

    def dataset(self, source: Source, autotune: Autotune) -> tf.data.Dataset:
        """Returns the dataset, after every step's own checks."""
        plan = make_plan(source, self.stages, settings_of(autotune))
        policy = workers.shard_policy(plan.source, plan.steps)
        for stage in self.stages:
            if isinstance(stage, Shard):
                stage.check_workers(workers.num_workers())
        dataset = plan.start()
        for step in plan.steps:
            step.check(dataset)
            dataset = step.apply(dataset, plan.settings)
        if workers.num_workers() > 1 and any(
            step.name == "shard" for step in plan.steps
        ):
            # A part of one of n workers has an n-th of the batches. tf.distribute cuts
            # these into n, so there are n times as many steps; `fit` would stop after
            # the length, which is therefore made unknown.
            dataset = of_unknown_length(dataset)
        options = tf.data.Options()
        options.deterministic = True
        options.autotune.enabled = plan.settings.autotune
        if not plan.settings.autotune:
            options.threading.private_threadpool_size = plan.settings.num_threads
        options.experimental_distribute.auto_shard_policy = policy
        return dataset.with_options(options)


def counted(stages: Sequence[Stage], builds: Sequence[Build]) -> list[Stage]:
    """Returns stages with what all builds of them have counted."""
    return [
        stage.with_counts_of([build.stages[number] for build in builds])
        for number, stage in enumerate(stages)
    ]


def describe(
    source: Source,
    stages: Sequence[Stage],
    builds: Sequence[Build],
    autotune: Autotune,
) -> str:
    """Returns a table: stage, setting and reason in running order."""
    plan = make_plan(source, counted(stages, builds), settings_of(autotune))
    rows = [("source", *plan.source.explain(plan.source.dataset(plan.settings)))]
    dataset = plan.start()
    for step in plan.steps:
        setting, reason = step.explain(dataset, plan.settings)
        passed = [f"`.{name}`" for name in plan.passed.get(step.name, ())]
        if passed:
            reason += f"; ahead of {', '.join(passed)}, though written behind"
        rows.append((step.name, setting, reason))
        dataset = step.preview(dataset, plan.settings)
    if plan.settings.autotune:
        threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
    else:
        off = "autotune=False" if autotune is False else "autotune could stall"
        threads = (str(plan.settings.num_threads), f"one for each core; {off}")
    table = console.table(
        {"Stage": console.WHOLE, "Setting": {"max_width": 40}, "Reason": {}},
        [*rows, ("threads", *threads)],
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    lines = console.text_of(table).splitlines()
    return "\n".join(line for line in lines if line)
