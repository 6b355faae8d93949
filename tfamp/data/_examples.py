"""Reads any form of training data as chunks of named NumPy arrays, in one pass."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import inputs_of, looks_batched, named_columns
from tfamp.records.console import progress

_ROLES = {"x": "input", "y": "target", "sample_weight": "weight"}
# Single examples are joined to chunks of this size, arrays are cut into them.
_CHUNK_BYTES, _MAX_CHUNK_ROWS = 16 * 2**20, 4096
_TEXT_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Column:
    """One tensor of the examples: "x", "x/age", "x/0", "y" or "sample_weight".

    `shape` is that of one example, with None for sizes that vary.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def __post_init__(self) -> None:
        is_number = "float" in self.dtype or "int" in self.dtype
        if not is_number and self.dtype not in ("bool", "string"):
            raise TypeError(
                f"Column {self.name!r} is of dtype {self.dtype}; expected floats, "
                "integers, booleans or text. Map it to one of these, or leave it out."
            )

    @property
    def role(self) -> str:
        """Returns "input", "target" or "weight"."""
        return _ROLES[self.name.split("/")[0]]

    @property
    def is_text(self) -> bool:
        """Whether it holds strings."""
        return self.dtype == "string"


@dataclasses.dataclass(frozen=True)
class Examples:
    """Data that can be read once; `argument` is what messages call it."""

    argument: str
    columns: tuple[Column, ...]
    length: int | None  # examples or batches, as `unit` says; for progress
    unit: str
    read: Callable[[], Iterator[dict[str, np.ndarray]]] = dataclasses.field(repr=False)

    def chunks(self, description: str) -> Iterator[dict[str, np.ndarray]]:
        """Yields arrays by column, of which the first axis counts examples."""
        num_examples = num_chunks = 0
        with progress(description, self.length, unit=self.unit) as update:
            for chunk in self.read():
                yield chunk
                num_chunks += 1
                num_examples += len(next(iter(chunk.values())))
                update(num_chunks if self.unit == "batches" else num_examples)
        if not num_examples:
            raise ValueError(
                f"`{self.argument}` holds no examples; expected at least one. Look at "
                "its source: a wrong path, split or filter leaves nothing."
            )


def read(
    argument: str, data: Any, *, batched: bool | None = None, inputs_only: bool = False
) -> Examples:
    """Returns the examples of data in any form that `check` and `fit_statistics` take.

    Where shapes leave open whether an element is an example or a batch, `fit` takes it
    for a batch, and statistics of inputs alone for an example.
    """
    if callable(getattr(data, "build", None)):
        batched = data.makes_batches if batched is None else batched
        data = data.build()
    is_dataset = isinstance(data, tf.data.Dataset)
    if inputs_only:
        named_columns(inputs_of(data.element_spec if is_dataset else data))

    def parts(*element: Any) -> dict[str, Any]:
        return flatten(element[:1] if inputs_only else element)

    if not is_dataset:
        return _of_arrays(argument, parts(*_as_tuple(data)))
    length = int(data.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{argument}` is a dataset without end; expected one that ends. Leave "
            f"out `.repeat()`, or pass `{argument}.take(num_batches)`."
        )
    specs = parts(*_as_tuple(data.element_spec))
    for name, spec in specs.items():
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                f"Column {name!r} of `{argument}` is {spec!r}; expected a dense "
                "tensor. Map it to one first: `.to_tensor()` of a ragged tensor, "
                "`tf.sparse.to_dense` of a sparse one."
            )
    if batched is None:
        batched = _are_batches(data.element_spec, not inputs_only)
    columns = tuple(
        Column(name, spec.dtype.name, _shape(spec)[batched:])
        for name, spec in specs.items()
    )
    # AutoGraph would warn that it converts no generators, and has nothing to convert.
    chunks = data.map(tf.autograph.experimental.do_not_convert(parts))
    if not batched and all(spec.shape.is_fully_defined() for spec in specs.values()):
        sizes = (
            spec.shape.num_elements() * (spec.dtype.size or _TEXT_BYTES)
            for spec in specs.values()
        )
        chunks = chunks.batch(_rows_of_chunk(sum(sizes)))
    elif not batched:  # of different shapes, so each one is a chunk of its own
        chunks = chunks.batch(1)
    return Examples(
        argument,
        columns,
        length if length >= 0 else None,
        "batches" if batched else "examples",
        lambda: chunks.prefetch(2).as_numpy_iterator(),
    )


def flatten(element: Any) -> dict[str, Any]:
    """Returns the parts of an element by column name.

    Example:
        >>> flatten(({"a": 1, "b": (2, 3)}, 4))
        {'x/a': 1, 'x/b/0': 2, 'x/b/1': 3, 'y': 4}
    """
    parts = _as_tuple(element)
    if len(parts) > len(_ROLES):
        raise ValueError(
            f"Elements have {len(parts)} parts; expected x, (x, y) or "
            "(x, y, sample_weight). Map them to that form, as `fit` needs it."
        )

    def named(name: str, part: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(part, (Mapping, tuple, list)):
            pairs = part.items() if isinstance(part, Mapping) else enumerate(part)
            for key, value in pairs:
                yield from named(f"{name}/{key}", value)
        elif part is not None:
            yield name, part

    return {
        key: value
        for name, part in zip(_ROLES, parts, strict=False)
        for key, value in named(name, part)
    }


def _shape(spec: tf.TensorSpec) -> tuple[int | None, ...]:
    return (None, None) if spec.shape.rank is None else tuple(spec.shape)


def _as_tuple(element: Any) -> tuple[Any, ...]:
    return element if type(element) is tuple else (element,)


def _are_batches(element_spec: Any, are_likely: bool) -> bool:
    """Returns whether elements are batches, as far as their shapes tell."""
    if looks_batched(element_spec):
        return True
    specs = tf.nest.flatten(element_spec)
    shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
    if any(not shape.rank for shape in shapes) or len({s[0] for s in shapes}) > 1:
        return False
    return len(shapes) > 1 or (shapes[0].rank > 1 and are_likely)


def _rows_of_chunk(row_bytes: int) -> int:
    return min(_MAX_CHUNK_ROWS, max(1, _CHUNK_BYTES // max(1, row_bytes)))


def _of_arrays(argument: str, parts: dict[str, Any]) -> Examples:
    """Returns the examples of arrays in memory."""
    for name, value in parts.items():
        if not hasattr(value, "__array__") or not np.ndim(value):
            raise TypeError(
                f"Column {name!r} of `{argument}` is of type {type(value).__name__}; "
                "expected an array with one row for each example. Pass a "
                "`tf.data.Dataset`, a `Pipeline`, or arrays as (x, y)."
            )
    arrays = {name: np.asarray(value) for name, value in parts.items()}
    columns = [
        Column(name, "string" if a.dtype.kind in "OSU" else a.dtype.name, a.shape[1:])
        for name, a in arrays.items()
    ]
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"`{argument}` has columns of lengths {lengths!r}; expected one length. "
            "Cut them to the same examples."
        )
    length = next(iter(lengths.values()), 0)
    num_bytes = sum(array.nbytes for array in arrays.values())
    step = _rows_of_chunk(math.ceil(num_bytes / max(length, 1)))

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, length, step):
            yield {name: a[start : start + step] for name, a in arrays.items()}

    return Examples(argument, tuple(columns), length, "examples", chunks)
