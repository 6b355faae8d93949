"""The stage that joins sequences of about one length into padded batches.

A bucket holds the sequences up to a length, its boundary; they are padded to it. So
there are as many shapes as buckets, and XLA compiles each of them once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.data._elements import is_endless, known_length, never_empty
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.labels import Memory, read_all
from tfamp.records import checks, units

# Tensor cores and XLA's tiles take dimensions in steps of this.
LENGTH_MULTIPLE = 8
# Each shape is compiled once, and has a batch of its own that is not full.
DEFAULT_MAX_SHAPES = 8
# Boundaries to choose from; the search takes the square of it.
_MAX_CANDIDATES = 2048
# Lengths brought to Python at once.
_LENGTHS_AT_ONCE = 1024
_NO_BATCH = (
    "`.bucket` with `drop_remainder=True` filled no batch, as no bucket has sequences "
    "for one; expected one full batch at least. Make batches smaller, pass fewer "
    "`boundaries` or a smaller `max_shapes`, or keep the remainder."
)


def choose_boundaries(lengths: np.ndarray, *, max_shapes: int) -> tuple[int, ...]:
    """Returns the boundaries with the least padding.

    The least over all sets of at most `max_shapes` multiples, by dynamic programming
    over the histogram of lengths: the best last bucket goes with the best buckets below
    it. Above 2,048 distinct multiples they are taken in steps twice as wide, and so on.

    Example:
        >>> choose_boundaries(np.array([3, 5, 7, 30, 31, 90]), max_shapes=2)
        (32, 96)
        >>> choose_boundaries(np.array([3, 5, 7, 30, 31, 90]), max_shapes=3)
        (8, 32, 96)

    Source: Bellman, On the approximation of curves by line segments using dynamic
    programming, 1961, with the padding of a segment as its cost.
    """

    def rounded_up(step: int) -> np.ndarray:
        return np.maximum(-(-lengths.astype(np.int64) // step), 1) * step

    step = LENGTH_MULTIPLE
    while len(np.unique(rounded_up(step))) > _MAX_CANDIDATES:
        step *= 2
    values, counts = np.unique(rounded_up(step), return_counts=True)
    # below[i]: sequences in the first i values; a bucket of values i to j - 1 has
    # below[j] - below[i] of them, each of which takes values[j - 1] places.
    below = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    num_values = len(values)
    places = values[None, :] * (below[None, 1:] - below[:-1, None])
    places[np.tril_indices(num_values, -1)] = np.inf
    # least[i]: fewest places for the first i values in the buckets so far.
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
    """Joins sequences of about one length into batches, padded to a few lengths.

    `Pipeline.bucket` explains the arguments. `found` holds the boundaries of the
    dataset of one build, and what padding costs, once it is made.
    """

    name: ClassVar[str] = "bucket"
    batch_size: int
    _: dataclasses.KW_ONLY
    boundaries: Any = "auto"
    max_shapes: int = DEFAULT_MAX_SHAPES
    drop_remainder: bool = False
    padding_value: Any = None
    too_long: str = "error"
    memory: Memory = dataclasses.field(
        default_factory=Memory, compare=False, repr=False
    )
    found: dict[str, Any] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        checks.positive_int("batch_size", self.batch_size)
        checks.positive_int("max_shapes", self.max_shapes)
        given = _given_boundaries(self.boundaries)
        object.__setattr__(self, "boundaries", given)
        checks.choice("too_long", self.too_long, ("error", "truncate", "drop"))
        if given is None and self.too_long != "error":
            raise ValueError(
                f"`too_long` is {self.too_long!r} with boundaries chosen from the "
                "lengths, and none is above those; expected boundaries of your own. "
                "Pass `boundaries=[64, 128, 256]`, or leave `too_long` out."
            )

    def for_build(self) -> "Bucket":
        """Returns the stage with buckets of its own."""
        return dataclasses.replace(self)

    def with_counts_of(self, builds: Sequence[Any]) -> "Bucket":
        """Returns the stage with the buckets of the last of its builds."""
        return builds[-1] if builds else self

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises if elements are no sequences, or lengths cannot be read."""
        specs = tf.nest.flatten(dataset.element_spec)
        for spec in specs:
            _check_spec(spec)
        if not any(map(_varies, specs)):
            raise ValueError(
                f"Elements are {dataset.element_spec}; expected a part whose first "
                "dimension is None, which is what varies. Use `.batch` for elements of "
                "one shape, or set the dimension free with `tf.ensure_shape` in `.map`."
            )
        _fills(self.padding_value, dataset.element_spec)
        if is_endless(dataset) and self._reads_lengths:
            raise ValueError(
                "`.bucket` got a dataset without end; expected one that ends, since "
                "its lengths are read first. Leave `.repeat()` out, or pass "
                "`boundaries=` with `too_long='error'`, which reads nothing first."
            )

    def apply(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns batches in the order in which they fill."""
        boundaries: Any = self.boundaries
        lengths: Any = None
        if self._reads_lengths:
            lengths = self.memory.get(dataset, lambda: self._read(dataset, settings))
        if boundaries is None:
            boundaries = choose_boundaries(lengths, max_shapes=self.max_shapes)
        self.found["boundaries"] = boundaries
        if lengths is not None:
            self._measure(lengths, boundaries)
        return self._batched(dataset, boundaries, settings)

    def preview(self, dataset: tf.data.Dataset, settings: Settings) -> tf.data.Dataset:
        """Returns a dataset of the same spec, and reads nothing."""
        return self._batched(dataset, self.boundaries or (1,), settings)

    def explain(self, dataset: tf.data.Dataset, settings: Settings) -> tuple[str, str]:
        """Returns the setting and the reason, given the dataset it acts on."""
        boundaries = self.found.get("boundaries", self.boundaries)
        lengths = f"up to {self.max_shapes} lengths"
        if boundaries is not None:
            lengths = f"length {', '.join(map(str, boundaries))}"
        reason = "like lengths together; padding unknown, lengths are not read"
        if "waste" in self.found:
            waste, one_shape = map(units.format_share, self.found["waste"])
            reason = f"padding is {waste}, else {one_shape}"
        elif self._reads_lengths:
            reason = "least padding for so few shapes; lengths are read once, at build"
        if self.found.get("too_long"):
            done = "left out" if self.too_long == "drop" else "cut"
            reason += f"; {self.found['too_long']:,} too long, {done}"
        rest = "dropped" if self.drop_remainder else "kept, one smaller batch each"
        return f"{self.batch_size} a batch, {lengths}", f"{reason}; rest {rest}"

    @property
    def _reads_lengths(self) -> bool:
        return self.boundaries is None or self.too_long != "error"

    def _read(self, dataset: tf.data.Dataset, settings: Settings) -> np.ndarray:
        """Returns the length of every element."""
        lengths = map_in_order(dataset, self._length_of(dataset), settings)
        batches = lengths.batch(_LENGTHS_AT_ONCE)
        return read_all(batches, known_length(dataset), "bucket")

    def _measure(self, lengths: np.ndarray, boundaries: tuple[int, ...]) -> None:
        """Notes what share of all places is padding, and what is too long."""
        is_too_long = lengths > boundaries[-1]
        kept = np.minimum(lengths, boundaries[-1])
        kept = kept if self.too_long == "truncate" else kept[~is_too_long]
        sizes = np.bincount(
            np.searchsorted(boundaries, kept), minlength=len(boundaries)
        )
        if self.drop_remainder and not (sizes >= self.batch_size).any():
            raise ValueError(f"Of {len(lengths):,} sequences {_NO_BATCH}")
        places = (sizes @ np.asarray(boundaries), len(kept) * boundaries[-1])
        waste = tuple(1 - kept.sum() / max(1, total) for total in places)
        self.found.update(waste=waste, too_long=int(is_too_long.sum()))
        if self.found["too_long"] and self.too_long != "error":
            done = "left out" if self.too_long == "drop" else "cut to it"
            text = "%d of %d sequences are longer than %d, the last boundary: %s."
            given = (self.found["too_long"], len(lengths), boundaries[-1], done)
            logging.warning(text, *given)

    def _length_of(self, dataset: tf.data.Dataset) -> Any:
        """Returns a function from the parts of an element to its length, int64."""
        specs = tf.nest.flatten(dataset.element_spec)

        def length_of(*parts: Any) -> tf.Tensor:
            pairs = zip(tf.nest.flatten(parts), specs, strict=True)
            sizes = [tf.shape(part, tf.int64)[0] for part, s in pairs if _varies(s)]
            return tf.reduce_max(sizes)

        return length_of

    def _batched(
        self, dataset: tf.data.Dataset, boundaries: tuple[int, ...], settings: Settings
    ) -> tf.data.Dataset:
        spec, last = dataset.element_spec, boundaries[-1]
        specs = tf.nest.flatten(spec)

        def each(change: Any, *parts: Any) -> Any:
            pairs = zip(tf.nest.flatten(parts), specs, strict=True)
            return tf.nest.pack_sequence_as(spec, [change(*pair) for pair in pairs])

        if any(isinstance(one, tf.RaggedTensorSpec) for one in specs):
            # Rows of ragged tensors are plain ones.
            dense = functools.partial(each, lambda x, s: tf.ensure_shape(x, s.shape))
            dataset = map_in_order(dataset, dense, settings)
        length_of = self._length_of(dataset)
        if self.too_long == "drop":
            dataset = dataset.filter(lambda *parts: length_of(*parts) <= last)
        elif self.too_long == "truncate":
            cut = functools.partial(each, lambda x, s: x[:last] if _varies(s) else x)
            dataset = map_in_order(dataset, cut, settings)
        # Where lengths vary by epoch, one may be above those that were read: such
        # sequences are padded to the longest among them, by the size -1.
        is_open = self.boundaries is None
        padded_to = tf.constant([*boundaries, -1] if is_open else boundaries, tf.int64)

        def bucket_of(*parts: Any) -> tf.Tensor:
            length = length_of(*parts)
            if self.too_long == "truncate":
                length = tf.minimum(length, last)
            ends = tf.constant(boundaries, tf.int64)
            bucket = tf.searchsorted(ends, length[None], out_type=tf.int64)[0]
            if is_open:
                return bucket
            words = (
                f"Expected at most {last}. Add a larger boundary, or pass "
                "`too_long='truncate'` or `too_long='drop'`."
            )
            above = "A sequence is above the last boundary, of length"
            fits = tf.debugging.Assert(length <= last, [above, length, words])
            with tf.control_dependencies([fits]):
                return tf.identity(bucket)

        def batch(bucket: tf.Tensor, window: tf.data.Dataset) -> tf.data.Dataset:
            size = tf.gather(padded_to, bucket)
            shapes = [[size, *s.shape[1:]] if _varies(s) else s.shape for s in specs]
            return window.padded_batch(
                self.batch_size,
                tf.nest.pack_sequence_as(spec, shapes),
                _fills(self.padding_value, spec),
                self.drop_remainder,
            )

        batches = dataset.group_by_window(bucket_of, batch, self.batch_size)
        if not self.drop_remainder:
            return batches
        return never_empty(batches, f"In this pass {_NO_BATCH}")


def _varies(spec: Any) -> bool:
    """Whether a part of an element is a sequence."""
    return bool(spec.shape.rank and spec.shape[0] is None)


def _given_boundaries(boundaries: Any) -> tuple[int, ...] | None:
    """Returns boundaries that the caller gave, None to choose them."""
    if boundaries is None:  # of a copy
        return None
    if isinstance(boundaries, str):
        checks.choice("boundaries", boundaries, ("auto",))
        return None
    given = tuple(checks.positive_int("boundaries", one) for one in boundaries)
    if not given or any(a >= b for a, b in zip(given, given[1:], strict=False)):
        raise ValueError(
            f"`boundaries` are {given}; expected at least one length, ascending. Sort "
            "them, each once."
        )
    return given


def _check_spec(spec: Any) -> None:
    """Raises unless at most the first dimension of a part varies."""
    is_row = isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 0
    if not (isinstance(spec, tf.TensorSpec) or is_row):
        raise ValueError(
            f"An element has a part {spec}; expected dense tensors. Pad or convert it "
            "in `.map`, with `.to_tensor()`."
        )
    if spec.shape.rank is None or None in spec.shape[1:].as_list():
        raise ValueError(
            f"An element has a part of shape {spec.shape}; expected one whose first "
            "dimension alone is unknown. Set the others in `.map` with "
            "`tf.ensure_shape`."
        )


def _fills(values: Any, element_spec: Any) -> Any:
    """Returns what to pad each part with, as scalars of its dtype.

    That is zero where no value is given, or one for text among numbers.
    """

    def fill(spec: Any) -> tf.Tensor:
        is_text = isinstance(values, (str, bytes))
        if values is None or is_text != (spec.dtype == tf.string):
            return tf.zeros([], spec.dtype)
        try:
            return tf.constant(values, spec.dtype)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"`padding_value` is {values!r}; expected a number that "
                f"{spec.dtype.name} can hold. Pass a plain number."
            ) from error

    return tf.nest.map_structure(fill, element_spec)
