"""`fit_statistics`: one pass over a dataset, whatever its length."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import batched_by_stages, known_length
from tfamp.data._progress import progress
from tfamp.data.statistics.accumulators import NumberColumn, TextAccumulator
from tfamp.data.statistics.columns import (
    Layout,
    inputs_of,
    named_columns,
    read_layout,
)
from tfamp.data.statistics.missing import MissingValues, by_column
from tfamp.data.statistics.record import Statistics

# Examples are read in chunks of about this size, and of no more than so many.
_CHUNK_BYTES = 8 * 2**20
_MAX_CHUNK_EXAMPLES = 4096
# What a string is taken to measure.
_TEXT_BYTES = 32


def fit_statistics(
    dataset: Any,
    *,
    columns: Sequence[str] | None = None,
    missing_value: MissingValues = None,
    batched: bool | None = None,
) -> Statistics:
    """Returns the statistics of a dataset's inputs, read in one pass.

    Counts, mean, variance, minimum and maximum are exact: float64, merged by
    Welford's method. Quantiles and mode are exact up to 10,000 distinct values of a
    feature; beyond that, ranks are off by less than 0.001 of the count. NaN and inf
    are counted and touch nothing else. Memory is up to 0.4 MiB per feature, whatever
    the dataset's length.

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
    if not isinstance(dataset, tf.data.Dataset) and not hasattr(dataset, "build"):
        return _fit_arrays(dataset, columns, missing_value, batched)
    if hasattr(dataset, "build"):
        if batched is None:
            batched = batched_by_stages(dataset)
        dataset = dataset.build()
    if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "`dataset` is infinite, so its statistics never end; expected one pass. "
            "Leave out `.repeat()`, or pass `dataset.take(n)`."
        )
    layout = read_layout(dataset.element_spec, columns=columns, batched=batched)
    accumulators = _accumulators(layout, missing_value)
    total = None if layout.batched else known_length(dataset)
    examples = 0
    with progress("Reading statistics", total, unit="examples") as update:
        for chunk in _chunks(dataset, layout):
            examples += _add(accumulators, chunk, layout)
            update(examples)
    return _finish(accumulators, layout, examples)


def _fit_arrays(
    arrays: Any,
    columns: Sequence[str] | None,
    missing_value: MissingValues,
    batched: bool | None,
) -> Statistics:
    """Reads arrays without copying them into a dataset."""
    inputs = named_columns(inputs_of(arrays))
    for name, value in inputs.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise TypeError(
                f"`dataset` holds {name!r} of type {type(value).__name__}; expected a "
                "tf.data.Dataset, a Pipeline, or arrays `(examples, ...)`. Convert "
                "lists with `np.asarray`."
            )
    if batched is False:
        raise ValueError(
            "`batched` is False, and `dataset` is arrays; expected None, since the "
            "first axis of arrays counts examples. Leave it out."
        )
    values = {name: np.asarray(value) for name, value in inputs.items()}
    specs = {
        name: tf.TensorSpec((None, *value.shape[1:]), _tensor_dtype(value))
        for name, value in values.items()
    }
    named = isinstance(inputs_of(arrays), Mapping)
    spec = specs if named else next(iter(specs.values()))
    layout = read_layout(spec, columns=columns, batched=True)
    lengths = {name: len(values[name]) for name in layout.names}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"Columns have lengths {lengths!r}; expected the same number of examples "
            "in each. Pass arrays whose rows belong together."
        )
    accumulators = _accumulators(layout, missing_value)
    examples = next(iter(lengths.values()))
    size = _chunk_examples(layout)
    with progress("Reading statistics", examples, unit="examples") as update:
        for start in range(0, examples, size):
            chunk = {name: values[name][start : start + size] for name in layout.names}
            update(start + _add(accumulators, chunk, layout))
    return _finish(accumulators, layout, examples)


def _tensor_dtype(value: np.ndarray) -> tf.DType:
    """Returns the tensor dtype of an array; objects are taken for text."""
    return tf.string if value.dtype.kind in "OSU" else tf.as_dtype(value.dtype)


def _accumulators(layout: Layout, missing_value: MissingValues) -> dict[str, Any]:
    """Returns an accumulator for each column."""
    dtypes = {
        name: np.dtype(object) if spec.dtype == tf.string else spec.dtype.as_numpy_dtype
        for name, spec in zip(layout.names, layout.specs, strict=True)
    }
    dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
    missing = by_column(missing_value, dtypes)
    return {
        name: TextAccumulator(name, missing[name])
        if dtype.kind == "O"
        else NumberColumn(name, layout.num_features(name), dtype, missing[name])
        for name, dtype in dtypes.items()
    }


def _chunk_examples(layout: Layout) -> int:
    """Returns how many examples to read at once."""
    example_bytes = 0
    for spec in layout.specs:
        shape = spec.shape[1:] if layout.batched else spec.shape
        size = _TEXT_BYTES if spec.dtype == tf.string else spec.dtype.size
        example_bytes += size * (shape.num_elements() or 1)
    return int(np.clip(_CHUNK_BYTES // max(1, example_bytes), 1, _MAX_CHUNK_EXAMPLES))


def _chunks(dataset: tf.data.Dataset, layout: Layout) -> Iterator[dict[str, Any]]:
    """Yields the columns of many examples at once where their shapes allow it."""

    def keep(*parts: Any) -> dict[str, tf.Tensor]:
        inputs = named_columns(inputs_of(parts))
        return {name: inputs[name] for name in layout.names}

    kept = dataset.map(keep)
    fixed = all(spec.shape.is_fully_defined() for spec in layout.specs)
    if not layout.batched and fixed:
        kept = kept.batch(_chunk_examples(layout))
    return kept.prefetch(2).as_numpy_iterator()


def _add(
    accumulators: dict[str, Any], chunk: Mapping[str, np.ndarray], layout: Layout
) -> int:
    """Adds a chunk to all columns; returns how many examples it holds."""
    for name, accumulator in accumulators.items():
        accumulator.add(np.asarray(chunk[name]))
    name, spec = layout.names[0], layout.specs[0]
    # An example of unknown shape comes alone, without an axis for examples.
    alone = not layout.batched and np.ndim(chunk[name]) == spec.shape.rank
    return 1 if alone else len(chunk[name])


def _finish(accumulators: dict[str, Any], layout: Layout, examples: int) -> Statistics:
    """Returns the record."""
    if not examples:
        raise ValueError(
            "`dataset` has no element, so it has no statistics; expected at least one. "
            "Look at its source, and at filters and `take` before this."
        )
    columns = tuple(
        accumulator.finish(scalar=layout.is_scalar(name))
        for name, accumulator in accumulators.items()
    )
    reading = "batches" if layout.batched else "single examples"
    return Statistics(
        columns=columns,
        num_examples=examples,
        named=layout.named,
        reading=f"elements read as {reading}: {layout.reason}",
    )
