"""What a dataset tells about its elements without reading one."""

from typing import Any

import tensorflow as tf


def known_length(dataset: tf.data.Dataset) -> int | None:
    """Returns the number of elements, None where it is unknown or infinite."""
    cardinality = int(dataset.cardinality())
    return cardinality if cardinality >= 0 else None


def with_length_of(like: tf.data.Dataset, dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset whose length is known where that of another one is."""
    cardinality = int(like.cardinality())
    if cardinality == int(tf.data.UNKNOWN_CARDINALITY):
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def bytes_of_element(element_spec: Any) -> int | None:
    """Returns the size of one element, None where a shape or a size is not known.

    Example:
        >>> bytes_of_element((tf.TensorSpec((8, 8, 1), tf.uint8),
        ...                   tf.TensorSpec((), tf.int64)))
        72
        >>> bytes_of_element(tf.TensorSpec((None,), tf.int32)) is None
        True
    """
    total = 0
    for spec in tf.nest.flatten(element_spec):
        if not isinstance(spec, tf.TensorSpec) or spec.dtype == tf.string:
            return None
        num_values = spec.shape.num_elements()
        if num_values is None:
            return None
        total += num_values * spec.dtype.size
    return total


def looks_batched(element_spec: Any) -> bool:
    """Whether every part of an element begins with an unknown dimension.

    That is how tf.data types a batch whose last one may be smaller. Labels of
    single examples are scalars, so a labelled dataset rarely looks so by chance.

    Example:
        >>> looks_batched((tf.TensorSpec((None, 8), tf.float32),
        ...                tf.TensorSpec((None,), tf.int64)))
        True
        >>> looks_batched((tf.TensorSpec((None,), tf.int64),
        ...                tf.TensorSpec((), tf.int64)))
        False
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
