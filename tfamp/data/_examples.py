"""Reads any form of training data as chunks of named NumPy arrays, in one pass."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tfamp.data._elements import looks_batched
from tfamp.records.console import progress

Role = Literal["input", "target", "weight"]
_ROLES: dict[str, Role] = {"x": "input", "y": "target", "sample_weight": "weight"}
# Single examples are joined to chunks of this size, arrays are cut into them.
_CHUNK_BYTES = 16 * 2**20
_MAX_CHUNK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class Column:
    """One tensor of the examples."""

    name: str  # "x", "x/age", "x/0", "y", "sample_weight"
    role: Role
    dtype: str
    shape: tuple[int | None, ...]  # of one example; None where it varies

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self.dtype == "string"

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point numbers."""
        return "float" in self.dtype

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers; booleans are none."""
        return "int" in self.dtype


@dataclasses.dataclass(frozen=True)
class Examples:
    """Data that can be read once, chunk by chunk."""

    argument: str  # it was given as, for messages
    columns: tuple[Column, ...]
    length: int | None  # examples, or batches where `in_elements`; for progress
    in_elements: bool
    # A dataset of chunks, or arrays, either by column.
    source: Any = dataclasses.field(repr=False)

    def chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields arrays by column; the first axis counts examples."""
        if not isinstance(self.source, dict):
            yield from self.source.prefetch(2).as_numpy_iterator()
            return
        length = self.length or 0
        num_bytes = sum(array.nbytes for array in self.source.values())
        step = _rows_of_chunk(math.ceil(num_bytes / length))
        for start in range(0, length, step):
            yield {name: a[start : start + step] for name, a in self.source.items()}

    def scan(
        self, description: str, take: Callable[[dict[str, np.ndarray]], None]
    ) -> int:
        """Gives every chunk to `take`, behind a progress bar, and counts the examples.

        This is the one pass that `check` and `fit_statistics` make.
        """
        num_examples = 0
        unit = "batches" if self.in_elements else "examples"
        with progress(description, self.length, unit=unit) as update:
            for num_chunks, chunk in enumerate(self.chunks(), start=1):
                take(chunk)
                num_examples += len(next(iter(chunk.values())))
                update(num_chunks if self.in_elements else num_examples)
        if not num_examples:
            raise _empty(self.argument)
        return num_examples


def read(
    argument: str,
    data: Any,
    *,
    batched: bool | None = None,
    select: Callable[[Any], Sequence[str]] | None = None,
    are_single: bool = False,
) -> Examples:
    """Returns the examples of data in any form that `check` and `fit_statistics` take.

    Args:
        argument: The argument's name, for messages.
        data: A dataset, a pipeline or arrays.
        batched: Whether a dataset's elements are batches; None to tell.
        select: Gives the names of the columns to read, from an element or its spec.
        are_single: Whether elements of one part are examples where their shapes leave
            it open; else they are taken as `fit` does.
    """
    if callable(getattr(data, "build", None)):
        if batched is None:
            batched = data.makes_batches
        data = data.build()
    if not isinstance(data, tf.data.Dataset):
        return _array_examples(argument, data, select)
    cardinality = int(data.cardinality())
    if cardinality == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{argument}` is a dataset without end; expected one that ends. Leave "
            f"out `.repeat()`, or pass `{argument}.take(num_batches)`."
        )
    names = None if select is None else select(data.element_spec)
    specs = _chosen(data.element_spec, names)
    for name, spec in specs.items():
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                f"Column {name!r} of `{argument}` is {spec!r}; expected a dense "
                "tensor. Map it to one first: `.to_tensor()` of a ragged tensor, "
                "`tf.sparse.to_dense` of a sparse one."
            )
    if batched is None:
        batched = _are_batches(data.element_spec, are_single)
    columns = []
    for name, spec in specs.items():
        if batched and spec.shape.rank == 0:
            raise ValueError(
                f"Column {name!r} of `{argument}` is a scalar; expected a first axis "
                "that counts examples, as of batches. Pass `batched=False`."
            )
        shape = (None,) if spec.shape.rank is None else tuple(spec.shape)[batched:]
        columns.append(_column(name, spec.dtype.name, shape))
    chunks = data.map(lambda *parts: _chosen(parts, names))
    if not batched:
        chunks = _joined(chunks, list(specs.values()))
    length = cardinality if cardinality >= 0 else None
    return Examples(argument, tuple(columns), length, batched, chunks)


def _chosen(element: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Returns the columns of an element that are read."""
    parts = flatten(element)
    return parts if names is None else {name: parts[name] for name in names}


def flatten(element: Any) -> dict[str, Any]:
    """Returns the parts of an element by column name.

    Example:
        >>> flatten(({"a": 1, "b": (2, 3)}, 4))
        {'x/a': 1, 'x/b/0': 2, 'x/b/1': 3, 'y': 4}
    """
    parts = element if type(element) is tuple else (element,)
    if len(parts) > len(_ROLES):
        raise ValueError(
            f"Elements have {len(parts)} parts; expected x, (x, y) or "
            "(x, y, sample_weight). Map them to that form, as `fit` needs it."
        )
    found: dict[str, Any] = {}

    def add(name: str, part: Any) -> None:
        if isinstance(part, Mapping):
            for key, value in part.items():
                add(f"{name}/{key}", value)
        elif isinstance(part, (tuple, list)):
            for number, value in enumerate(part):
                add(f"{name}/{number}", value)
        elif part is not None:
            found[name] = part

    for name, part in zip(_ROLES, parts, strict=False):
        add(name, part)
    return found


def _column(name: str, dtype: str, shape: tuple[int | None, ...]) -> Column:
    column = Column(name, _ROLES[name.split("/")[0]], dtype, shape)
    if not (column.is_float or column.is_integer or dtype in ("bool", "string")):
        raise TypeError(
            f"Column {name!r} is of dtype {dtype}; expected floats, integers, booleans "
            "or text. Map it to one of these, or leave it out."
        )
    return column


def _are_batches(element_spec: Any, are_single: bool) -> bool:
    """Returns whether elements are batches, as far as their shapes tell."""
    if looks_batched(element_spec):
        return True
    specs = tf.nest.flatten(element_spec)
    shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
    if any(not shape.rank for shape in shapes):
        return False
    if len({shape[0] for shape in shapes}) > 1:
        return False
    return len(shapes) > 1 or (shapes[0].rank > 1 and not are_single)


def _joined(dataset: tf.data.Dataset, specs: list[tf.TensorSpec]) -> tf.data.Dataset:
    """Returns single examples as chunks."""
    if not all(spec.shape.is_fully_defined() for spec in specs):
        # Of different shapes, so each one is a chunk of its own.
        return dataset.map(
            lambda part: tf.nest.map_structure(lambda value: value[tf.newaxis], part)
        )
    row_bytes = sum(
        spec.shape.num_elements() * (16 if spec.dtype == tf.string else spec.dtype.size)
        for spec in specs
    )
    return dataset.batch(_rows_of_chunk(row_bytes))


def _rows_of_chunk(row_bytes: int) -> int:
    return min(_MAX_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, row_bytes)))


def _array_examples(
    argument: str, data: Any, select: Callable[[Any], Sequence[str]] | None
) -> Examples:
    """Returns the examples of arrays in memory."""
    parts = _chosen(data, None if select is None else select(data))
    arrays, columns = {}, []
    for name, value in parts.items():
        if not hasattr(value, "__array__") or not np.ndim(value):
            raise TypeError(
                f"Column {name!r} of `{argument}` is of type {type(value).__name__}; "
                "expected an array with one row for each example. Pass a "
                "`tf.data.Dataset`, a `Pipeline`, or arrays as (x, y)."
            )
        arrays[name] = np.asarray(value)
        dtype = arrays[name].dtype
        text = "string" if dtype.kind in "OSU" else dtype.name
        columns.append(_column(name, text, arrays[name].shape[1:]))
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"`{argument}` has columns of lengths {lengths!r}; expected one length. "
            "Cut them to the same examples."
        )
    length = next(iter(lengths.values()), 0)
    if not length:
        raise _empty(argument)
    return Examples(argument, tuple(columns), length, False, arrays)


def _empty(argument: str) -> ValueError:
    return ValueError(
        f"`{argument}` holds no examples; expected at least one. Look at its source: "
        "a wrong path, split or filter leaves nothing."
    )
