"""The stages that order and join elements: a shuffle through a buffer, and batches."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import (
    begins_anew,
    bytes_held,
    bytes_of_first,
    known_length,
    looks_batched,
    never_empty,
    runs_python,
    with_length,
)
from tfamp.data.stages import Settings, Stage
from tfamp.records import checks

# From a stage over `plan.build` and `Pipeline.build` to the caller.
_STACKLEVEL = 4
# Elements held for shuffling may take this much memory, unless told otherwise.
SHUFFLE_BUFFER_BYTES = 256 * 2**20
# A buffer below this many elements hardly shuffles, however large they are.
_MIN_BUFFER = 64
# Where elements have no known size, such as strings, so many are measured. Where that
# fails too, memory is bounded by count.
_NUM_MEASURED, _DEFAULT_BUFFER = 32, 10_000
# A buffer is filled before the first batch comes. Where the end of the elements is not
# known, more than so many would keep a model waiting for seconds.
_MAX_OPEN_BUFFER = 2**18


def shuffle_buffer_size(num_elements: int | None, element_bytes: int | None) -> int:
    """Returns how many elements to hold for shuffling when the user did not say.

    All of them where they fit `SHUFFLE_BUFFER_BYTES`: only then is the shuffle exact.

    Example:
        >>> shuffle_buffer_size(60_000, 28 * 28 + 8 + 2 * 200)  # 68 MiB: all of it
        60000
        >>> shuffle_buffer_size(1_200_000, 224 * 224 * 3)
        1783
    """
    fitting = _DEFAULT_BUFFER
    if element_bytes is not None:
        fitting = max(_MIN_BUFFER, SHUFFLE_BUFFER_BYTES // max(1, element_bytes))
    return min(_MAX_OPEN_BUFFER if num_elements is None else num_elements, fitting)


@dataclasses.dataclass(frozen=True)
class Shuffle(Stage):
    """Puts the elements in a new random order each epoch."""

    name: ClassVar[str] = "shuffle"
    buffer_size: int | None
    seed: int | None

    def __post_init__(self) -> None:
        if self.buffer_size is not None:
            checks.positive_int("buffer_size", self.buffer_size)
        if self.seed is not None:
            checks.positive_int("seed", self.seed, minimum=0)

    def is_too_large(self, source: Any) -> bool:
        """Whether a buffer of a source's elements would take much memory."""
        element_bytes = bytes_held(source.dataset(None).element_spec)
        held = self.buffer_size or source.num_examples
        return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Shuffles through a buffer, afresh at every iteration."""
        length, each = known_length(dataset), bytes_held(dataset.element_spec)
        if each is None and self.buffer_size is None:
            if runs_python(dataset) and not begins_anew(dataset):
                warnings.warn(
                    "`.shuffle` without `buffer_size` looks at the sizes of the first "
                    "elements, and these were others when they were read again. "
                    "Expected the same: a generator that was called already can be "
                    "read once, and has lost them. Pass `from_generator` a function "
                    "that makes a new one, or pass `buffer_size`.",
                    stacklevel=_STACKLEVEL,
                )
            each = bytes_of_first(dataset, _NUM_MEASURED)
        size = self.buffer_size or shuffle_buffer_size(length, each)
        is_exact = length is not None and size >= length
        told = "all held: exact" if is_exact else f"{size:,} held: approximate"
        self.found["held"] = told
        return dataset.shuffle(size, seed=self.seed, reshuffle_each_iteration=True)

    @property
    def setting(self) -> str:
        """How many are held, and the seed."""
        limit = f"all that fit {SHUFFLE_BUFFER_BYTES // 2**20} MiB"
        return f"{self.buffer_size or limit}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Permutation(Shuffle):
    """Puts all positions of a source in a new random order, drawn as one tensor."""

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the positions in an order that is drawn as an epoch begins."""
        length = known_length(dataset) or 0
        order = drawn(self.seed, lambda random: random.permutation(length))
        self.found["held"] = "by position: exact"
        return with_length(order, length)


def drawn(
    seed: int | None, draw: Callable[[np.random.Generator], np.ndarray]
) -> tf.data.Dataset:
    """Returns the numbers that are drawn as a pass begins, other ones in each.

    The same seed gives the same sequence of passes.
    """

    def call(words: np.ndarray) -> np.ndarray:
        return draw(np.random.default_rng(words.view(np.uint64))).astype(np.int64)

    def numbers(words: tf.Tensor) -> tf.data.Dataset:
        made = tf.numpy_function(call, [words], tf.int64)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(made, (None,)))

    words = tf.data.Dataset.random(seed, rerandomize_each_iteration=True).take(2)
    return words.batch(2, drop_remainder=True).flat_map(numbers)


@dataclasses.dataclass(frozen=True)
class Batch(Stage):
    """Joins elements into batches.

    Of chunks, where a source gives these, `num_rows` is how many rows there are, -1
    where that is not known; None of elements.
    """

    name: ClassVar[str] = "batch"
    size: int
    drop_remainder: bool
    num_rows: int | None = None

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.size)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Batches on one thread: a copy is cheaper than handing it to another."""
        size, drops, are_elements = (
            self.size,
            self.drop_remainder,
            self.num_rows is None,
        )
        length = known_length(dataset) if are_elements else self.num_rows
        length = None if length == -1 else length
        if drops and length is not None and length < size:
            raise ValueError(
                f"Batch size {size} with `drop_remainder=True` leaves no batch of "
                f"{length} elements; expected a size of at most {length}. Make the "
                "batch smaller, or keep the remainder."
            )
        if are_elements and looks_batched(dataset.element_spec):
            warnings.warn(
                f"Elements {dataset.element_spec} look like batches already: "
                "the first dimension of every part is unknown. Expected single "
                "examples; batching again adds a dimension. Leave out `.batch`, or "
                "pass `ds.unbatch()`. For sequences of varying length use `.bucket`.",
                stacklevel=_STACKLEVEL,
            )
        join = dataset.batch if are_elements else dataset.rebatch
        batches = join(size, drop_remainder=drops)
        if length is not None:
            rest = length % size
            self.found["rest"] = f"{rest} in the last" if rest else "all full"
            num_batches = length // size + (rest > 0 and not drops)
            return batches if are_elements else with_length(batches, num_batches)
        message = (
            f"A pass brought no batch: fewer than {size} elements came, and "
            "`drop_remainder=True` drops what fills none; expected as many at least. "
            "Make the batch smaller, keep the remainder, or loosen `.filter`."
        )
        return never_empty(batches, message) if drops else batches

    @property
    def setting(self) -> str:
        """The size, and what becomes of the rest."""
        rest = "the rest dropped" if self.drop_remainder else "the rest kept"
        chunks = "" if self.num_rows is None else ", from chunks"
        return f"{self.size}, {rest}{chunks}"
