"""What a dataset tells about its elements, most of it without reading one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

# Of a tensor beside its values: its shape, its buffer, and their places in memory. By
# the resident memory of 300,000 elements in a shuffle: 160 to 210 for numbers, of which
# one or ten make an element, and up to 510 for texts.
_TENSOR_BYTES = 200
_TEXT_TENSOR_BYTES = 300
# What the only column is called where inputs are one tensor.
TENSOR = "x"


def as_arguments(element: Any) -> tuple[Any, ...]:
    """Returns an element as `Dataset.map` hands it over: a tuple is several."""
    return element if isinstance(element, tuple) else (element,)


def from_arguments(parts: tuple[Any, ...]) -> Any:
    """Returns the element that `Dataset.map` handed to a function as `parts`."""
    return parts[0] if len(parts) == 1 else parts


def inputs_of(element: Any) -> Any:
    """Returns `x` of an element x, (x, y) or (x, y, sample_weight)."""
    return element[0] if isinstance(element, (tuple, list)) else element


def with_inputs(element: Any, inputs: Any) -> Any:
    """Returns the element with other inputs."""
    if isinstance(element, (tuple, list)):
        return (inputs, *element[1:])
    return inputs


def named_columns(inputs: Any) -> dict[str, Any]:
    """Returns the columns of inputs by name, a lone tensor under "x", or raises.

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


def blank(element_spec: Any, *, purpose: str) -> Any:
    """Returns an element of a spec that holds nothing: zeros, unknown sizes 0.

    The purpose is what needs it, for the error where a part is ragged, sparse or of
    unknown rank.
    """

    def blank_part(spec: tf.TypeSpec) -> tf.Tensor:
        if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
            raise TypeError(
                f"Elements hold {spec!r}; expected dense tensors of known rank where "
                f"{purpose}. Set the shape in `.map` (`tf.ensure_shape`), or make the "
                "part dense (`.to_tensor()`)."
            )
        shape = [size or 0 for size in spec.shape]
        return tf.zeros(shape, spec.dtype)  # of text "", as of every dtype

    return tf.nest.map_structure(blank_part, element_spec)


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements, None where it is unknown or infinite."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def with_length_of(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose length is known where that of another one is."""
    cardinality = int(like.cardinality())
    if cardinality == int(tf.data.UNKNOWN_CARDINALITY):
        return dataset
    return with_length(dataset, cardinality)


def with_length(dataset: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Returns a dataset whose length is told, and checked at the end of a pass."""
    return dataset.apply(tf.data.experimental.assert_cardinality(length))


def of_unknown_length(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of the same elements whose length tf.data does not know."""
    return dataset.filter(lambda *parts: True)


def never_empty(dataset: tf.data.Dataset, message: str) -> tf.data.Dataset:
    """Returns a dataset of which a pass that brings nothing is an error.

    That is a `tf.errors.InvalidArgumentError` with the message. Datasets of which no
    element can be made up, such as ragged ones, are returned as they are.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    is_plain = all(
        isinstance(one, tf.TensorSpec)
        and one.shape.rank is not None
        and one.dtype not in (tf.variant, tf.resource)
        for one in specs
    )
    if is_endless(dataset) or not is_plain:
        return dataset
    end = tf.data.Dataset.from_tensors(
        (True, blank(dataset.element_spec, purpose="a mark ends them"))
    )
    marked = dataset.map(lambda *parts: (False, from_arguments(parts)))

    def check(number: tf.Tensor, marked: Any) -> Any:
        is_end, element = marked
        is_fine = tf.logical_or(number > 0, tf.logical_not(is_end))
        with tf.control_dependencies([tf.debugging.Assert(is_fine, [message])]):
            return tf.identity(is_end), element

    checked = marked.concatenate(end).enumerate().map(check)
    kept = checked.filter(lambda is_end, element: tf.logical_not(is_end))
    return with_length_of(dataset, kept.map(lambda is_end, element: element))


def is_endless(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset is known to have no end."""
    return int(dataset.cardinality()) == int(tf.data.INFINITE_CARDINALITY)


def bytes_of_element(element_spec: Any) -> int | None:
    """Returns the size of one element, None where a shape or a size is not known.

    Example:
        >>> bytes_of_element((tf.TensorSpec((8, 8, 1), tf.uint8),
        ...                   tf.TensorSpec((), tf.int64)))
        72
    """
    total = 0
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec):
            return None
        size = None if spec.dtype == tf.string else spec.dtype.size
        num_values = spec.shape.num_elements()
        if num_values is None or size is None:
            return None
        total += num_values * size
    return total


def bytes_held(element_spec: Any) -> int | None:
    """Returns the memory of one element in a buffer, None where that is not known.

    Example:
        >>> bytes_held({"a": tf.TensorSpec(()), "b": tf.TensorSpec(())})  # 8 of values
        408
    """
    values = bytes_of_element(element_spec)
    if values is None:
        return None
    return values + _TENSOR_BYTES * len(tf.nest.flatten(element_spec))


def bytes_of_first(
    dataset: tf.data.Dataset, count: int, *, beside: int = _TEXT_TENSOR_BYTES
) -> int | None:
    """Returns the mean bytes of the first elements, None where they cannot be read.

    So many stand beside the values of each tensor: by default those of a buffer.
    """
    total = num_elements = 0
    try:
        for element in dataset.take(count):
            parts = tf.nest.flatten(element, expand_composites=True)
            total += sum(beside + _bytes_of_values(part) for part in parts)
            num_elements += 1
    except tf.errors.OpError:
        return None  # the pass itself says what is wrong
    return total // num_elements if num_elements else None


def _bytes_of_values(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return sum(map(len, np.ravel(np.asarray(tensor.numpy(), object))))
    if tensor.dtype in (tf.variant, tf.resource):
        return 0
    return int(tf.size(tensor)) * tensor.dtype.size


def looks_batched(element_spec: Any) -> bool:
    """Whether every part of an element begins with an unknown dimension.

    That is how tf.data types a batch whose last one may be smaller. Labels of
    single examples are scalars, so a labelled dataset rarely looks so by chance.

    Example:
        >>> looks_batched((tf.TensorSpec((None, 8), tf.float32),
        ...                tf.TensorSpec((None,), tf.int64)))
        True
    """
    shapes = [
        spec.shape
        for spec in tf.nest.flatten(element_spec)
        if isinstance(spec, tf.TensorSpec)
    ]
    return bool(shapes) and all(
        shape.rank is not None and shape.rank > 0 and shape[0] is None
        for shape in shapes
    )


def batched_by_stages(pipeline: Any) -> bool | None:
    """Returns whether a pipeline makes batches, None where its shapes must tell."""
    if {"batch", "bucket"} & {stage.name for stage in pipeline.stages}:
        return True
    return False if pipeline.source.gives_examples else None
