"""The stage that joins sequences of about one length into padded batches.

A bucket holds the sequences up to a length, its boundary; they are padded to it. So
there are as many shapes as buckets, and XLA compiles each of them once.
"""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tfamp.data._elements import is_endless, never_empty
from tfamp.data.stages import Settings, Stage, map_in_order
from tfamp.data.stages.sampling import read_all
from tfamp.records import checks, units

# Tensor cores and XLA's tiles take dimensions in steps of this.
_LENGTH_MULTIPLE = 8
# Each shape is compiled once, and has a batch of its own that is not full.
DEFAULT_MAX_SHAPES = 8
# Boundaries to choose from; the search takes the square of it.
_MAX_CANDIDATES = 2048
_NO_BATCH = (
    "In this pass `.bucket` with `drop_remainder=True` filled no batch, as no bucket "
    "has sequences for one; expected one full batch at least. Make batches smaller, "
    "pass fewer `boundaries` or a smaller `max_shapes`, or keep the remainder."
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

    step = _LENGTH_MULTIPLE
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

    `Pipeline.bucket` explains the arguments.
    """

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
            (isinstance(spec, tf.TensorSpec) or _is_row(spec))
            and spec.shape.rank is not None
            and None not in spec.shape[1:].as_list()
            for spec in specs
        )
        if not is_fixed or not any(map(_varies, specs)):
            raise ValueError(
                f"Elements are {dataset.element_spec}; expected dense tensors, and a "
                "part whose first dimension alone is None, which is what varies. Use "
                "`.batch` for elements of one shape, or set the dimensions with "
                "`tf.ensure_shape` in `.map`."
            )
        boundaries = self.boundaries
        if boundaries == "auto":
            if is_endless(dataset):
                raise ValueError(
                    "`.bucket` got a dataset without end; expected one that ends, as "
                    "its lengths are read first. Leave `.repeat()` out, or pass "
                    "`boundaries=`, with which nothing is read first."
                )
            length_of = self._length_of(dataset)
            lengths = read_all(map_in_order(dataset, length_of, settings), "bucket")
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
        if any(map(_is_row, specs)):

            def dense(*parts: Any) -> Any:
                pairs = zip(tf.nest.flatten(parts), specs, strict=True)
                each = [tf.ensure_shape(part, one.shape) for part, one in pairs]
                return tf.nest.pack_sequence_as(spec, each)

            dataset = map_in_order(dataset, dense, settings)
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
        return never_empty(batches, _NO_BATCH) if self.drop_remainder else batches


def _is_row(spec: Any) -> bool:
    """Whether a part is a row of a ragged tensor, which is a plain one."""
    return isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank == 0


def _varies(spec: Any) -> bool:
    """Whether a part of an element is a sequence."""
    return bool(spec.shape.rank and spec.shape[0] is None)
