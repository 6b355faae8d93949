"""Reads one value of every example, its class or its weight, in one pass."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._elements import as_arguments, bytes_of_element, known_length
from tfamp.data.sources import RandomAccess
from tfamp.data.stages import Settings, map_in_order
from tfamp.records.console import progress

By = Callable[..., Any] | str | None
# Labels brought to Python at once.
_LABELS_AT_ONCE = 1024
# Above this size, copying an element costs more than a function call to pick its
# label; below, elements are batched whole and one call picks from all.
_MAX_BATCHED_BYTES = 2**14
# What rows of probabilities may miss 1 by, in float16 too.
_SUM_TOLERANCE = 0.01


def picker(by: By, argument: str) -> Callable[..., Any]:
    """Returns a function from an element's parts to the value that is read of it.

    That is the target for None, what a key names in dicts, or what a function gives.
    """
    if callable(by):
        return by

    def pick(*parts: Any) -> Any:
        if by is None:
            if len(parts) > 1 and not isinstance(parts[1], (dict, tuple, list)):
                return parts[1]
            raise ValueError(
                f"Elements are {parts!r}; expected (input, target) with one tensor as "
                f"target. Pass `{argument}=` a key of a dict, or a function of the "
                "element that gives its class, such as `lambda x, y: y[...]`."
            )
        dicts = [part for part in parts if isinstance(part, dict)]
        named = [part[by] for part in dicts if by in part]
        if named:
            return named[0]
        keys = tuple(key for part in dicts for key in part)
        raise ValueError(
            f"`{argument}` is {by!r}; expected a key of the elements, which have the "
            f"keys {keys}. Pass one of these, or a function of the element."
        )

    return pick


def description(by: By) -> str:
    """Returns what is read, in words."""
    if callable(by):
        return getattr(by, "__name__", repr(by))
    return "target" if by is None else repr(by)


def read_values(
    data: tf.data.Dataset | RandomAccess, by: By, argument: str, settings: Settings
) -> np.ndarray:
    """Returns the value of every example, with a progress bar if it takes long.

    A dataset is read once; the tensors of a source are read in place. Rows that are
    one-hot, or hold probabilities, count as the place of their largest value.
    """
    pick = picker(by, argument)
    if isinstance(data, RandomAccess):
        if not callable(by):
            return _as_classes(np.asarray(pick(*as_arguments(data.tensors))), argument)
        data = data.dataset(settings)
    size = None if callable(by) else bytes_of_element(data.element_spec)
    if size is not None and size <= _MAX_BATCHED_BYTES:
        values = data.batch(_LABELS_AT_ONCE).map(pick)
    else:
        values = map_in_order(data, pick, settings).batch(_LABELS_AT_ONCE)
    if not isinstance(values.element_spec, tf.TensorSpec):
        raise TypeError(
            f"`{argument}` gives {values.element_spec!r}; expected one value for an "
            "element. Return a single number or string."
        )
    return read_all(values, known_length(data), argument)


def read_all(values: tf.data.Dataset, length: int | None, argument: str) -> np.ndarray:
    """Returns joined batches of values, with a progress bar if it takes long."""
    read, done = [], 0
    with progress(f"Reading for `{argument}`", length) as update:
        for batch in values.as_numpy_iterator():
            read.append(_as_classes(batch, argument))
            done += len(batch)
            update(done)
    if not read:
        raise ValueError(
            f"The dataset has no elements to read `{argument}` of; expected at least "
            "one. Check the files or the filter before it."
        )
    return np.concatenate(read)


def count(data: tf.data.Dataset | RandomAccess) -> int:
    """Returns the number of examples, by reading them if it must."""
    if isinstance(data, RandomAccess):
        return data.num_examples
    length = known_length(data)
    if length is None:
        ones = data.map(lambda *parts: tf.constant(True)).batch(_LABELS_AT_ONCE)
        length = len(read_all(ones, None, "the number"))
    return length


def _as_classes(values: np.ndarray, argument: str) -> np.ndarray:
    """Returns one value an example, `(batch,)`, of values `(batch, ...)`."""
    values = values[:, 0] if values.shape[1:] == (1,) else values
    if values.ndim == 1:
        return values
    rows = values.astype(np.float32) if values.ndim == 2 else np.full((1, 1), np.nan)
    largest = (rows == rows.max(axis=1, keepdims=True)).sum(axis=1)
    sums = np.abs(rows.sum(axis=1) - 1) <= _SUM_TOLERANCE
    if not ((largest == 1) & sums & (rows >= 0).all(axis=1)).all():
        raise ValueError(
            f"What `{argument}` reads has rows of {values.shape[1:]} that are not "
            "one class; expected a scalar, one-hot rows, or probabilities that sum to "
            f"1 with one largest. Pass `{argument}=` a function that gives one class."
        )
    return rows.argmax(axis=1)


def class_ids(labels: np.ndarray, argument: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the number of each example's class, and the classes, ascending.

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
    classes, ids = np.unique(labels, return_inverse=True)
    return ids.reshape(-1), classes


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
