"""The order in which a pipeline's stages run, and what becomes of them on the way.

`stages.ORDER` is the right order. A `.map` and a `.filter` stay where they are written
behind batches, as they get these; a map behind an augmentation; behind one another; and
behind anything where they draw at random, keep a state or read files, since a cache
would freeze that. No stage passes a `.take` or a `.repeat`. `RULES` are the exceptions
for speed or exactness, each a function of its own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import rich.box
import tensorflow as tf

from tfamp.data._elements import as_arguments
from tfamp.data.sources import ArraySource, RandomAccess, Source
from tfamp.data.sources._files import ChunkedSource
from tfamp.data.stages import (
    ORDER,
    Autotune,
    Settings,
    Stage,
    Step,
    has_role,
    map_in_order,
    settings_of,
    workers,
)
from tfamp.data.stages.augment import Augmentation
from tfamp.data.stages.cache import Cache
from tfamp.data.stages.dropped import Careful, OnError
from tfamp.data.stages.workers import Shard
from tfamp.records import console

_PLACES = {name: place for place, name in enumerate(ORDER)}
_FUNCTIONS, _BATCHES = ("map", "filter"), ("batch", "bucket")
_SETTINGS = ("on_error", "prefetch")
_READERS = ("ReadFile", "MatchingFiles")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A source and its steps in running order."""

    source: Source
    settings: Settings
    rest: tuple[Stage, ...]  # on elements, or on chunks of them
    passed: Mapping[str, tuple[str, ...]]  # written before a stage and run after it
    first: tuple[Stage, ...] = ()  # on the source as a whole, or positions in it
    reads: Literal["elements", "positions", "chunks"] = "elements"

    @property
    def steps(self) -> tuple[Stage, ...]:
        """All steps, first to last."""
        return (*self.first, *self.rest)

    @property
    def head(self) -> list[Any]:
        """The steps on elements ahead of a `.take` or `.repeat`, if there is one."""
        is_free = lambda step: not has_role(step, "parts")  # noqa: E731
        return list(itertools.takewhile(is_free, self.rest))

    def replace(self, old: Stage, *new: Stage) -> "Plan":
        """Returns the plan with steps in the place of one."""
        at = next(at for at, step in enumerate(self.rest) if step is old)
        rest = (*self.rest[:at], *new, *self.rest[at + 1 :])
        return dataclasses.replace(self, rest=rest)


def make_plan(source: Source, stages: Sequence[Stage], settings: Settings) -> Plan:
    """Returns the plan of stages that were asked for in any order."""
    for role in ("draws", "batches"):
        names = sorted(f"`.{stage.name}`" for stage in stages if has_role(stage, role))
        if len(names) > 1:
            raise ValueError(
                f"{' and '.join(names)} came together; expected one. Leave one out."
            )
    workers.check_order(source, stages)
    rest, passed = in_order(source, stages, settings)
    if rest and rest[0].name == "on_error":
        if not (source.skips_errors or any(map(_calls_with_care, rest))):
            raise ValueError(
                "`.on_error('skip')` has nothing to act on; expected text, CSV or "
                "TFRecord files, a `.map` or a `.decode`. Leave `.on_error` out."
            )
        settings = dataclasses.replace(settings, errors=rest.pop(0))
    plan = Plan(source, settings, tuple(rest), passed)
    for rule in RULES:
        plan = rule(plan)
    return plan


def in_order(
    source: Source, stages: Sequence[Any], settings: Settings
) -> tuple[list[Stage], dict[str, tuple[str, ...]]]:
    """Returns stages as they run, and by name those each one passes on the way."""
    keys, placed = [], []
    floor = 0  # functions do not pass one another
    part, begin = 0, 0  # between those that nothing passes
    for number, stage in enumerate(stages):
        place, earlier = _PLACES[stage.name], stages[begin:number]
        if has_role(stage, "parts"):
            part, begin, floor = part + 2, number + 1, 0
        elif stage.name in _FUNCTIONS:
            ahead = [one.name for one in earlier if _PLACES[one.name] > place]
            held = [name for name in ahead if name in _held_behind(stage)]
            loose = [one for one in ahead if one not in (*_FUNCTIONS, *_SETTINGS)]
            is_cached = any(one.name == "cache" for one in stages[number:])
            if loose and not (held or is_cached):
                if _is_of_the_moment(source, stage, stages[:number], settings):
                    held = loose
            floor = max([place, floor, *(_PLACES[name] for name in held)])
            behind = list(ORDER)[floor] if floor > place else ""
            joined = [one.name for one in stages[:begin] if has_role(one, "batches")]
            if joined and not held and set(joined) & {*_held_behind(stage)}:
                behind = behind or joined[0]
            if behind:
                stage = dataclasses.replace(stage, stays_behind=behind)
            place = floor
        own = part - has_role(stage, "parts")
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
    if stage.name == "map":
        return (*_BATCHES, "augment")
    # Rules on values act on examples, wherever they are written. A filter rarely asks
    # for what an augmentation changes, and samplers ahead of that want it done.
    return _BATCHES if stage.predicate is not None else ()


def _is_of_the_moment(
    source: Source, stage: Any, earlier: Sequence[Stage], settings: Settings
) -> bool:
    """Whether a function draws, keeps a state, reads files or runs Python."""
    dataset = source.dataset(settings)
    changing = [one for one in earlier if one.name in ("decode", *_FUNCTIONS)]
    for one in sorted(changing, key=lambda one: one.name != "decode"):
        dataset = one.apply(dataset, settings)
    function = stage.function if stage.name == "map" else stage.predicate

    def call(*parts: Any) -> Any:
        return function(*parts)

    try:
        given = as_arguments(dataset.element_spec)
        traced = tf.function(call).get_concrete_function(*given)
    except Exception:  # the user's code; the dataset raises it again, in its place
        return function is not None
    operations = traced.graph.get_operations()
    return any(one.op_def.is_stateful or one.type in _READERS for one in operations)


def _even_parts(plan: Plan) -> Plan:
    """Where batches drop a remainder, workers get parts of one size."""
    batch: Any = next((one for one in plan.rest if has_role(one, "batches")), None)
    parts = [one for one in plan.rest if isinstance(one, Shard) and one.cluster]
    if batch is None or not batch.drop_remainder or not parts:
        return plan
    if batch.name == "bucket" and parts[0].num_shards > 1:
        raise ValueError(
            "`.bucket(drop_remainder=True)` came with `.shard('auto')` for several "
            "workers, of which one with fewer batches stops all; expected the "
            "remainder to be kept. Leave `drop_remainder` out."
        )
    return plan.replace(parts[0], dataclasses.replace(parts[0], is_even=True))


def _cut_positions(plan: Plan) -> Plan:
    """Where any element can be read by its position, a part is cut before all."""
    source = plan.source
    if not isinstance(source, RandomAccess):
        return plan
    first: list[Stage] = []
    for stage in plan.head:
        if not has_role(stage, "cuts"):
            continue
        reason = f"{stage.reason}; of {source.num_examples:,}, before any is read"
        first.append(Step(stage.name, stage.setting, reason, of=stage))
        plan = plan.replace(stage)
        if getattr(stage, "num_shards", 0) != 1:  # all of it would be a copy
            source = source.part(stage.chosen(source, plan.settings))
    begin: Any = plan.head[0] if plan.head else None
    if isinstance(source, ArraySource) and isinstance(begin, Cache) and not begin.path:
        told = "the arrays are in memory already"
        plan = plan.replace(begin, Step("cache", "left out", told))
    return dataclasses.replace(plan, source=source, first=tuple(first))


def _draw_positions(plan: Plan) -> Plan:
    """Samplers and large shuffles of such a source act on positions: exact at any size.

    But a filter must have judged the elements that are balanced, and a cache would
    freeze the order: behind these they act on elements.
    """
    source: Any = plan.source
    left = [step for step in plan.head if not isinstance(step, Step)]
    samplers = [step for step in left if has_role(step, "draws")]
    is_judged = any(step.name == "filter" and not step.stays_behind for step in left)
    is_cached = any(step.name == "cache" for step in left)
    if not isinstance(source, RandomAccess) or is_cached or (samplers and is_judged):
        return plan
    found = [dataclasses.replace(sampler, source=source) for sampler in samplers]
    shuffle: Any = next((step for step in left if step.name == "shuffle"), None)
    moved = [*samplers]
    if shuffle is not None and samplers:
        told = "what is drawn comes in random order already"
        moved, found = [*moved, shuffle], [*found, Step("shuffle", "left out", told)]
    elif shuffle is not None and shuffle.is_too_large(source):
        order = dataclasses.replace(shuffle, by_position=not shuffle.buffer_size)
        moved, found = [shuffle], [order]
    if not found:
        return plan
    rest = [step for step in plan.rest if not any(step is one for one in moved)]
    split = 1 if rest and rest[0].name == "batch" else 0
    following = [step for step in rest if not isinstance(step, Step)][:1]
    numbers = plan.settings.errors is not None and any(map(_calls_with_care, following))

    def read(position: tf.Tensor) -> Any:
        rows = source.rows(position)
        return (position, rows) if numbers else rows

    reason = "order drawn on positions, then read: exact at any size"
    act = functools.partial(map_in_order, function=read, settings=plan.settings)
    setting = f"one {'batch' if split else 'element'} a call"
    gather = Step("gather", setting, reason, act=act)
    rest.insert(split, gather)
    first = (*plan.first, *found)
    return dataclasses.replace(plan, rest=tuple(rest), first=first, reads="positions")


def _batch_chunks(plan: Plan) -> Plan:
    """Rows of a table that nothing looks at one by one go from chunks to batches."""
    batch: Any = plan.rest[0] if plan.rest else None
    is_chunked = isinstance(plan.source, ChunkedSource) and plan.settings.errors is None
    if not is_chunked or batch is None or batch.name != "batch":
        return plan
    num_rows = getattr(plan.source, "num_examples", None)
    batch = dataclasses.replace(batch, num_rows=-1 if num_rows is None else num_rows)
    return dataclasses.replace(plan.replace(plan.rest[0], batch), reads="chunks")


def _skip_errors(plan: Plan) -> Plan:
    """Where damaged elements are skipped, one careful step makes all calls."""
    on_error = plan.settings.errors
    if on_error is None:
        return plan
    reason = "so that a skipped element can be named"
    numbers = Step("number", "positions", reason, act=tf.data.Dataset.enumerate)
    done: list[Any] = []
    last = 0  # the place behind the last careful step
    for is_called, run in itertools.groupby(plan.rest, _calls_with_care):
        calls: list[Any] = list(run)
        if not is_called:
            done += calls
            continue
        locate = plan.source.locate
        is_gathered = any(step.name == "gather" for step in done)
        if all(isinstance(s, Step) and (s.act is None or is_gathered) for s in done):
            done = done if is_gathered else [numbers, *done]
        else:
            done.append(numbers)
            text = f"element {{}} of those that reach `.{calls[0].name}`"
            locate = text.format
        functions = tuple(step.function for step in calls)
        names = tuple(step.name for step in calls)
        done.append(Careful(functions, names, locate, on_error))
        last = len(done)
    done.insert(last, on_error)
    return dataclasses.replace(plan, rest=tuple(done))


def _calls_with_care(step: Stage) -> bool:
    """States whether a step calls a function on single elements, which may fail."""
    return has_role(step, "calls") and not step.acts_on_batches


def _bind(plan: Plan) -> Plan:
    """What counts belongs to a build, and a cache in files knows what is before it."""
    for at, step in enumerate(plan.rest):
        if isinstance(step, Augmentation) and (counted := step.with_epochs()):
            plan = plan.replace(step, counted[0])
            plan = dataclasses.replace(plan, rest=(*plan.rest, counted[1]))
        elif isinstance(step, Cache) and step.path is not None:
            before = (*plan.first, *plan.rest[:at])
            cache = step.in_files(plan.source, before, plan.settings)
            plan = plan.replace(step, cache)
    return plan


_ON_SOURCES = (_even_parts, _cut_positions, _draw_positions, _batch_chunks)
RULES = (*_ON_SOURCES, _skip_errors, _bind)


def build(
    source: Source, stages: Sequence[Stage], autotune: Autotune
) -> tf.data.Dataset:
    """Returns the dataset, after every step's own checks."""
    num_workers = workers.num_workers()
    for stage in stages:
        if isinstance(stage, OnError):
            source = source.without_damage(stage)
        if isinstance(stage, Shard):
            stage.check_workers(num_workers)
    plan = make_plan(source, stages, settings_of(autotune))
    policy = workers.shard_policy(plan.source, plan.steps)
    begin: Any = plan.source
    if plan.reads == "positions":
        dataset = tf.data.Dataset.range(begin.num_examples)
    else:
        read = begin.chunks if plan.reads == "chunks" else begin.dataset
        dataset = read(plan.settings)
    for step in plan.steps:
        dataset = step.apply(dataset, plan.settings)
    if num_workers > 1 and any(step.name == "shard" for step in plan.steps):
        # A part of one of n workers has an n-th of the batches. tf.distribute cuts
        # these into n, so there are n times as many steps; `fit` would stop after
        # the length, which is therefore made unknown.
        dataset = dataset.filter(lambda *parts: True)
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = plan.settings.autotune
    if not plan.settings.autotune:
        options.threading.private_threadpool_size = plan.settings.num_threads
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def describe(source: Source, stages: Sequence[Stage], autotune: Autotune) -> str:
    """Returns a table: stage, setting and reason in running order."""
    plan = make_plan(source, stages, settings_of(autotune))
    rows = [("source", *plan.source.explain())]
    for step in plan.steps:
        passed = [f"`.{name}`" for name in plan.passed.get(step.name, ())]
        ahead = f"; ahead of {', '.join(passed)}, though written behind"
        reason = step.reason + (ahead if passed else "")
        rows.append((step.name, step.setting, reason))
    threads = (str(plan.settings.num_threads), "one for each core; autotune is off")
    if plan.settings.autotune:
        threads = ("tf.data chooses", "autotune=True: may stall an epoch's end")
    table = console.table(
        {"Stage": console.WHOLE, "Setting": {"max_width": 40}, "Reason": {}},
        [*rows, ("threads", *threads)],
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
    )
    return "\n".join(filter(None, console.text_of(table).splitlines()))
