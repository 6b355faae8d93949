"""`fit_statistics`: one pass over a dataset, whatever its length."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data import _elements
from tfamp.data.profile import examples
from tfamp.data.statistics.accumulators import (
    NumberAccumulator,
    TextAccumulator,
)
from tfamp.data.statistics.missing import MissingValues, by_column
from tfamp.data.statistics.record import Statistics
from tfamp.records.progress import progress


def fit_statistics(
    dataset: Any,
    *,
    columns: Sequence[str] | None = None,
    missing_value: MissingValues = None,
    batched: bool | None = None,
) -> Statistics:
    """Returns the statistics of a dataset's inputs, read in one pass.

    Counts, mean, variance, minimum and maximum are exact: float64, merged by
    Welford's method. Quantiles and mode are exact up to 100,000 rows, and of 8-bit
    numbers always; beyond that they are those of 100,000 rows drawn at random (10,000
    where a column has more than 1,600 features). The rank of a quantile q then has a
    standard error of sqrt(q (1 - q) / 100,000): 0.16 % at the median, 0.03 % at the
    first percentile. Texts are counted exactly while at most 10,000 differ. NaN and
    inf are counted and touch nothing else. Memory is up to 0.8 MiB per feature,
    twice that of float64, whatever the dataset's length.

    The features of a tensor are the entries of its last axis: columns of a table,
    channels of an image. Targets and sample weights are left out.

    Args:
        dataset: A `tf.data.Dataset` of examples or batches, x, (x, y) or
            (x, y, sample_weight), where x is a tensor or a dict of them; a
            `tfamp.data.Pipeline`; or arrays `(examples, ...)` in the same forms.
            Without augmentation, and the training part alone: statistics of
            validation data in the model are a leak.
        columns: The columns of a dict to read, in the order in which a layer joins
            them; None for all.
        missing_value: What stands for a missing value besides NaN: a number, a
            text, several, or a dict of these by column.
        batched: Whether elements are batches; None to tell from the stages of a
            pipeline, else from their shapes.

    Returns:
        A record that prints as a table, goes to JSON, and makes a layer.

    Raises:
        TypeError: Inputs are nested, ragged, sparse or complex.
        ValueError: The dataset is empty or infinite, a feature has no finite value,
            shapes don't tell batches from examples, or an argument doesn't suit.

    Example:
        >>> import numpy as np
        >>> ages = np.array([[20.0], [np.nan], [40.0]], np.float32)
        >>> statistics = fit_statistics(ages)
        >>> statistics["x"].array("mean"), statistics["x"].array("missing")
        (array([30.]), array([1]))
    """
    is_stream = isinstance(dataset, tf.data.Dataset) or hasattr(dataset, "build")
    if not is_stream:
        if batched is False:
            raise ValueError(
                "`batched` is False, and `dataset` is arrays; expected None, since the "
                "first axis of arrays counts examples. Leave it out."
            )
        # A list of x and y is no tuple of columns.
        dataset = tuple(dataset) if isinstance(dataset, list) else dataset
    named = False
    paths: dict[str, str] = {}

    def select(element: Any) -> list[str]:
        nonlocal named
        inputs = _elements.inputs_of(element)
        named = isinstance(inputs, Mapping)
        names = _selected(_elements.named_columns(inputs), columns, named=named)
        paths.update((f"x/{name}" if named else "x", name) for name in names)
        return list(paths)

    read = examples.read(
        "dataset", dataset, batched=batched, select=select, tell_unclear=_tell_unclear
    )
    for column in read.columns:
        _check_shape(paths[column.name], column)
    dtypes = {paths[column.name]: _numpy_dtype(column.dtype) for column in read.columns}
    missing = by_column(missing_value, dtypes)
    accumulators = {
        column.name: TextAccumulator(paths[column.name], missing[paths[column.name]])
        if column.is_text
        else NumberAccumulator(paths[column.name], column, missing[paths[column.name]])
        for column in read.columns
    }
    num_examples = 0
    unit = "batches" if read.in_elements else "examples"
    with progress("Reading statistics", read.length, unit=unit) as update:
        for num_chunks, chunk in enumerate(read.chunks(), start=1):
            for name, accumulator in accumulators.items():
                accumulator.add(chunk[name])
            num_examples += len(next(iter(chunk.values())))
            update(num_chunks if read.in_elements else num_examples)
    if not num_examples:
        raise examples.empty("dataset")
    is_batches = read.in_elements or not is_stream
    reading = "batches" if is_batches else "single examples"
    return Statistics(
        columns=tuple(
            accumulators[column.name].finish(scalar=column.shape == ())
            for column in read.columns
        ),
        num_examples=num_examples,
        named=named,
        reading=f"elements read as {reading}: {read.reason}",
    )


def _selected(
    inputs: Mapping[str, Any], columns: Sequence[str] | None, *, named: bool
) -> Sequence[str]:
    """Returns the names of the columns that were asked for."""
    if columns is None:
        return tuple(inputs)
    if not named:
        raise ValueError(
            f"`columns` is {columns!r}, and inputs are one tensor without names; "
            "expected None. Leave it out, or make the inputs a dict."
        )
    unknown = tuple(name for name in columns if name not in inputs)
    if unknown or isinstance(columns, str) or not columns:
        raise ValueError(
            f"`columns` is {columns!r}; expected a tuple of names among "
            f"{tuple(inputs)!r}. Correct it, or leave it out for all."
        )
    return columns


def _tell_unclear(element_spec: Any) -> tuple[bool, str]:
    """Returns whether elements are batches where their shapes leave it open."""
    shapes = [spec.shape for spec in tf.nest.flatten(element_spec)]
    if len(shapes) == 1:
        return False, f"elements of shape {shapes[0]} are taken for single ones"
    inputs = tf.nest.flatten(_elements.inputs_of(element_spec))
    # Right or wrong, only `num_examples` hangs on it: the last axis stays the last.
    if all(spec.shape.rank > 1 for spec in inputs):
        return True, "the first dimensions of all parts are equal"
    raise ValueError(
        f"Elements {element_spec} may be batches of scalars or single vectors; "
        "expected shapes that tell. Pass `batched=True` or `batched=False`."
    )


def _check_shape(name: str, column: examples.Column) -> None:
    """Raises unless the number of features is known."""
    if column.shape and not column.shape[-1]:
        raise ValueError(
            f"Column {name!r} has examples of shape {column.shape}; expected a last "
            "axis of known size, at least 1, which holds the features. Set it with "
            "`tf.ensure_shape` in a map."
        )


def _numpy_dtype(dtype: str) -> np.dtype:
    """Returns the NumPy dtype of a column; objects stand for text."""
    return np.dtype(object if dtype == "string" else tf.as_dtype(dtype).as_numpy_dtype)
