"""Where the stages of a pipeline run: in the right order, and as written if it counts.

`stages.ORDER` is the right order. A `.map` and a `.filter` may be written behind a
stage that `ORDER` has after them; the result can then be another one, and they stay
there: behind batches, as they get these; a map behind an augmentation; behind one
another; and behind anything where they draw at random, keep a state or read files,
since a cache would freeze that.

What is written behind a `.take` or a `.repeat` runs behind it, and what is written
before runs before.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data._elements import as_arguments
from tfamp.data.sources import Source
from tfamp.data.stages import ORDER, Role, Settings, Stage, has_role

_PLACES = {name: place for place, name in enumerate(ORDER)}
_FUNCTIONS = ("map", "filter")
_BATCHES = ("batch", "bucket")
# Of no account for what the elements are.
_SETTINGS = ("on_error", "prefetch")
# Operations without a state whose result still is of the moment.
_READERS = ("ReadFile", "MatchingFiles")


@dataclasses.dataclass(frozen=True)
class Placed:
    """A stage, and the stages written before it that run after it."""

    stage: Stage
    passed: tuple[str, ...] = ()


def in_order(
    source: Source, stages: Sequence[Stage], settings: Settings
) -> list[Placed]:
    """Returns the stages in the order in which they run."""
    keys, placed = [], []
    floor = 0  # functions do not pass one another
    part, begin = 0, 0  # between those that nothing passes
    stage: Any
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
            joined = [one.name for one in stages[:begin] if has_role(one, Role.BATCHES)]
            if joined and not held and _held_behind(stage):
                stage = stage.behind(joined[0])
            floor = max([place, floor, *(_PLACES[name] for name in held)])
            if floor > place:
                stage = stage.behind(list(ORDER)[floor])
            place = floor
        is_setting = stage.name in _SETTINGS
        last = 2 * len(stages) if stage.name == "prefetch" else 0
        own = part - has_role(stage, Role.PARTS)
        keys.append((last if is_setting else own, place, number))
        placed.append(stage)
    order = sorted(range(len(stages)), key=keys.__getitem__)
    return [Placed(placed[number], _passed(number, order, stages)) for number in order]


def _held_behind(stage: Stage) -> tuple[str, ...]:
    """Returns the stages that a function always stays behind."""
    if stage.name == "map":
        return (*_BATCHES, "augment")
    # Rules on values act on examples, wherever they are written. A filter rarely asks
    # for what an augmentation changes, and samplers ahead of that want it done.
    return _BATCHES if stage.takes_batches else ()


def _passed(
    number: int, order: Sequence[int], stages: Sequence[Stage]
) -> tuple[str, ...]:
    """Returns the stages written before one that run after it."""
    later = order[order.index(number) + 1 :]
    names = [stages[one].name for one in sorted(later) if one < number]
    if stages[number].name in _SETTINGS:
        return ()
    return tuple(dict.fromkeys(name for name in names if name not in _SETTINGS))


def _is_of_the_moment(
    source: Source, stage: Any, earlier: Sequence[Stage], settings: Settings
) -> bool:
    """Whether a function's result depends on more than the element it is given."""
    dataset = source.dataset(settings)
    changing = [one for one in earlier if one.name in ("decode", *_FUNCTIONS)]
    for one in sorted(changing, key=lambda one: one.name != "decode"):
        dataset = one.preview(dataset, settings)
    return any(draws(one, dataset.element_spec) for one in stage.functions)


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
