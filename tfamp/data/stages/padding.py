"""Elements whose first dimension varies: which parts, how long, padded to what."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfamp.data._elements import as_arguments


@dataclasses.dataclass(frozen=True)
class Padding:
    """How sequences become one batch; `Pipeline.bucket` explains the fields."""

    length: Callable[..., Any] | None = None
    values: Any = None
    mask: str | None = None
    weighs: bool = False


class Padder:
    """Pads the elements of one dataset: the parts whose first dimension is None.

    Raises:
        ValueError: The elements are no sequences, or lack what `padding` asks for.
    """

    def __init__(self, padding: Padding, element_spec: Any) -> None:
        self._padding = padding
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
        self._of_inputs = self._sequences_within(0, ends[0])
        self._of_targets = self._sequences_within(*ends[:2]) if ends[1:] else []
        self._check_mask(parts[0])
        self._check_weights(parts)
        self._fill = self._filled(padding.values)

    def as_tensors(self, *parts: Any) -> Any:
        """Returns an element whose rows of ragged tensors are plain tensors."""
        pairs = zip(tf.nest.flatten(parts), self.specs, strict=True)
        leaves = [tf.ensure_shape(leaf, spec.shape) for leaf, spec in pairs]
        return tf.nest.pack_sequence_as(self._spec, leaves)

    def length_of(self, *parts: Any) -> tf.Tensor:
        """Returns the length of an element, int64."""
        if self._padding.length is None:
            leaves = tf.nest.flatten(parts)
            pairs = zip(leaves, self._is_sequence, strict=True)
            return tf.reduce_max([_size(leaf) for leaf, varies in pairs if varies])
        length = tf.convert_to_tensor(self._padding.length(*parts))
        if not length.dtype.is_integer or length.shape.rank != 0:
            raise TypeError(
                f"`length` returned {length!r}; expected an integer scalar. Return "
                "the number of steps, such as `tf.shape(x)[0]`."
            )
        return tf.cast(length, tf.int64)

    def cut(self, boundary: int, *parts: Any) -> Any:
        """Returns an element with its sequences cut to a length."""
        leaves = [
            leaf[:boundary] if is_sequence else leaf
            for leaf, is_sequence in zip(
                tf.nest.flatten(parts), self._is_sequence, strict=True
            )
        ]
        return tf.nest.pack_sequence_as(self._spec, leaves)

    def batch(
        self,
        window: tf.data.Dataset,
        boundary: tf.Tensor,
        size: tf.Tensor | int,
        *,
        drop_remainder: bool,
    ) -> tf.data.Dataset:
        """Returns the elements of a window in batches, padded to a boundary."""
        shapes = [
            [boundary, *spec.shape[1:]] if is_sequence else spec.shape
            for spec, is_sequence in zip(self.specs, self._is_sequence, strict=True)
        ]
        fill = list(self._fill)
        if self._padding.mask is None and not self._padding.weighs:
            return window.padded_batch(
                size,
                tf.nest.pack_sequence_as(self._spec, shapes),
                tf.nest.pack_sequence_as(self._spec, fill),
                drop_remainder=drop_remainder,
            )
        padded = window.map(lambda *parts: (self._joined(parts), self._sizes(parts)))
        padded = padded.padded_batch(
            size,
            (tf.nest.pack_sequence_as(self._spec, shapes), [2]),
            (tf.nest.pack_sequence_as(self._spec, fill), tf.zeros([], tf.int64)),
            drop_remainder=drop_remainder,
        )
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
        if self._padding.mask is not None:
            width = tf.shape(leaves[self._of_inputs[0]])[1]
            mask = tf.sequence_mask(sizes[:, 0], width)
            parts[0] = {**parts[0], self._padding.mask: mask}
        if self._padding.weighs:
            width = tf.shape(leaves[self._of_targets[0]])[1]
            weights = tf.sequence_mask(sizes[:, 1], width, tf.float32)
            if len(parts) > 2:
                given = tf.cast(parts[2], tf.float32)
                weights *= given[:, None] if given.shape.rank == 1 else given
            parts[2:] = [weights]
        return tuple(parts) if isinstance(element, tuple) else parts[0]

    def _joined(self, parts: tuple[Any, ...]) -> Any:
        """Returns the element whose parts tf.data handed over as arguments."""
        return tf.nest.pack_sequence_as(self._spec, tf.nest.flatten(parts))

    def _sequences_within(self, start: int, end: int) -> list[int]:
        return [i for i in range(start, end) if self._is_sequence[i]]

    def _check_mask(self, inputs: Any) -> None:
        mask = self._padding.mask
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
        if self._padding.weighs and len(self._of_targets) != 1:
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
        return [
            _fill_value(value, spec)
            for value, spec in zip(given, self.specs, strict=True)
        ]


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
