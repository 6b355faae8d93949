"""Any form of training data as chunks of named NumPy arrays, and figures of these.

Data is read in one pass, and what a pass learns is merged chunk by chunk.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import inputs_of, looks_batched, named_columns
from tfamp.records.console import progress

_ROLES = {"x": "input", "y": "target", "sample_weight": "weight"}
_CHUNK_BYTES, _MAX_CHUNK_ROWS = 16 * 2**20, 4096
_TEXT_BYTES = 16
# Values looked at in one go: what stays in a core's cache is several times faster.
_BLOCK_VALUES = 2**17


@dataclasses.dataclass(frozen=True)
class Column:
    """One tensor of the examples: "x", "x/age", "x/0", "y" or "sample_weight"."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

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
    """Returns the examples of data in any form that the tools take."""
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
        Column(name, spec.dtype.name, tuple(spec.shape)[batched:])
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
        *(argument, columns, length if length >= 0 else None),
        "batches" if batched else "examples",
        lambda: chunks.prefetch(2).as_numpy_iterator(),
    )


def flatten(element: Any) -> dict[str, Any]:
    """Returns the parts of an element by column name."""
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

    pairs = zip(_ROLES, parts, strict=False)
    return {k: value for name, part in pairs for k, value in named(name, part)}


def _as_tuple(element: Any) -> tuple[Any, ...]:
    return element if type(element) is tuple else (element,)


def _are_batches(element_spec: Any, are_likely: bool) -> bool:
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
    are_arrays = [hasattr(one, "__array__") and np.ndim(one) for one in parts.values()]
    lengths = (
        {name: len(value) for name, value in parts.items()} if all(are_arrays) else {}
    )
    if len(set(lengths.values())) != 1:
        kinds = {name: type(value).__name__ for name, value in parts.items()}
        raise TypeError(
            f"`{argument}` has columns {kinds!r} of lengths {lengths!r}; expected "
            "arrays with one row for each example. Pass a `tf.data.Dataset`, a "
            "`Pipeline`, or arrays of one length as (x, y)."
        )
    arrays = {name: np.asarray(value) for name, value in parts.items()}
    columns = [
        Column(name, "string" if a.dtype.kind in "OSU" else a.dtype.name, a.shape[1:])
        for name, a in arrays.items()
    ]
    length = next(iter(lengths.values()), 0)
    num_bytes = sum(array.nbytes for array in arrays.values())
    step = _rows_of_chunk(math.ceil(num_bytes / max(length, 1)))

    def chunks() -> Iterator[dict[str, np.ndarray]]:
        for start in range(0, length, step):
            yield {name: a[start : start + step] for name, a in arrays.items()}

    return Examples(argument, tuple(columns), length, "examples", chunks)


class Numbers:
    """Counts, range and moments of features, chunk by chunk."""

    def __init__(self, num_features: int) -> None:
        self.num_features = num_features
        zeros = np.zeros(num_features, np.int64)
        self.count = self.num_nan = self.num_infinite = self.num_finite = zeros
        self.low = np.full(num_features, np.inf)
        self.high = np.full(num_features, -np.inf)
        self.is_integral = np.ones(num_features, bool)
        self.mean = self._squares = np.zeros(num_features)

    @property
    def variance(self) -> np.ndarray:
        """Variance of the finite values; 0 if all are equal."""
        varies = self.low != self.high
        return np.where(varies, self._squares / np.maximum(self.num_finite, 1), 0.0)

    def add(self, rows: np.ndarray) -> None:
        """Takes the next values, shape (rows, features), in their own dtype."""
        step = max(1, _BLOCK_VALUES // self.num_features)
        for start in range(0, len(rows), step):
            block = np.ascontiguousarray(rows[start : start + step].T, np.float64)
            self._add_block(block)

    def look(self, values: np.ndarray) -> None:
        """Sees each block, float64 `(features, rows)` with 0 for NaN and inf."""

    def _add_block(self, values: np.ndarray) -> None:
        held = np.isfinite(values)
        finite = held.sum(axis=1)
        self.count = self.count + values.shape[1]
        if not held.all():
            nan = np.isnan(values).sum(axis=1)
            self.num_nan = self.num_nan + nan
            self.num_infinite = self.num_infinite + values.shape[1] - finite - nan
        low = np.where(held, values, np.inf).min(axis=1)
        high = np.where(held, values, -np.inf).max(axis=1)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        values = np.where(held, values, 0.0)
        self.is_integral &= (values == np.floor(values)).all(axis=1)
        # Divided first, as their sum may overflow.
        mean = (values / np.maximum(finite, 1)[:, None]).sum(axis=1)
        with np.errstate(over="ignore"):
            squares = np.where(held, (values - mean[:, None]) ** 2, 0.0).sum(axis=1)
            share = finite / np.maximum(self.num_finite + finite, 1)
            # The square of a large mean is inf, and 0 times inf would be NaN.
            weight = self.num_finite * share
            between = np.where(weight > 0, mean - self.mean, 0.0) ** 2 * weight
            self._squares = self._squares + squares + between
        self.mean = self.mean + (mean - self.mean) * share
        self.num_finite = self.num_finite + finite
        self.look(values)


class RowSample:
    """Keeps at most `size` rows of a stream, each row with the same probability."""

    def __init__(self, size: int) -> None:
        self._size, self._largest, self._held = size, 1.0, 0
        self._random = np.random.default_rng(0)
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []

    def add(self, rows: np.ndarray) -> None:
        """Takes the next rows."""
        keys = self._random.random(len(rows))
        chosen = np.flatnonzero(keys < self._largest)
        self._keys.append(keys[chosen])
        self._rows.append(rows[chosen])
        self._held += len(chosen)
        if self._held > 2 * self._size:
            self.rows()

    def rows(self) -> np.ndarray:
        """Returns the sample, in the order of the stream."""
        if not self._rows:
            return np.empty(0)
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        if len(keys) > self._size:
            kept = np.sort(np.argpartition(keys, self._size)[: self._size])
            keys, rows = keys[kept], rows[kept]
            self._largest = float(keys.max())
        self._keys, self._rows, self._held = [keys], [rows], len(keys)
        return rows
