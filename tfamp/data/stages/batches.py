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
from tfamp.data.stages import Settings, Stage, seed_text
from tfamp.records import checks

# From a stage over `Build.dataset` and `Pipeline.build` to the caller.
_STACKLEVEL = 4
# Elements held for shuffling may take this much memory, unless told otherwise.
SHUFFLE_BUFFER_BYTES = 256 * 2**20
# A buffer below this many elements hardly shuffles, however large they are.
MIN_SHUFFLE_BUFFER = 64
# Where elements have no known size, such as strings, so many are measured. Where that
# fails too, memory is bounded by count.
NUM_MEASURED = 32
DEFAULT_SHUFFLE_BUFFER = 10_000
# A buffer is filled before the first batch comes. Where the end of the elements is not
# known, more than so many would keep a model waiting for seconds.
MAX_OPEN_BUFFER = 2**18


def shuffle_buffer_size(num_elements: int | None, element_bytes: int | None) -> int:
    """Returns how many elements to hold for shuffling when the user did not say.

    All of them where they fit `SHUFFLE_BUFFER_BYTES`: only then is the shuffle exact.
    Their bytes are those that they take in a buffer (`bytes_held`).

    Example:
        >>> shuffle_buffer_size(60_000, 28 * 28 + 8 + 2 * 200)  # 68 MiB: all of it
        60000
        >>> shuffle_buffer_size(1_200_000, 224 * 224 * 3)
        1783
        >>> shuffle_buffer_size(None, 408)  # of a dataset that may have no end
        262144
    """
    fitting = DEFAULT_SHUFFLE_BUFFER
    if element_bytes is not None:
        fitting = max(MIN_SHUFFLE_BUFFER, SHUFFLE_BUFFER_BYTES // max(1, element_bytes))
    return min(MAX_OPEN_BUFFER if num_elements is None else num_elements, fitting)


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

    def known_size(self, dataset: tf.data.Dataset) -> int | None:
        """Returns how many elements are held, None where their sizes must tell."""
        length = known_length(dataset)
        if self.buffer_size is not None:
            return self.buffer_size if length is None else min(self.buffer_size, length)
        element_bytes = bytes_held(dataset.element_spec)
        if element_bytes is None:
            return None
        return shuffle_buffer_size(length, element_bytes)

    def is_too_large(self, source: Any) -> bool:
        """Whether a buffer of a source's elements would take much memory."""
        element_bytes = bytes_held(source.dataset(None).element_spec)
        held = self.buffer_size or source.num_examples
        return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Shuffles through a buffer, afresh at every iteration."""
        size = self.known_size(dataset)
        if size is None:
            if runs_python(dataset) and not begins_anew(dataset):
                warnings.warn(
                    "`.shuffle` without `buffer_size` looks at the sizes of the first "
                    "elements, and these were others when they were read again. "
                    "Expected the same: a generator that was called already can be "
                    "read once, and has lost what was looked at. Pass `from_generator` "
                    "a function that makes a new one, or pass `buffer_size`, which "
                    "reads nothing.",
                    stacklevel=_STACKLEVEL,
                )
            element_bytes = bytes_of_first(dataset, NUM_MEASURED)
            size = shuffle_buffer_size(known_length(dataset), element_bytes)
        return dataset.shuffle(size, seed=self.seed, reshuffle_each_iteration=True)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the dataset in its own order, without measuring its elements."""
        return dataset

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        size, length = self.known_size(dataset), known_length(dataset)
        seed = seed_text(self.seed)
        limit = f"what fits {SHUFFLE_BUFFER_BYTES // 2**20} MiB"
        if size is None:
            reason = f"by the first {NUM_MEASURED} elements, read at build: approximate"
            return f"{limit}, {seed}", reason
        reason = f"{limit}: approximate"
        if length is not None and size >= length:
            reason = "holds every element: an exact shuffle, new each epoch"
        elif self.buffer_size is not None:
            reason = "as asked; elements further apart than this keep their order"
        elif size == MAX_OPEN_BUFFER:
            reason = "as many as are soon read, as the end is not known: approximate"
        return f"{size:,} elements, {seed}", reason


@dataclasses.dataclass(frozen=True)
class Permutation(Shuffle):
    """Puts all positions of a source in a new random order, drawn as one tensor."""

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns the positions in an order that is drawn as an epoch begins."""
        length = known_length(dataset) or 0
        order = drawn(self.seed, lambda random: random.permutation(length))
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
    """Joins elements into batches."""

    name: ClassVar[str] = "batch"
    size: int
    drop_remainder: bool

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.size)

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; warns if elements look like batches."""
        self.check_length(known_length(dataset))
        if looks_batched(dataset.element_spec):
            warnings.warn(
                f"Elements {dataset.element_spec} look like batches already: "
                "the first dimension of every part is unknown. Expected single "
                "examples; batching again adds a dimension. Leave out `.batch`, or "
                "pass `ds.unbatch()`. If these are sequences of varying length, pad "
                "them first.",
                stacklevel=_STACKLEVEL,
            )

    def check_length(self, length: int | None) -> None:
        """Raises if no batch would be left of `length` elements."""
        if self.drop_remainder and length is not None and length < self.size:
            raise ValueError(
                f"Batch size {self.size} with `drop_remainder=True` leaves no batch of "
                f"{length} elements; expected a size of at most {length}. Make the "
                "batch smaller, or keep the remainder."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Batches on one thread: a copy is cheaper than handing it to another."""
        batches = dataset.batch(self.size, drop_remainder=self.drop_remainder)
        return self.checked(batches, known_length(dataset))

    def checked(
        self, batches: tf.data.Dataset, num_elements: int | None
    ) -> tf.data.Dataset:
        """Returns batches of which there is one in each pass, or an error."""
        if not self.drop_remainder or num_elements is not None:
            return batches
        message = (
            f"A pass brought no batch: fewer than {self.size} elements came, and "
            "`drop_remainder=True` drops what fills none; expected as many at least. "
            "Make the batch smaller, keep the remainder, or loosen `.filter`."
        )
        return never_empty(batches, message)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        length = known_length(dataset)
        rest = None if length is None else length % self.size
        if self.drop_remainder:
            dropped = "the rest" if rest is None else f"{rest} of {length} elements"
            return str(self.size), f"every batch has one static shape; drops {dropped}"
        if rest == 0:
            return str(self.size), "every batch is full"
        last = "may be smaller" if rest is None else f"has {rest} elements"
        return str(self.size), f"keeps every element; the last batch {last}"


@dataclasses.dataclass(frozen=True)
class Rebatch(Batch):
    """Makes batches out of chunks of rows; their number is None where unknown."""

    num_rows: int | None = None

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if no batch would be left; the source made the chunks for this."""
        self.check_length(self.num_rows)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Cuts and joins whole chunks."""
        batches = dataset.rebatch(self.size, drop_remainder=self.drop_remainder)
        if self.num_rows is None:
            return self.checked(batches, None)
        whole, rest = divmod(self.num_rows, self.size)
        return with_length(batches, whole + (rest > 0 and not self.drop_remainder))

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        last = "drops the rest" if self.drop_remainder else "the last may be smaller"
        return str(self.size), f"from chunks, rows are never taken apart; {last}"
