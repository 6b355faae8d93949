"""Puts a pipeline's stages in the order they run in, builds and explains them.

What `describe` prints and what `build` runs come from the same list of steps.
"""

import dataclasses
import io
from collections.abc import Sequence

import rich.box
import rich.console
import rich.table
import tensorflow as tf

from tfamp.data._arrays import ArraySource, Gather
from tfamp.data._elements import bytes_of_element
from tfamp.data._sources import Source
from tfamp.data._stages import (
    SHUFFLE_BUFFER_BYTES,
    Batch,
    Cache,
    Map,
    Settings,
    Shuffle,
    Stage,
)

_TABLE_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Plan:
    """A source and its steps in running order.

    Attributes:
        source: Where the elements come from.
        steps: What happens to them, first to last.
        by_position: Whether the steps begin with positions instead of elements.
        settings: How parallel it runs.
    """

    source: Source
    steps: tuple[Stage, ...]
    by_position: bool
    settings: Settings

    def start(self) -> tf.data.Dataset:
        """Returns the dataset that the first step acts on."""
        if self.by_position:
            return self.source.positions()  # type: ignore[attr-defined]
        return self.source.dataset(self.settings)


def make_plan(source: Source, stages: Sequence[Stage], settings: Settings) -> Plan:
    """Returns the plan of a pipeline.

    Stages run by rank: map, cache, shuffle, batch, prefetch. Arrays that are too
    large to hold twice are shuffled by position first, which is exact at any size;
    a cache behind a shuffle would freeze its order, so then they are not.
    """
    ordered = sorted(stages, key=lambda stage: stage.rank)
    if not isinstance(source, ArraySource):
        return Plan(source, tuple(ordered), False, settings)
    kinds = {type(stage): stage for stage in ordered}
    cache, shuffle = kinds.get(Cache), kinds.get(Shuffle)
    if isinstance(cache, Cache) and cache.path is None and Map not in kinds:
        ordered[ordered.index(cache)] = AlreadyInMemory()
        cache = None
    if not isinstance(shuffle, Shuffle) or cache is not None:
        return Plan(source, tuple(ordered), False, settings)
    if not _is_too_large_to_buffer(source, shuffle):
        return Plan(source, tuple(ordered), False, settings)
    rest = [stage for stage in ordered if stage is not shuffle]
    exact = dataclasses.replace(
        shuffle, buffer_size=shuffle.buffer_size or source.num_examples
    )
    # With nothing to do for single elements, one gather reads a whole batch.
    split = (
        0
        if Map in kinds
        else 1
        + next((i for i, stage in enumerate(rest) if isinstance(stage, Batch)), -1)
    )
    steps = (exact, *rest[:split], Gather(source), *rest[split:])
    return Plan(source, steps, True, settings)


def run(plan: Plan) -> tf.data.Dataset:
    """Returns the dataset of a plan, after every step's own checks."""
    dataset = plan.start()
    for step in plan.steps:
        step.check(dataset)
        dataset = step.apply(dataset, plan.settings)
    return dataset.with_options(_options(plan))


def describe(plan: Plan, threads: tuple[str, str]) -> str:
    """Returns a table of a plan: stage, setting and reason in running order.

    Args:
        plan: What to describe.
        threads: Setting and reason of its last row, the parallelism.
    """
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Stage", no_wrap=True)
    table.add_column("Setting", max_width=40)
    table.add_column("Reason")
    dataset = plan.source.dataset(plan.settings)
    table.add_row("source", *plan.source.explain(dataset))
    dataset = plan.start()
    for step in plan.steps:
        table.add_row(step.name, *step.explain(dataset, plan.settings))
        dataset = step.apply(dataset, plan.settings)
    table.add_row("threads", *threads)
    console = rich.console.Console(
        file=io.StringIO(), width=_TABLE_WIDTH, color_system=None, legacy_windows=False
    )
    console.print(table)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines if line.strip())


@dataclasses.dataclass(frozen=True)
class AlreadyInMemory(Stage):
    """Stands for a memory cache of arrays, which would hold them a second time."""

    name = Cache.name
    rank = Cache.rank

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset as it is."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        return "left out", "the arrays are in memory already"


def _is_too_large_to_buffer(source: ArraySource, shuffle: Shuffle) -> bool:
    """Whether a buffer of elements, which may copy them, would take much memory."""
    dataset = tf.data.Dataset.from_tensor_slices(source.tensors)
    element_bytes = bytes_of_element(dataset.element_spec)
    held = shuffle.buffer_size or source.num_examples
    return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES


def _options(plan: Plan) -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = plan.settings.autotune
    if not plan.settings.autotune:
        options.threading.private_threadpool_size = plan.settings.num_threads
    if plan.source.shard_policy is not None:
        options.experimental_distribute.auto_shard_policy = plan.source.shard_policy
    return options
