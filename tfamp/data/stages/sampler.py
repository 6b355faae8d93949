"""Draws examples by plans: by position, or on datasets read from first to last.

By position, where any example can be read by its number, what a plan leaves out is
never read. On a stream an element comes as often as the plan says, one copy after
the other, or is dropped. Labels are read in another pass than the elements, so each
epoch is held against that pass: what no longer fits is an error.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import (
    as_arguments,
    blank,
    bytes_of_element,
    is_endless,
    with_length,
)
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, Stage
from tfamp.data.stages.draw_plans import copies_of, repeated
from tfamp.data.stages.labels import Memory, Reader, read_or_count
from tfamp.records import checks

# A function call costs about 50 us, so small elements share one by this many ...
_CHUNK = 64
# ... as long as a chunk and all copies of it stay below this.
_MAX_CHUNK_BYTES = 16 * 2**20
# The number of copies that goes with the mark behind the last element.
_END = -1


@dataclasses.dataclass(frozen=True)
class Draw:
    """The plan of an epoch: `num_outputs` positions out of `num_examples`, by a seed.

    The seed is two integers; no example comes much more often than `max_copies`.
    """

    num_examples: int
    num_outputs: int
    max_copies: int
    plan: Callable[[tf.Tensor], tf.Tensor]

    def epochs(
        self, seed: int | None, made_of: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.data.Dataset:
        """Returns the values that are made of the plan, another plan in each epoch."""
        numbers = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
        seeds = numbers.take(2).batch(2, drop_remainder=True)
        slices = tf.data.Dataset.from_tensor_slices
        return seeds.flat_map(lambda pair: slices(made_of(self.plan(pair))))


@dataclasses.dataclass(frozen=True)
class Sampler(Stage):
    """Draws anew in each epoch which examples come, and how often.

    By position where there is a source, else of the elements that come.
    """

    seed: int | None = dataclasses.field(default=None, kw_only=True)
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False, kw_only=True
    )
    source: RandomAccess | None = dataclasses.field(
        default=None, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    @property
    @abc.abstractmethod
    def reader(self) -> Reader | None:
        """What to read of each example, None for nothing."""

    @abc.abstractmethod
    def draw(self, values: Any, num_examples: int) -> Draw:
        """Returns the plan of an epoch, given what `reader` read, None for nothing."""

    @property
    def by_position(self) -> str:
        """What the way of drawing adds to a reason."""
        return "" if self.source is None else "; by position, exact"

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if the dataset never ends or has not what is read of it."""
        if self.source is None:
            check_ends(dataset, self.name)
            if self.reader is not None:
                self.reader.check(dataset)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns what an epoch takes, drawn anew in each.

        By position that are positions, shuffled; on a stream elements in the order
        they have, copies together.
        """
        data = dataset if self.source is None else self.source
        values, num_examples = self.memory.get(
            data, lambda: read_or_count(self.reader, data, settings)
        )
        draw = self.draw(values, num_examples)
        if self.source is None:
            copies = draw.epochs(self.seed, lambda plan: copies_of(plan, num_examples))
            return copied(dataset, copies, draw, self.reader, values)
        positions = draw.epochs(self.seed, tf.identity)
        return with_length(positions, draw.num_outputs)


def check_ends(dataset: tf.data.Dataset, name: str) -> None:
    """Raises if a dataset has no end."""
    if is_endless(dataset):
        raise ValueError(
            f"`.{name}` got a dataset without end; expected one that ends, since what "
            "comes in an epoch is chosen from all of it. Leave `.repeat()` out: an "
            "epoch of `fit` reads the dataset once."
        )


def copied(
    dataset: tf.data.Dataset,
    copies: tf.data.Dataset,
    draw: Draw,
    reader: Reader | None,
    values: np.ndarray | None,
    *,
    is_numbered: bool = False,
) -> tf.data.Dataset:
    """Returns each element as often as the number at its place in `copies` says.

    Elements are held against the `values` that `reader` read in the first pass, without
    a reader against their number alone. Numbered ones are pairs (position, element).
    """

    def parts(element: Any) -> tuple[Any, ...]:
        return as_arguments(element[1] if is_numbered else element)

    both = tf.data.Dataset.zip((_plan(copies, draw, values), _marked(dataset)))

    def checked(plan: Any, element: Any, is_end: tf.Tensor, now: Any) -> Any:
        checks = [_check_number(plan["copies"], is_end, plan["position"], draw)]
        if now is not None:
            checks.append(_check_values(plan, now, is_end))
        with tf.control_dependencies(checks):
            return tf.nest.map_structure(tf.identity, element)

    def chunk(plan: Any, marked: Any) -> Any:
        element, is_end = marked
        now = None if reader is None else reader.values(parts(element))
        element = checked(plan, element, is_end, now)
        each = tf.maximum(plan["copies"], 0)
        rows = repeated(tf.range(tf.size(each)), each)
        return tf.nest.map_structure(lambda part: tf.gather(part, rows), element)

    def one(plan: Any, marked: Any) -> tf.data.Dataset:
        element, is_end = marked
        now = None
        if reader is not None:
            # The mark is no element, and a function may not take it.
            now = tf.cond(
                is_end, lambda: plan["value"], lambda: reader.value(*parts(element))
            )
        element = checked(plan, element, is_end, now)
        each = tf.maximum(plan["copies"], 0)
        return tf.data.Dataset.from_tensors(element).repeat(each)

    if _suits_chunks(dataset, draw, reader):
        result = both.batch(_CHUNK).map(chunk).unbatch()
    else:
        result = both.flat_map(one)
    return with_length(result, draw.num_outputs)


def _plan(
    copies: tf.data.Dataset, draw: Draw, values: np.ndarray | None
) -> tf.data.Dataset:
    """Returns copies, position and expected value of each element and of the mark."""
    end = tf.data.Dataset.from_tensors(tf.constant(_END, tf.int64))
    plan = {
        "copies": copies.concatenate(end),
        "position": tf.data.Dataset.range(draw.num_examples + 1),
    }
    if values is not None:
        with tf.device("CPU:0"):
            plan["value"] = tf.data.Dataset.from_tensor_slices(
                tf.concat([values, values[:1]], 0)
            )
    return tf.data.Dataset.zip(plan)


def _marked(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns pairs (element, whether it is the mark behind the last one).

    No mark can be made for some elements, such as ragged ones; if those are too few,
    tf.data itself finds too few copies, and its error says less.
    """
    mark = dataset.take(0)
    if all(
        isinstance(spec, tf.TensorSpec)
        and spec.shape.rank is not None
        and spec.dtype not in (tf.variant, tf.resource)
        for spec in tf.nest.flatten(dataset.element_spec)
    ):
        element = blank(dataset.element_spec, purpose="a mark ends them")
        mark = tf.data.Dataset.from_tensors(element)
    flagged, end = (
        tf.data.Dataset.zip((part, tf.data.Dataset.from_tensors(is_end).repeat()))
        for part, is_end in ((dataset, False), (mark, True))
    )
    return flagged.concatenate(end)


def _suits_chunks(dataset: tf.data.Dataset, draw: Draw, reader: Reader | None) -> bool:
    """Whether elements can be batched, their labels picked, and it takes no memory."""
    element_bytes = bytes_of_element(dataset.element_spec)
    if element_bytes is None or (reader is not None and callable(reader.by)):
        return False
    return _CHUNK * (1 + draw.max_copies) * element_bytes <= _MAX_CHUNK_BYTES


def _check_number(
    copies: tf.Tensor, is_end: tf.Tensor, position: tf.Tensor, draw: Draw
) -> tf.Operation:
    """Returns a check that the dataset ends where it ended before."""
    fits = tf.equal(is_end, copies < 0)
    return tf.debugging.Assert(
        tf.reduce_all(fits),
        [
            f"The dataset had {draw.num_examples} elements when it was looked at in "
            "`build`; in this epoch it ends, or goes on, at number",
            _first_wrong(position, fits),
            "Expected the same elements each time. Sampling needs a source that does "
            "not change: put what is random behind it, as `Pipeline.shuffle` is.",
        ],
    )


def _check_values(plan: Any, now: tf.Tensor, is_end: tf.Tensor) -> tf.Operation:
    """Returns a check that elements have the labels that were read of them."""
    then = plan["value"]
    fits = tf.equal(now, then) | is_end
    return tf.debugging.Assert(
        tf.reduce_all(fits),
        [
            "Labels or weights were read once, in `build`, and elements have changed "
            "since. The first that differs, what it is now, and what it was:",
            _first_wrong(plan["position"], fits),
            _first_wrong(now, fits),
            _first_wrong(then, fits),
            "Expected the same elements in the same order each time. Leave shuffling "
            "to `Pipeline.shuffle`, which comes after sampling, or pass the dataset "
            "`reshuffle_each_iteration=False`.",
        ],
    )


def _first_wrong(values: tf.Tensor, fits: tf.Tensor) -> tf.Tensor:
    """Returns the values that do not fit, at most one."""
    wrong = tf.boolean_mask(tf.reshape(values, [-1]), ~tf.reshape(fits, [-1]))
    return wrong[:1]
