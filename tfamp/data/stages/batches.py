"""The stages that order and join elements: a shuffle, batches, and buckets.

A bucket holds the sequences up to a length, its boundary; they are padded to it. So
there are as many shapes as buckets, and XLA compiles each of them once.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data import _elements
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.records import checks, units

# Elements held for shuffling may take this much memory, unless told otherwise.
SHUFFLE_BUFFER_BYTES = 256 * 2**20
_MIN_BUFFER = 64
# Where elements have no known size, such as strings, the first are measured. Where that
# fails too, memory is bounded by count.
_DEFAULT_BUFFER = 10_000
_MAX_OPEN_BUFFER = 2**18
# Tensor cores and XLA's tiles take dimensions in steps of this.
_LENGTH_MULTIPLE = 8
DEFAULT_MAX_SHAPES = 8
_MAX_CANDIDATES = 2048
_NO_BATCH = (
    "In this pass `.bucket` with `drop_remainder=True` filled no batch; expected one "
    "at least. Make batches smaller, pass fewer boundaries, or keep the remainder."
)


@dataclasses.dataclass(frozen=True)
class Shuffle(Stage):
    """Puts the elements in a new random order each epoch."""

    name: ClassVar[str] = "shuffle"
    buffer_size: int | None
    seed: int | None
    by_position: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("buffer_size", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                checks.positive_int(name, getattr(self, name), minimum=least)

    def is_too_large(self, source: Any) -> bool:
        """Whether a buffer of a source's elements would take much memory."""
        element_bytes = _elements.bytes_held(source.dataset(None).element_spec)
        held = self.buffer_size or source.num_examples
        return element_bytes is None or held * element_bytes > SHUFFLE_BUFFER_BYTES

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Shuffles through a buffer, or positions as one tensor, anew each pass."""
        if self.by_position:
            number = _elements.known_length(dataset) or 0
            order = drawn(self.seed, lambda random: random.permutation(number))
            self.found["held"] = "by position: exact"
            return _elements.with_length(order, number)
        length = _elements.known_length(dataset)
        each = _elements.bytes_held(dataset.element_spec)
        if each is None and self.buffer_size is None:
            each, again = [_elements.bytes_of_first(dataset, 32) for _ in range(2)]
            if each != again:
                warnings.warn(
                    "`.shuffle` without `buffer_size` reads the first elements, which "
                    "do not come again; expected a generator that begins anew. Pass "
                    "`from_generator` a function that makes one, or `buffer_size`.",
                    stacklevel=checks.level_of_user(),
                )
        fitting = _DEFAULT_BUFFER
        if each is not None:
            fitting = max(_MIN_BUFFER, SHUFFLE_BUFFER_BYTES // max(1, each))
        whole = _MAX_OPEN_BUFFER if length is None else length
        size = self.buffer_size or min(whole, fitting)
        is_exact = length is not None and size >= length
        told = "all held: exact" if is_exact else f"{size:,} held: approximate"
        self.found["held"] = told
        return dataset.shuffle(size, seed=self.seed, reshuffle_each_iteration=True)

    setting = property(
        lambda self: f"{self.buffer_size or 'all that fit 256 MiB'}, seed {self.seed}"
    )


def drawn(
    seed: int | None, draw: Callable[[np.random.Generator], np.ndarray]
) -> tf.data.Dataset:
    """Returns the numbers that are drawn as a pass begins, other ones in each."""

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
    num_rows: int | None = None

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.size)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Batches on one thread: a copy is cheaper than handing it to another."""
        size, drops = self.size, self.drop_remainder
        are_elements = self.num_rows is None
        length = _elements.known_length(dataset) if are_elements else self.num_rows
        length = None if length == -1 else length
        if drops and length is not None and length < size:
            raise ValueError(
                f"Batch size {size} with `drop_remainder=True` leaves no batch of "
                f"{length} elements; expected a size of at most {length}. Make the "
                "batch smaller, or keep the remainder."
            )
        if are_elements and _elements.looks_batched(dataset.element_spec):
            warnings.warn(
                f"Elements {dataset.element_spec} look like batches already; expected "
                "single examples: batching again adds a dimension. Leave out `.batch`, "
                "or pass `ds.unbatch()`. For sequences of own lengths use `.bucket`.",
                stacklevel=checks.level_of_user(),
            )
        join = dataset.batch if are_elements else dataset.rebatch
        batches = join(size, drop_remainder=drops)
        if length is not None:
            rest = length % size
            self.found["rest"] = f"{rest} in the last" if rest else "all full"
            number = length // size + (rest > 0 and not drops)
            return batches if are_elements else _elements.with_length(batches, number)
        message = (
            f"A pass brought no batch: fewer than {size} elements came with "
            "`drop_remainder=True`; expected as many at least. Make the batch smaller, "
            "keep the remainder, or loosen `.filter`."
        )
        return _elements.never_empty(batches, message) if drops else batches

    @property
    def setting(self) -> str:
        """The size, and what becomes of the rest."""
        rest = "the rest dropped" if self.drop_remainder else "the rest kept"
        chunks = "" if self.num_rows is None else ", from chunks"
        return f"{self.size}, {rest}{chunks}"


def choose_boundaries(lengths: np.ndarray, *, max_shapes: int) -> tuple[int, ...]:
    """Returns the boundaries with the least padding."""

    def rounded_up(step: int) -> np.ndarray:
        return np.maximum(-(-lengths.astype(np.int64) // step), 1) * step

    step = _LENGTH_MULTIPLE
    while len(np.unique(rounded_up(step))) > _MAX_CANDIDATES:
        step *= 2
    values, counts = np.unique(rounded_up(step), return_counts=True)
    below = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    num_values = len(values)
    places = values[None, :] * (below[None, 1:] - below[:-1, None])
    places[np.tril_indices(num_values, -1)] = np.inf
    least = np.concatenate([[0.0], np.full(num_values, np.inf)])
    starts = []
    for _ in range(min(max_shapes, num_values)):
        total = least[:-1, None] + places
        starts.append(np.argmin(total, axis=0))
        least = np.concatenate([[np.inf], np.min(total, axis=0)])
    boundaries, end = [], num_values
    for start in reversed(starts):
        boundaries.append(int(values[end - 1]))
        end = int(start[end - 1])
    return tuple(reversed(boundaries))


@dataclasses.dataclass(frozen=True)
class Bucket(Stage):
    """`Pipeline.bucket` explains the arguments."""

    name: ClassVar[str] = "bucket"
    batch_size: int
    _: dataclasses.KW_ONLY
    boundaries: Any = "auto"
    max_shapes: int = DEFAULT_MAX_SHAPES
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.batch_size)
        checks.positive_int("max_shapes", self.max_shapes)
        if isinstance(self.boundaries, str):
            checks.choice("boundaries", self.boundaries, ("auto",))
            return
        given = tuple(checks.positive_int("boundaries", one) for one in self.boundaries)
        if not given or any(a >= b for a, b in zip(given, given[1:], strict=False)):
            raise ValueError(
                f"`boundaries` are {given}; expected at least one length, ascending. "
                "Sort them, each once."
            )
        object.__setattr__(self, "boundaries", given)

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns batches in the order in which they fill."""
        specs = tf.nest.flatten(dataset.element_spec)
        is_fixed = all(
            isinstance(spec, tf.TensorSpec)
            and spec.shape.rank is not None
            and None not in spec.shape[1:].as_list()
            for spec in specs
        )
        if not is_fixed or not any(map(_varies, specs)):
            raise ValueError(
                f"Elements are {dataset.element_spec}; expected dense tensors, and a "
                "part whose first dimension alone is None, which is what varies. Use "
                "`.batch`, or set the dimensions with `tf.ensure_shape` in `.map`."
            )
        boundaries = self.boundaries
        if boundaries == "auto":
            _elements.check_ends("bucket", dataset)
            length_of = self._length_of(dataset)
            lengths = _elements.read_all(
                map_in_order(dataset, length_of, settings), "bucket"
            )
            boundaries = choose_boundaries(lengths, max_shapes=self.max_shapes)
            places = np.asarray(boundaries)[np.searchsorted(boundaries, lengths)].sum()
            waste = units.format_share(1 - lengths.sum() / places)
            chosen = f"length {', '.join(map(str, boundaries))}"
            self.found["padding"] = f"{chosen}, padding is {waste}"
        return self._batched(dataset, boundaries, settings)

    @property
    def setting(self) -> str:
        """The size of batches, and their lengths."""
        rest = "dropped" if self.drop_remainder else "kept, one smaller batch each"
        lengths = f"up to {self.max_shapes} lengths"
        if self.boundaries != "auto":
            lengths = f"length {', '.join(map(str, self.boundaries))}"
        return f"{self.batch_size} a batch, {lengths}, rest {rest}"

    def _length_of(self, dataset: tf.data.Dataset) -> Any:
        """Returns a function from the parts of an element to its length, int32."""
        specs = tf.nest.flatten(dataset.element_spec)

        def length_of(*parts: Any) -> tf.Tensor:
            pairs = zip(tf.nest.flatten(parts), specs, strict=True)
            return tf.reduce_max([tf.shape(p)[0] for p, spec in pairs if _varies(spec)])

        return length_of

    def _batched(
        self, dataset: tf.data.Dataset, boundaries: tuple[int, ...], settings: Settings
    ) -> tf.data.Dataset:
        spec, last = dataset.element_spec, boundaries[-1]
        specs = tf.nest.flatten(spec)
        length_of = self._length_of(dataset)
        ends = tf.constant(boundaries, tf.int32)

        def bucket_of(*parts: Any) -> tf.Tensor:
            length = length_of(*parts)
            above = "A sequence is above the last boundary, of length"
            advice = f"Expected at most {last}. Add a boundary, or cut it in `.map`."
            fits = tf.debugging.Assert(length <= last, [above, length, advice])
            with tf.control_dependencies([fits]):
                return tf.searchsorted(ends, length[None], out_type=tf.int64)[0]

        def batch(bucket: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
            size = tf.gather(ends, bucket)
            shapes = [[size, *s.shape[1:]] if _varies(s) else s.shape for s in specs]
            padded = tf.nest.pack_sequence_as(spec, shapes)
            drops = self.drop_remainder
            return window.padded_batch(self.batch_size, padded, drop_remainder=drops)

        batches = dataset.group_by_window(bucket_of, batch, self.batch_size)
        drops = self.drop_remainder
        return _elements.never_empty(batches, _NO_BATCH) if drops else batches


def _varies(spec: Any) -> bool:
    return bool(spec.shape.rank and spec.shape[0] is None)
