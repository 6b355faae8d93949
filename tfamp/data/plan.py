"""The order in which a pipeline's stages run, and what becomes of them on the way.

`stages.ORDER` is the right order. A `.map` and a `.filter` may be written behind a
stage that `ORDER` has after them; the result can then be another one, and they stay
there: behind batches, as they get these; a map behind an augmentation; behind one
another; and behind anything where they draw at random, keep a state or read files,
since a cache would freeze that. What is written behind a `.take` or a `.repeat` runs
behind it, and what is written before runs before.

`RULES` are the exceptions for speed or exactness, each a function of its own.
`make_plan` applies both; `Build` makes the dataset of a plan, and `describe` its
description, of the same steps.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import rich.box
import tensorflow as tf

from tfamp.data._elements import as_arguments, known_length, of_unknown_length
from tfamp.data.sources import RandomAccess, Source
from tfamp.data.sources._files import ChunkedSource
from tfamp.data.sources.datasets import ArraySource
from tfamp.data.stages import (
    ORDER,
    Autotune,
    Role,
    Settings,
    Stage,
    Step,
    has_role,
    map_in_order,
    settings_of,
    workers,
)
from tfamp.data.stages.augment import Augmentation
from tfamp.data.stages.batches import Permutation, Rebatch
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.dropped import Careful
from tfamp.data.stages.workers import Shard
from tfamp.records import console

_PLACES = {name: place for place, name in enumerate(ORDER)}
_FUNCTIONS, _BATCHES = ("map", "filter"), ("batch", "bucket")
# Of no account for what the elements are.
_SETTINGS = ("on_error", "prefetch")
# Operations without a state whose result still is of the moment.
_READERS = ("ReadFile", "MatchingFiles")
# Positions in a buffer take 25 times their 8 bytes. Beyond so many, 200 MiB, their
# order is drawn as one tensor.
MAX_BUFFERED_POSITIONS = 2**20


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
        source: Any = self.source
        if self.reads == "positions":
            return tf.data.Dataset.range(source.num_examples)
        read = source.chunks if self.reads == "chunks" else source.dataset
        return read(self.settings)

    @property
    def head(self) -> list[Any]:
        """The steps on elements ahead of a `.take` or `.repeat`, if there is one."""
        is_free = lambda step: not has_role(step, Role.PARTS)  # noqa: E731
        return list(itertools.takewhile(is_free, self.rest))

    def replace(self, old: Stage, *new: Stage) -> "PipelinePlan":
        """Returns the plan with steps in the place of one."""
        at = next(at for at, step in enumerate(self.rest) if step is old)
        rest = (*self.rest[:at], *new, *self.rest[at + 1 :])
        return dataclasses.replace(self, rest=rest)


def make_plan(
    source: Source, stages: Sequence[Stage], settings: Settings
) -> PipelinePlan:
    """Returns the plan of stages that were asked for in any order."""
    _check_pairs(stages)
    workers.check_order(source, stages)
    rest, passed = in_order(source, stages, settings)
    if rest and rest[0].name == "on_error":
        calls = any(map(_calls_with_care, rest))
        if not (calls or source.skips_errors):
            raise ValueError(
                "`.on_error('skip')` has nothing to act on: this source reads what is "
                "in memory or raises its own errors, and there is no `.map` or "
                "`.decode`; expected one of them. Leave `.on_error` out."
            )
        on_error: Any = dataclasses.replace(rest.pop(0), is_last=not calls)  # type: ignore[call-arg]
        settings = dataclasses.replace(settings, errors=on_error)
    plan = PipelinePlan(source, settings, tuple(rest), passed)
    for rule in RULES:
        plan = rule(plan)
    return plan


def check_once(stage: Stage, stages: Sequence[Stage]) -> None:
    """Raises where a stage is there already that may be asked for once."""
    is_there = any(stage.name == other.name for other in stages)
    if is_there and not has_role(stage, Role.REPEATS):
        raise ValueError(
            f"`.{stage.name}` came twice; expected each stage once, since the order "
            "they run in does not follow the order of the calls. Keep the one that is "
            "meant."
        )


def _check_pairs(stages: Sequence[Stage]) -> None:
    """Raises where two stages do the same thing in two ways."""
    advice = {
        Role.DRAWS: "For both, pass `.weights` the weight of the example over the "
        "number of its class.",
        Role.BATCHES: "`.bucket` makes batches: leave `.batch` out.",
    }
    for role, what in advice.items():
        names = sorted(f"`.{stage.name}`" for stage in stages if has_role(stage, role))
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} came together; expected one of them. {what}"
            )


def in_order(
    source: Source, stages: Sequence[Any], settings: Settings
) -> tuple[list[Stage], dict[str, tuple[str, ...]]]:
    """Returns stages as they run, and by name those each one passes on the way."""
    keys, placed = [], []
    floor = 0  # functions do not pass one another
    part, begin = 0, 0  # between those that nothing passes
    for number, stage in enumerate(stages):
        place, earlier = _PLACES[stage.name], stages[begin:number]
        if has_role(stage, Role.PARTS):
            part, begin, floor = part + 2, number + 1, 0
        elif stage.name in _FUNCTIONS:
            ahead = [one.name for one in earlier if _PLACES[one.name] > place]
            held = [name for name in ahead if name in _held_behind(stage)]
            loose = [one for one in ahead if one not in (*_FUNCTIONS, *_SETTINGS)]
            # A cache that is written later is to freeze it.
            is_cached = any(one.name == "cache" for one in stages[number:])
            if loose and not (held or is_cached):
                if _is_of_the_moment(source, stage, stages[:number], settings):
                    held = loose
            floor = max([place, floor, *(_PLACES[name] for name in held)])
            behind = list(ORDER)[floor] if floor > place else ""
            joined = [one.name for one in stages[:begin] if has_role(one, Role.BATCHES)]
            if joined and not held and set(joined) & {*_held_behind(stage)}:
                behind = behind or joined[0]
            if behind:
                stage = dataclasses.replace(stage, stays_behind=behind)
            place = floor
        own = part - has_role(stage, Role.PARTS)
        if stage.name in _SETTINGS:
            own = 2 * len(stages) if stage.name == "prefetch" else 0
        keys.append((own, place, number))
        placed.append(stage)
    order = sorted(range(len(stages)), key=keys.__getitem__)
    passed = {}
    for at, number in enumerate(order):
        later = sorted(one for one in order[at + 1 :] if one < number)
        names = [stages[one].name for one in later if stages[one].name not in _SETTINGS]
        if names and placed[number].name not in _SETTINGS:
            passed[placed[number].name] = tuple(dict.fromkeys(names))
    return [placed[number] for number in order], passed


def _held_behind(stage: Any) -> tuple[str, ...]:
    """Returns the stages that a function always stays behind."""
    if stage.name == "map":
        return (*_BATCHES, "augment")
    # Rules on values act on examples, wherever they are written. A filter rarely asks
    # for what an augmentation changes, and samplers ahead of that want it done.
    return _BATCHES if stage.predicate is not None else ()


def _is_of_the_moment(
    source: Source, stage: Any, earlier: Sequence[Stage], settings: Settings
) -> bool:
    """Whether a function's result depends on more than the element it is given."""
    dataset = source.dataset(settings)
    changing = [one for one in earlier if one.name in ("decode", *_FUNCTIONS)]
    for one in sorted(changing, key=lambda one: one.name != "decode"):
        dataset = one.preview(dataset, settings)
    function = stage.function if stage.name == "map" else stage.predicate
    return function is not None and draws(function, dataset.element_spec)


def draws(function: Callable[..., Any], element_spec: Any) -> bool:
    """Whether a function draws at random, keeps a state, reads files or runs Python.

    It is traced for that; one that cannot be traced counts as one that does.

    Example:
        >>> draws(lambda x: 2 * x, tf.TensorSpec(()))
        False
        >>> draws(lambda x: x + tf.random.uniform(()), tf.TensorSpec(()))
        True
    """

    def call(*parts: Any) -> Any:
        return function(*parts)

    try:
        traced = tf.function(call).get_concrete_function(*as_arguments(element_spec))
    except Exception:  # the user's code; the dataset raises it again, in its place
        return True
    operations = traced.graph.get_operations()
    return any(one.op_def.is_stateful or one.type in _READERS for one in operations)


def _even_parts(plan: PipelinePlan) -> PipelinePlan:
    """Where batches drop a remainder, workers get parts of one size.

    One would else have a batch more than another.
    """
    batch: Any = next((one for one in plan.rest if has_role(one, Role.BATCHES)), None)
    parts = [one for one in plan.rest if isinstance(one, Shard) and one.cluster]
    if batch is None or not batch.drop_remainder or not parts:
        return plan
    if batch.name == "bucket" and parts[0].num_shards > 1:
        raise ValueError(
            "`.bucket(drop_remainder=True)` came with `.shard('auto')` for several "
            "workers; expected the remainder to be kept, as equal parts fill unequal "
            "numbers of buckets, and a worker with fewer batches stops all. Leave "
            "`drop_remainder` out."
        )
    return plan.replace(parts[0], dataclasses.replace(parts[0], is_even=True))


def _draw_positions(plan: PipelinePlan) -> PipelinePlan:
    """Where any element can be read by its position, choices are made of positions.

    A part is cut before all. Samplers and shuffles are then exact at any size. A filter
    must have judged the elements that are balanced, and a cache would freeze the order:
    behind one they act on elements. A memory cache of bare arrays is left out: it would
    hold them twice.
    """
    source = plan.source
    if not isinstance(source, RandomAccess):
        return plan
    first: list[Stage] = []
    for stage in plan.head:
        if not has_role(stage, Role.CUTS):
            continue
        every = tf.data.Dataset.range(source.num_examples)
        setting, reason = stage.explain(every, plan.settings)
        reason += f"; of {source.num_examples:,}, before any is read"
        first.append(Step(stage.name, setting, reason, of=stage))
        plan = plan.replace(stage)
        if getattr(stage, "num_shards", 0) != 1:  # all of it would be a copy
            source = source.part(stage.chosen(source, plan.settings))
    if isinstance(source, ArraySource) and [s.name for s in plan.head[:1]] == ["cache"]:
        if plan.head[0].path is None:
            told = "the arrays are in memory already"
            plan = plan.replace(plan.head[0], Step("cache", "left out", told))
    plan = dataclasses.replace(plan, source=source, first=tuple(first))
    left = [step for step in plan.head if not isinstance(step, Step)]
    if any(step.name == "cache" for step in left):
        return plan
    samplers = [step for step in left if has_role(step, Role.DRAWS)]
    is_judged = any(step.name == "filter" and not step.stays_behind for step in left)
    drawn = [] if is_judged else samplers
    found = [dataclasses.replace(sampler, source=source) for sampler in drawn]
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
    numbers = plan.settings.errors is not None and any(map(_calls_with_care, following))

    def read(position: tf.Tensor) -> Any:
        rows = source.rows(position)
        return (position, rows) if numbers else rows

    setting = f"one {'batch' if split else 'element'} a call"
    reason = "order drawn on positions, then read: exact at any size"
    act = functools.partial(map_in_order, function=read, settings=plan.settings)
    gather = Step("gather", f"{setting}, {plan.settings.parallelism}", reason, act=act)
    rest.insert(split, gather)
    first, plan = [*plan.first, *found], dataclasses.replace(plan, rest=tuple(rest))
    return dataclasses.replace(plan, first=tuple(first), reads="positions")


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
    batch: Any = plan.rest[0] if plan.rest else None
    if not isinstance(plan.source, ChunkedSource) or batch is None:
        return plan
    if batch.name != "batch":
        return plan
    num_rows = known_length(plan.source.dataset(plan.settings))
    rebatch = Rebatch(batch.size, batch.drop_remainder, num_rows)
    return dataclasses.replace(plan.replace(batch, rebatch), reads="chunks")


def _skip_errors(plan: PipelinePlan) -> PipelinePlan:
    """Where damaged elements are skipped, one careful step makes all calls.

    It acts on numbered elements, so that those it skips can be named. Calls behind a
    filter or a cache make a step of their own.
    """
    on_error = plan.settings.errors
    if on_error is None:
        return plan
    reason = "so that a skipped element can be named"
    numbers = Step("number", "positions", reason, act=tf.data.Dataset.enumerate)
    done: list[Any] = []
    careful: list[int] = []  # their places
    for is_called, run in itertools.groupby(plan.rest, _calls_with_care):
        calls: list[Any] = list(run)
        if not is_called:
            done += calls
            continue
        locate = plan.source.locate
        is_gathered = any(step.name == "gather" for step in done)
        if all(isinstance(s, Step) and (s.act is None or is_gathered) for s in done):
            # Elements can still be told by their place in the source.
            done = done if is_gathered else [numbers, *done]
        else:
            done.append(numbers)
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
    return has_role(step, Role.CALLS) and not step.acts_on_batches


def _place_behind(name: str, position: int) -> str:
    return f"element {position} of those that reach `.{name}`"


def _count_epochs(plan: PipelinePlan) -> PipelinePlan:
    """Where a stage acts by the number of the epoch, the last step counts epochs."""
    stage = next((one for one in plan.rest if isinstance(one, Augmentation)), None)
    counted = None if stage is None else stage.with_epochs()
    if stage is None or counted is None:
        return plan
    plan = plan.replace(stage, counted[0])
    return dataclasses.replace(plan, rest=(*plan.rest, counted[1]))


def _cache_in_files(plan: PipelinePlan) -> PipelinePlan:
    """A cache with a path lies in files that know what comes before it."""
    for at, step in enumerate(plan.rest):
        if isinstance(step, Cache) and step.path is not None:
            before = (*plan.first, *plan.rest[:at])
            cache = step.in_files(plan.source, before, plan.settings)
            return plan.replace(step, cache)
    return plan


# The exceptions, in the order in which they are looked at.
RULES = (
    _even_parts,
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
        num_workers = workers.num_workers()
        for stage in self.stages:
            if isinstance(stage, Shard):
                stage.check_workers(num_workers)
        dataset = plan.start()
        for step in plan.steps:
            step.check(dataset)
            dataset = step.apply(dataset, plan.settings)
        if num_workers > 1 and any(step.name == "shard" for step in plan.steps):
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
    threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
    if not plan.settings.autotune:
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
