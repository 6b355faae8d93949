"""Reads one value of every example, its class or its weight, in one pass."""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import as_arguments, bytes_of_element, known_length
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, map_in_order
from tfamp.records.console import progress

# Labels brought to Python at once.
_LABELS_AT_ONCE = 1024
# Above this size, copying an element costs more than a function call to pick its
# label; below, elements are batched whole and one call picks from all.
_MAX_BATCHED_BYTES = 2**14
# What rows of probabilities may miss 1 by, in float16 too.
_SUM_TOLERANCE = 0.01
# Stands for the class of a row that is no class.
_NO_CLASS = -(2**62)


@dataclasses.dataclass(frozen=True)
class Reader:
    """Where the class of an element is found, or its weight.

    It is `by` the target for None, a key of dict elements, or a function of their
    parts. `argument` is what the caller calls it, for errors.
    """

    by: Callable[..., Any] | str | None
    argument: str
    is_weight: bool = False

    @property
    def description(self) -> str:
        """What is read, in words."""
        if callable(self.by):
            return getattr(self.by, "__name__", repr(self.by))
        return "target" if self.by is None else repr(self.by)

    def values(self, parts: tuple[Any, ...]) -> tf.Tensor:
        """Returns the values of a batch, `(batch,)`; `by` is no function, then."""
        return self._converted(tf.convert_to_tensor(self._pick(parts)))

    def value(self, *parts: Any) -> tf.Tensor:
        """Returns the value of one element as a scalar."""
        picked = self.by(*parts) if callable(self.by) else self._pick(parts)
        if isinstance(picked, (dict, tuple, list)):
            raise TypeError(
                f"`{self.argument}` returned {picked!r}; expected one value for an "
                "element. Return a single number or string."
            )
        return self._converted(tf.convert_to_tensor(picked)[None])[0]

    def check(self, dataset: tf.data.Dataset) -> None:
        """Raises, before anything is read, if the elements have no such value."""
        if not callable(self.by):
            spec = self._pick(as_arguments(dataset.element_spec))
            self._check_shape(spec.shape)

    def read(
        self, data: tf.data.Dataset | RandomAccess, settings: Settings
    ) -> np.ndarray:
        """Returns the value of every example, with a progress bar if it takes long.

        A dataset is read once; the tensors of a source are read in place.
        """
        if isinstance(data, tf.data.Dataset):
            return self._pass(data, settings)
        if callable(self.by):
            return self._pass(data.dataset(settings), settings)
        with tf.device("CPU:0"):
            self.check(data.dataset(settings))
            return self.values(as_arguments(data.tensors)).numpy()

    def _pass(self, dataset: tf.data.Dataset, settings: Settings) -> np.ndarray:
        size = None if callable(self.by) else bytes_of_element(dataset.element_spec)
        if size is not None and size <= _MAX_BATCHED_BYTES:
            batches = dataset.batch(_LABELS_AT_ONCE)
            values = batches.map(lambda *parts: self.values(parts))
        else:
            values = map_in_order(dataset, self.value, settings).batch(_LABELS_AT_ONCE)
        what = "Reading weights" if self.is_weight else "Reading labels"
        return read_all(values, what, known_length(dataset), f"`{self.argument}`")

    def _pick(self, parts: tuple[Any, ...]) -> Any:
        """Returns the target, or what the key names, of elements or their spec."""
        if self.by is None:
            if len(parts) < 2:
                raise ValueError(
                    f"Elements are {_outline(parts)}, without a target; expected "
                    f"(input, target). Pass `{self.argument}=` a key of the dict, or "
                    "a function of the element that gives its class."
                )
            found = parts[1]
        else:
            dicts = [part for part in parts if isinstance(part, dict)]
            named = [part[self.by] for part in dicts if self.by in part]
            if not named:
                keys = tuple(key for part in dicts for key in part)
                has = f"the keys {keys}" if keys else f"no dict but {_outline(parts)}"
                raise ValueError(
                    f"`{self.argument}` is {self.by!r}; expected a key of the elements,"
                    f" which have {has}. Pass one of the keys, or a function of the "
                    "element."
                )
            found = named[0]
        if isinstance(found, (dict, tuple, list)):
            raise ValueError(
                f"The target is {_outline(found)}; expected one tensor that tells the "
                f"class. Pass `{self.argument}=` a function that picks it, such as "
                f"`lambda x, y: y[...]`."
            )
        return found

    def _check_shape(self, shape: tf.TensorShape) -> None:
        """Raises unless elements of this shape can tell a class or a weight."""
        if shape.rank is None:
            raise ValueError(
                f"The shape of what `{self.argument}` reads is unknown; expected a "
                "scalar or a one-hot row. Set it with `tf.ensure_shape` in `.map`."
            )
        allowed = shape.rank == 0 or shape == (1,)
        if not allowed and not (shape.rank == 1 and not self.is_weight):
            expected = "a scalar" if self.is_weight else "a scalar or a one-hot row"
            raise ValueError(
                f"What `{self.argument}` reads has shape {tuple(shape)}; expected "
                f"{expected}. Pass a function of the element that gives one."
            )

    def _converted(self, raw: tf.Tensor) -> tf.Tensor:
        """Returns `(batch,)` weights or labels of raw values `(batch, ...)`."""
        self._check_shape(raw.shape[1:])
        if raw.shape.rank == 2 and raw.shape[1] == 1:
            raw = raw[:, 0]
        if self.is_weight:
            if raw.dtype == tf.string:
                raise TypeError(
                    f"`{self.argument}` gave a string; expected a weight of at least "
                    "0. Give a number for each element."
                )
            return tf.cast(raw, tf.float64)
        if raw.shape.rank == 2:
            return _class_of_rows(raw)
        if raw.dtype == tf.bool or raw.dtype.is_integer:
            return tf.cast(raw, tf.int64)
        return raw


def class_ids(labels: np.ndarray, argument: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each example's class, int32, and the classes, ascending.

    Labels are what a `Reader` read: integers, strings or whole floats.

    Example:
        >>> ids, classes = class_ids(np.array([b"dog", b"cat", b"dog"]), "by")
        >>> ids.tolist(), classes.tolist()
        ([1, 0, 1], [b'cat', b'dog'])
    """
    if labels.dtype.kind == "f":
        is_wrong = ~np.isfinite(labels) | (labels != np.round(labels))
        if is_wrong.any():
            first = int(np.argmax(is_wrong))
            raise ValueError(
                f"Example {first} has {float(labels[first])!r} as its class; expected "
                "integers, strings, one-hot rows or whole numbers. For a continuous "
                f"target pass bins: `{argument}=lambda x, y: tf.searchsorted(edges, "
                "[y])[0]`."
            )
    elif labels.dtype.kind == "i" and (labels == _NO_CLASS).any():
        first = int(np.argmax(labels == _NO_CLASS))
        raise ValueError(
            f"The row of example {first} is not one class; expected one-hot rows, or "
            "probabilities that sum to 1 with one largest. For several labels at once "
            f"pass `{argument}=` a function that gives one class, such as the rarest."
        )
    classes, ids = np.unique(labels, return_inverse=True)
    return ids.reshape(-1).astype(np.int32), classes


def _class_of_rows(rows: tf.Tensor) -> tf.Tensor:
    """Returns the place of the largest value of each one-hot row, int64."""
    values = tf.cast(rows, tf.float32)
    largest = tf.reduce_max(values, axis=1, keepdims=True)
    num_largest = tf.math.count_nonzero(values == largest, axis=1)
    is_class = (
        (num_largest == 1)
        & tf.reduce_all(values >= 0, axis=1)
        & (tf.abs(tf.reduce_sum(values, axis=1) - 1) <= _SUM_TOLERANCE)
    )
    found = tf.argmax(values, axis=1)
    return tf.where(is_class, found, tf.constant(_NO_CLASS, tf.int64))


def read_all(
    batches: tf.data.Dataset, description: str, length: int | None, what: str
) -> np.ndarray:
    """Returns joined batches of values, with a progress bar if it takes long."""
    read, done = [], 0
    with progress(description, length) as update:
        for batch in batches.as_numpy_iterator():
            read.append(batch)
            done += len(batch)
            update(done)
    if not read:
        raise ValueError(
            f"The dataset has no elements to read {what} of; expected at least one. "
            "Check the files or the filter before it."
        )
    return np.concatenate(read)


def read_or_count(
    reader: Reader | None, data: tf.data.Dataset | RandomAccess, settings: Settings
) -> tuple[np.ndarray | None, int]:
    """Returns what a reader reads, None without one, and the number of examples."""
    if reader is not None:
        values = reader.read(data, settings)
        return values, len(values)
    is_source = isinstance(data, RandomAccess)
    return None, data.num_examples if is_source else _count(data)


def _count(dataset: tf.data.Dataset) -> int:
    """Returns the number of elements of a dataset, by reading it if it must."""
    length = known_length(dataset)
    if length is not None:
        return length
    ones = dataset.map(lambda *parts: tf.constant(1, tf.int64)).batch(_LABELS_AT_ONCE)
    return len(read_all(ones, "Counting elements", None, "the number"))


class Memory:
    """What was read of the last dataset or source, kept while that lives."""

    def __init__(self) -> None:
        self._owner: Callable[[], Any] | None = None
        self._value: Any = None

    def get(self, owner: Any, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned for this owner, calling it the first time."""
        if self._owner is None or self._owner() is not owner:
            self._value = make()
            self._owner = weakref.ref(owner)
        return self._value


def _outline(parts: Any) -> str:
    """Returns the outline of a structure in a few words."""
    if isinstance(parts, dict):
        return f"a dict of {tuple(parts)}"
    if isinstance(parts, (tuple, list)):
        inner = ", ".join(_outline(part) for part in parts)
        return inner if len(parts) == 1 else f"({inner})"
    return f"a tensor {tuple(parts.shape) if parts.shape.rank is not None else ''}"
