"""Sequences of varying length: which share a batch, and what they are padded to.

A bucket holds the sequences up to a length, its boundary; they are padded to it. So
there are as many shapes as buckets, and XLA compiles each of them once.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import as_arguments

# Tensor cores and XLA's tiles take dimensions in steps of this.
LENGTH_MULTIPLE = 8
# Each shape is compiled once, and has a batch of its own that is not full.
DEFAULT_MAX_SHAPES = 8
# Boundaries to choose from; the search takes the square of it.
_MAX_CANDIDATES = 2048


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets: what each is padded to, ascending, and how many make a batch.

    The waste is the share of all places that is padding, and the same if all were
    padded to the longest; None if lengths were not read. `fills_one` says whether any
    bucket has sequences for a whole batch, as far as that is known.
    """

    boundaries: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    waste: float | None = None
    waste_of_one_shape: float | None = None
    num_too_long: int = 0
    fills_one: bool = True


def choose_boundaries(
    lengths: np.ndarray, *, multiple: int = LENGTH_MULTIPLE, max_shapes: int
) -> tuple[int, ...]:
    """Returns the boundaries with the least padding.

    The least over all sets of at most `max_shapes` multiples, by dynamic programming
    over the histogram of lengths: the best last bucket goes with the best buckets below
    it. Above 2,048 distinct multiples (lengths of more
    than 16,384 at the default) they are taken in steps twice as wide, and so on.

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

    step = multiple
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


def sizes_of_batches(
    boundaries: tuple[int, ...], *, batch_size: int | None, token_budget: int | None
) -> tuple[int, ...]:
    """Returns how many sequences of each bucket make a batch.

    That is `batch_size` for all, or what `token_budget` has places for, padding
    included, rounded down to a multiple of 8 where there are 8 or more.
    """
    if batch_size is not None:
        return (batch_size,) * len(boundaries)
    sizes = ((token_budget or 0) // boundary for boundary in boundaries)
    return tuple(
        size - size % LENGTH_MULTIPLE if size >= LENGTH_MULTIPLE else max(1, size)
        for size in sizes
    )


def plan_of(
    lengths: np.ndarray | None,
    boundaries: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    *,
    keeps_too_long: bool = False,
) -> BucketPlan:
    """Returns the plan, with its waste where lengths are known."""
    if lengths is None:
        return BucketPlan(boundaries, batch_sizes)
    is_too_long = lengths > boundaries[-1]
    kept = np.minimum(lengths, boundaries[-1])
    if not keeps_too_long:
        kept = kept[~is_too_long]
    counts = np.bincount(np.searchsorted(boundaries, kept), minlength=len(boundaries))
    used = float(kept.sum())
    places = float(counts @ np.asarray(boundaries))
    one_shape = float(len(kept) * boundaries[-1])
    return BucketPlan(
        boundaries,
        batch_sizes,
        1 - used / places if places else 0.0,
        1 - used / one_shape if one_shape else 0.0,
        int(is_too_long.sum()),
        bool((counts >= np.asarray(batch_sizes)).any()),
    )


class Padder:
    """Pads the elements of one dataset: the parts whose first dimension is None.

    `options` are those of a `Bucket`.
    """

    def __init__(self, element_spec: Any, options: Any) -> None:
        self._length, self._mask = options.length, options.mask
        self._weighs = bool(options.weight_padding)
        self._drop_remainder = options.drop_remainder
        self._spec = element_spec
        self.specs = tf.nest.flatten(element_spec)
        for spec in self.specs:
            _check_spec(spec)
        self._is_sequence = [
            bool(s.shape.rank and s.shape[0] is None) for s in self.specs
        ]
        if not any(self._is_sequence):
            raise ValueError(
                f"Elements are {element_spec}; expected a part whose first dimension "
                "is None, which is what varies. Use `.batch` for elements of one "
                "shape, or set the dimension free with `tf.ensure_shape` in `.map`."
            )
        parts = as_arguments(element_spec)
        ends = [len(tf.nest.flatten(parts[: i + 1])) for i in range(len(parts))]
        varying = [i for i, varies in enumerate(self._is_sequence) if varies]
        self._of_inputs = [i for i in varying if i < ends[0]]
        self._of_targets = [i for i in varying if ends[0] <= i < (*ends, 0)[1]]
        self._check_mask(parts[0])
        self._check_weights(parts)
        self._fill = self._filled(options.padding_values)

    def as_tensors(self, *parts: Any) -> Any:
        """Returns an element whose rows of ragged tensors are plain tensors."""
        pairs = zip(tf.nest.flatten(parts), self.specs, strict=True)
        return self._joined([tf.ensure_shape(part, spec.shape) for part, spec in pairs])

    def length_of(self, *parts: Any) -> tf.Tensor:
        """Returns the length of an element, int64."""
        if self._length is None:
            pairs = zip(tf.nest.flatten(parts), self._is_sequence, strict=True)
            return tf.reduce_max([_size(leaf) for leaf, varies in pairs if varies])
        length = tf.convert_to_tensor(self._length(*parts))
        if not length.dtype.is_integer or length.shape.rank != 0:
            raise TypeError(
                f"`length` returned {length!r}; expected an integer scalar. Return "
                "the number of steps, such as `tf.shape(x)[0]`."
            )
        return tf.cast(length, tf.int64)

    def cut(self, boundary: int, *parts: Any) -> Any:
        """Returns an element with its sequences cut to a length."""
        pairs = zip(tf.nest.flatten(parts), self._is_sequence, strict=True)
        cut = [leaf[:boundary] if varies else leaf for leaf, varies in pairs]
        return self._joined(cut)

    def batch(
        self, window: tf.data.Dataset, boundary: tf.Tensor, size: tf.Tensor | int
    ) -> tf.data.Dataset:
        """Returns the elements of a window in batches, padded to a boundary."""
        shapes: Any = [
            [boundary, *spec.shape[1:]] if is_sequence else spec.shape
            for spec, is_sequence in zip(self.specs, self._is_sequence, strict=True)
        ]
        shapes = tf.nest.pack_sequence_as(self._spec, shapes)
        fill = tf.nest.pack_sequence_as(self._spec, self._fill)
        if self._mask is None and not self._weighs:
            return window.padded_batch(size, shapes, fill, self._drop_remainder)
        padded = window.map(lambda *parts: (self._joined(parts), self._sizes(parts)))
        shapes, fill = (shapes, [2]), (fill, tf.zeros([], tf.int64))
        padded = padded.padded_batch(size, shapes, fill, self._drop_remainder)
        return padded.map(self._finished)

    def _sizes(self, parts: tuple[Any, ...]) -> tf.Tensor:
        """Returns the lengths of the inputs' and of the targets' sequence, `(2,)`."""
        leaves = tf.nest.flatten(parts)
        found = [
            _size(leaves[of[0]]) if of else tf.zeros([], tf.int64)
            for of in (self._of_inputs, self._of_targets)
        ]
        return tf.stack(found)

    def _finished(self, element: Any, sizes: tf.Tensor) -> Any:
        """Returns a padded batch with its mask and weights, given `_sizes` of each."""
        parts = list(as_arguments(element))
        leaves = tf.nest.flatten(element)
        if self._mask is not None:
            width = tf.shape(leaves[self._of_inputs[0]])[1]
            mask = tf.sequence_mask(sizes[:, 0], width)
            parts[0] = {**parts[0], self._mask: mask}
        if self._weighs:
            width = tf.shape(leaves[self._of_targets[0]])[1]
            weights = tf.sequence_mask(sizes[:, 1], width, tf.float32)
            if len(parts) > 2:
                given = tf.cast(parts[2], tf.float32)
                weights *= given[:, None] if given.shape.rank == 1 else given
            parts[2:] = [weights]
        return tuple(parts) if isinstance(element, tuple) else parts[0]

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Returns the element whose parts tf.data handed over as arguments."""
        return tf.nest.pack_sequence_as(self._spec, tf.nest.flatten(parts))

    def _check_mask(self, inputs: Any) -> None:
        mask = self._mask
        if mask is None:
            return
        if not isinstance(inputs, dict) or not self._of_inputs:
            raise ValueError(
                f"`mask` is {mask!r}, and inputs are {inputs}; expected a dict with a "
                "sequence in it, which the mask can be added to. Make one in `.map`, "
                "or leave `mask` out: an `Embedding` with `mask_zero=True` masks "
                "padding by its zeros."
            )
        if mask in inputs:
            raise ValueError(
                f"`mask` is {mask!r}, which is one of the inputs {tuple(inputs)}; "
                "expected a new key. Choose another."
            )

    def _check_weights(self, parts: tuple[Any, ...]) -> None:
        if self._weighs and len(self._of_targets) != 1:
            raise ValueError(
                f"`weight_padding` is True, and elements are {parts}; expected "
                "(inputs, targets) with targets that are one sequence. Leave it out "
                "where there is one target for a whole sequence."
            )

    def _filled(self, values: Any) -> list[tf.Tensor]:
        """Returns what to pad each part with, as scalars of its dtype."""
        if values is None or not isinstance(values, (dict, tuple, list)):
            given = [values] * len(self.specs)
        else:
            try:
                tf.nest.assert_same_structure(values, self._spec)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"`padding_values` is {values!r}; expected one value, or a "
                    f"structure like the elements', {self._spec}. Give a number for "
                    "each part."
                ) from error
            given = tf.nest.flatten(values)
        return list(map(_fill_value, given, self.specs))


def _fill_value(value: Any, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns a scalar to pad with; zero where `value` is None or of another kind."""
    is_text = isinstance(value, (str, bytes))
    if value is None or is_text != (spec.dtype == tf.string):
        return tf.zeros([], spec.dtype)
    try:
        return tf.constant(value, spec.dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`padding_values` holds {value!r}; expected a number that "
            f"{spec.dtype.name} can hold. Pass a plain number."
        ) from error


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


def _size(leaf: tf.Tensor) -> tf.Tensor:
    return tf.shape(leaf, tf.int64)[0]
