"""Puts a pipeline's stages in the order they run in.

`make_plan` is where every choice of order is made; `_running.py` builds and explains
what comes out of it, from the same list of steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data._elements import bytes_of_element, known_length
from tfamp.data._errors import Careful, OnError
from tfamp.data._fingerprint import Fingerprint, fingerprint
from tfamp.data._sources import ArraySource, DatasetSource, Gather, RandomAccess, Source
from tfamp.data._stages import (
    SHUFFLE_BUFFER_BYTES,
    Batch,
    ElementMap,
    Settings,
    Shuffle,
    Stage,
)
from tfamp.data._steps import (
    AlreadyInMemory,
    ByPosition,
    Chosen,
    Number,
    NumberedSubset,
    Rebatch,
)
from tfamp.data.augmentation.stage import Augmentation
from tfamp.data.cache.stage import Cache, FileCache
from tfamp.data.images.decode import with_whole_batches


@dataclasses.dataclass(frozen=True)
class Plan:
    """A source and its steps in running order.

    Attributes:
        source: Where the elements come from.
        steps: What happens to them, first to last.
        start: Gives the dataset that the first step acts on: elements, their
            positions, or chunks of them.
        settings: How parallel it runs.
    """

    source: Source
    steps: tuple[Stage, ...]
    start: Callable[[], tf.data.Dataset]
    settings: Settings


def make_plan(source: Source, stages: Sequence[Stage], settings: Settings) -> Plan:
    """Returns the plan of a pipeline.

    Stages run by rank, with five exceptions, each for speed or exactness:

    - Where any element can be read by its position, choosing (subset, balance,
      weights) and shuffling act on positions, before anything is read: exact at any
      size. A cache would freeze the order, so behind one they act on elements.
    - A memory cache of bare arrays is left out; they are in memory.
    - Rows of a table that nothing looks at one by one go from chunks to batches.
    - Images that OpenCV decodes and that are batched next are decoded by the batch.
    - Where damaged elements are skipped, all functions before the filters become one
      careful step on numbered elements.

    Args:
        source: Where the elements come from.
        stages: What is to happen to them, in any order.
        settings: How parallel it is to run.
    """
    rest = sorted(stages, key=lambda stage: stage.rank)
    _check_pairs(rest)
    on_error = _take(rest, OnError)
    _check_on_error(on_error, source, rest)
    if on_error is not None:
        is_last = not any(isinstance(stage, ElementMap) for stage in rest)
        on_error = dataclasses.replace(on_error, is_last=is_last)
    settings = dataclasses.replace(settings, errors=on_error)
    first: list[Stage] = []
    start: Callable[[], tf.data.Dataset]
    start = functools.partial(source.dataset, settings)
    if isinstance(source, RandomAccess):
        source = _choose(source, rest, first)
        start = functools.partial(source.dataset, settings)
        _leave_out_memory_cache(source, rest)
        by_position = _by_position(source, rest)
        if by_position:
            first += by_position
            start = source.positions
            split = 1 if rest and isinstance(rest[0], Batch) else 0
            gather = Gather(source, is_numbered=on_error is not None)
            rest[split:split] = [gather]
    elif hasattr(source, "chunks") and rest and isinstance(rest[0], Batch):
        start = functools.partial(source.chunks, settings)
        num_rows = known_length(source.dataset(settings))
        rest[0] = Rebatch(rest[0].size, rest[0].drop_remainder, num_rows)
    if on_error is not None:
        rest = _with_care(source, rest, on_error)
    else:
        rest = with_whole_batches(rest)
    rest = _with_epochs(rest)
    steps = [*first, *rest]
    for number, step in enumerate(steps):
        if isinstance(step, Cache) and step.path is not None:
            before = tuple(steps[:number])
            # Asked for several times while a plan runs, of values that do not change.
            found = functools.cache(functools.partial(_fingerprint, source, before))
            is_endless = _is_endless(source, before)
            steps[number] = FileCache(step.path, found, step.unseen, is_endless)
    return Plan(source, tuple(steps), start, settings)


def _choose(
    source: RandomAccess, rest: list[Stage], first: list[Stage]
) -> RandomAccess:
    """Returns the part of a source that `.subset` and `.shard` leave, and notes both.

    A subset comes first: it is the same on all workers, and each takes its share.
    """
    for stage in [stage for stage in rest if stage.name in ("subset", "shard")]:
        rest.remove(stage)
        first.append(Chosen(stage, source.num_examples))
        source = source.part(stage.chosen(source))  # type: ignore[attr-defined]
    return source


def _leave_out_memory_cache(source: RandomAccess, rest: list[Stage]) -> None:
    """Puts a mark in the place of a cache that would hold arrays a second time."""
    if isinstance(source, ArraySource) and rest:
        stage = rest[0]
        if isinstance(stage, Cache) and stage.path is None:
            rest[0] = AlreadyInMemory()


def _by_position(source: RandomAccess, rest: list[Stage]) -> list[Stage]:
    """Takes out of `rest` and returns what can act on positions."""
    names = {stage.name for stage in rest if not isinstance(stage, AlreadyInMemory)}
    if "cache" in names:
        return []
    found: list[Stage] = []
    for stage in list(rest):
        if stage.name in ("balance", "weights") and "filter" not in names:
            found.append(ByPosition(stage, source))
            rest.remove(stage)
    shuffle = next((stage for stage in rest if isinstance(stage, Shuffle)), None)
    is_sampled = names & {"balance", "weights"}
    if shuffle is None or (is_sampled and not found):
        return found
    if found or _is_too_large_to_buffer(source, shuffle):
        rest.remove(shuffle)
        size = shuffle.buffer_size or source.num_examples
        found.append(dataclasses.replace(shuffle, buffer_size=size))
    return found


def _with_care(source: Source, rest: list[Stage], on_error: OnError) -> list[Stage]:
    """Returns the steps with one careful step for all that may fail."""
    maps = [step for step in rest if isinstance(step, ElementMap)]
    if not maps:
        return [on_error, *rest]
    careful = Careful(
        tuple(step.function for step in maps),
        tuple(step.name for step in maps),
        source.locate,
        on_error,
    )
    at = rest.index(maps[0])
    kept = [step for step in rest if step not in maps]
    before = [
        NumberedSubset(step) if step.name == "subset" else step for step in kept[:at]
    ]
    if not any(isinstance(step, Gather) for step in before):
        before.insert(0, Number())
    return [*before, careful, on_error, *kept[at:]]


def _with_epochs(rest: list[Stage]) -> list[Stage]:
    """Returns the steps; where one acts by epochs, the last one counts them."""
    for number, step in enumerate(rest):
        if isinstance(step, Augmentation) and step.max_strength > 0:
            stage, count = step.with_epochs()
            return [*rest[:number], stage, *rest[number + 1 :], count]
    return rest


def _is_endless(source: Source, steps: Sequence[Stage]) -> bool:
    """Whether a source without end comes through steps, of which a filter hides it."""
    if not isinstance(source, DatasetSource):
        return False
    length = int(source.given.cardinality())
    is_cut = any(step.name == "subset" for step in steps)
    return length == tf.data.INFINITE_CARDINALITY and not is_cut


def _fingerprint(source: Source, steps: Sequence[Stage]) -> Fingerprint:
    """Returns the fingerprint of a source and the steps before a cache."""
    parts: dict[str, Any] = {"source": (type(source).__name__, source.identity())}
    for step in steps:
        if isinstance(step, OnError):
            continue  # what is skipped is told by the careful step
        same = sum(name.split(" ")[0] == step.name for name in parts)
        parts[f"{step.name} {same + 1}" if same else step.name] = step
    return fingerprint(parts)


def _take(stages: list[Stage], kind: type[Any]) -> Any:
    """Takes the stage of a kind out of a list and returns it, None if there is none."""
    found = next((stage for stage in stages if isinstance(stage, kind)), None)
    if found is not None:
        stages.remove(found)
    return found


def _check_on_error(
    on_error: OnError | None, source: Source, stages: Sequence[Stage]
) -> None:
    """Raises where `.on_error` has nothing that it could act on."""
    if on_error is None or source.skips_errors:
        return
    if not any(isinstance(stage, ElementMap) for stage in stages):
        raise ValueError(
            "`.on_error('skip')` has nothing to act on: this source reads what is in "
            "memory or raises its own errors, and there is no `.map` or `.decode`; "
            "expected one of them. Leave `.on_error` out."
        )


def _check_pairs(stages: Sequence[Stage]) -> None:
    """Raises where two stages do the same thing in two ways."""
    names = {stage.name for stage in stages}
    if {"balance", "weights"} <= names:
        raise ValueError(
            "`.balance` and `.weights` came together; expected one of them, since each "
            "draws an epoch of its own. For both, pass `.weights` the weight of the "
            "example over the number of its class."
        )
    if {"batch", "bucket"} <= names:
        raise ValueError(
            "`.batch` and `.bucket` came together; expected one of them. `.bucket` "
            "makes batches: leave `.batch` out."
        )


def _is_too_large_to_buffer(source: RandomAccess, shuffle: Shuffle) -> bool:
    """Whether a buffer of elements, which may copy them, would take much memory."""
    dataset = tf.data.Dataset.from_tensor_slices(source.tensors)
    element_bytes = bytes_of_element(dataset.element_spec)
    held = shuffle.buffer_size or source.num_examples
    return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES
