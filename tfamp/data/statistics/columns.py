"""Which parts of an element are inputs, and which of their axes are features.

Inputs are `x` of an element x, (x, y) or (x, y, sample_weight): one tensor, or a dict
of them. A scalar in each example is one feature; otherwise the entries of the last
axis are the features, so an image has one per channel.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data._elements import looks_batched

# What the only column is called where inputs are one tensor.
TENSOR = "x"
# Kinds of values that have statistics.
_KINDS = "floats, integers, booleans and text"


def inputs_of(element: Any) -> Any:
    """Returns `x` of an element x, (x, y) or (x, y, sample_weight).

    Example:
        >>> inputs_of(({"age": 3}, 1)), inputs_of(7)
        ({'age': 3}, 7)
    """
    return element[0] if isinstance(element, (tuple, list)) else element


def with_inputs(element: Any, inputs: Any) -> Any:
    """Returns the element with other inputs.

    Example:
        >>> with_inputs((1, "label"), 2), with_inputs(1, 2)
        ((2, 'label'), 2)
    """
    if isinstance(element, (tuple, list)):
        return (inputs, *element[1:])
    return inputs


def named_columns(inputs: Any) -> dict[str, Any]:
    """Returns the columns of inputs by name, a lone tensor under "x".

    Raises:
        TypeError: The inputs are neither a tensor nor a flat dict of tensors.

    Example:
        >>> named_columns({"age": 3}), named_columns(7)
        ({'age': 3}, {'x': 7})
    """
    columns = dict(inputs) if isinstance(inputs, Mapping) else {TENSOR: inputs}
    for name, value in columns.items():
        structured = isinstance(value, (Mapping, tuple, list))
        if structured or not isinstance(name, str):
            raise TypeError(
                f"Inputs have a part {name!r} of type {type(value).__name__}; expected "
                "one tensor, or a dict of tensors by name. Map the elements to "
                "`({'name': tensor, ...}, y)` first."
            )
    return columns


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the columns of a dataset look like.

    Attributes:
        names: The columns, in the order of the elements.
        specs: One `tf.TensorSpec` for each.
        named: Whether inputs are a dict.
        batched: Whether the first axis counts examples.
        reason: How `batched` was found, as a sentence.
    """

    names: tuple[str, ...]
    specs: tuple[tf.TensorSpec, ...]
    named: bool
    batched: bool
    reason: str

    def is_scalar(self, name: str) -> bool:
        """Whether a column holds one value per example, without an axis."""
        spec = self.specs[self.names.index(name)]
        return spec.shape.rank == int(self.batched)

    def num_features(self, name: str) -> int:
        """Returns how many features a column has."""
        spec = self.specs[self.names.index(name)]
        return 1 if self.is_scalar(name) else int(spec.shape[-1])


def read_layout(
    element_spec: Any,
    *,
    columns: Sequence[str] | None = None,
    batched: bool | None = None,
) -> Layout:
    """Returns the layout of a dataset's inputs.

    Args:
        element_spec: As `tf.data.Dataset.element_spec` gives it.
        columns: The columns of a dict to keep, in their order; None for all.
        batched: Whether elements are batches; None to tell from the shapes.

    Raises:
        TypeError: A part has no statistics: ragged, sparse, complex, nested.
        ValueError: `columns` names none of the dict's, a shape doesn't say how many
            features there are, or shapes don't tell batches from examples.

    Example:
        >>> layout = read_layout((tf.TensorSpec((None, 3)), tf.TensorSpec((None,))))
        >>> layout.names, layout.batched, layout.num_features("x")
        (('x',), True, 3)
    """
    inputs = inputs_of(element_spec)
    specs = named_columns(inputs)
    named = isinstance(inputs, Mapping)
    if columns is not None:
        specs = _selected(specs, columns, named=named)
    for name, spec in specs.items():
        _check_kind(name, spec)
    if batched is None:
        batched, reason = _tell_batched(element_spec, specs)
    else:
        reason = f"`batched={batched}` was given"
    layout = Layout(tuple(specs), tuple(specs.values()), named, batched, reason)
    for name, spec in specs.items():
        _check_shape(name, spec, batched)
    return layout


def _selected(
    specs: dict[str, Any], columns: Sequence[str], *, named: bool
) -> dict[str, Any]:
    """Returns the columns that were asked for."""
    if not named:
        raise ValueError(
            f"`columns` is {columns!r}, and inputs are one tensor without names; "
            "expected None. Leave it out, or make the inputs a dict."
        )
    unknown = tuple(name for name in columns if name not in specs)
    if unknown or isinstance(columns, str) or not columns:
        raise ValueError(
            f"`columns` is {columns!r}; expected a tuple of names among "
            f"{tuple(specs)!r}. Correct it, or leave it out for all."
        )
    return {name: specs[name] for name in columns}


def _check_kind(name: str, spec: Any) -> None:
    """Raises unless a column is a dense tensor of numbers or text."""
    if not isinstance(spec, tf.TensorSpec):
        what = type(spec).__name__.removesuffix("Spec")
        advice = "Pad or densify it with `.to_tensor()`, or pass `columns` without it"
    elif not (
        spec.dtype.is_floating
        or spec.dtype.is_integer
        or spec.dtype in (tf.bool, tf.string)
    ):
        what, advice = spec.dtype.name, "Convert it, or pass `columns` without it"
    else:
        return
    raise TypeError(
        f"Column {name!r} is of kind {what}; expected dense tensors of {_KINDS}. "
        f"{advice}."
    )


def _check_shape(name: str, spec: tf.TensorSpec, batched: bool) -> None:
    """Raises unless the number of features is known."""
    rank = spec.shape.rank
    if rank is None or (batched and rank == 0):
        expected = "a known number of axes" if rank is None else "a first axis"
    elif rank == int(batched) or spec.shape[-1]:
        return
    else:
        expected = "a last axis of known size, at least 1, which holds the features"
    raise ValueError(
        f"Column {name!r} has shape {spec.shape} with `batched={batched}`; expected "
        f"{expected}. Set it with `tf.ensure_shape` in a map."
    )


def _tell_batched(element_spec: Any, specs: dict[str, Any]) -> tuple[bool, str]:
    """Returns whether elements are batches, and why, or raises if it's unclear."""
    if looks_batched(element_spec):
        return True, "the first dimension of every part is unknown"
    shapes = [
        spec.shape
        for spec in tf.nest.flatten(element_spec)
        if isinstance(spec, tf.TensorSpec)
    ]
    if any(shape.rank == 0 for shape in shapes):
        return False, "a part is a scalar"
    if len(shapes) == 1:
        return False, f"elements of shape {shapes[0]} are taken for single ones"
    if len({shape[0] for shape in shapes if shape.rank}) > 1:
        return False, "the first dimensions of the parts differ"
    # Right or wrong, only `num_examples` hangs on it: the last axis stays the last.
    if all(spec.shape.rank is None or spec.shape.rank > 1 for spec in specs.values()):
        return True, "the first dimensions of all parts are equal"
    raise ValueError(
        f"Elements {element_spec} may be batches of scalars or single vectors; "
        "expected shapes that tell. Pass `batched=True` or `batched=False`."
    )
