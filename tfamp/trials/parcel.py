"""Takes functions and data to the processes of the runs, and batches from them."""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.data._elements import known_length
from tfamp.records import checks
from tfamp.stepping.arguments import arrays_of, dataset_of, first_batch
from tfamp.trials import targets

_PARCEL = "parcel.pickle"
_DATASETS = {"train": "train_elements", "validation": "validation_elements"}
_FIT_BATCH_SIZE, _MAX_ROWS = 32, 1024  # of arrays, and how many of them are kept


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Calls a function with those of the offered arguments that it has by name."""
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function()
    return function(**{name: x for name, x in offered.items() if name in known})


def parts(built: Any, *, of: str, compiled: bool = False) -> tuple[Any, Any, Any]:
    """Returns model, train and validation of what a function returned."""
    model, *data = built if isinstance(built, (tuple, list)) else (built,)
    is_model = isinstance(model, keras.Model) and (model.compiled or not compiled)
    if not is_model or len(data) > 2:
        raise TypeError(
            f"{of} returned {built!r}; expected a {'compiled ' * compiled}model, "
            "(model, train) or (model, train, validation). Return the model first."
        )
    train, validation = (*data, None, None)[:2]
    return model, train, validation


def name_of(build_model: Any) -> str:
    """Returns what a building function is called, or raises unless it is one."""
    if isinstance(build_model, str):
        return build_model
    if not callable(build_model) or isinstance(build_model, keras.Model):
        raise TypeError(
            f"`build_model` is {build_model!r}; expected a function that returns a "
            "compiled model. Pass the function, not what it returns."
        )
    return str(getattr(build_model, "__name__", type(build_model).__name__))


def pack(
    folder: Path, build_model: Callable[..., Any] | str, train: Any, validation: Any
) -> tuple[str, ...]:
    """Writes model and data for other processes; returns what a reader should know."""
    discard(folder)
    notes = []
    data = {"train": train, "validation": validation}
    for name, value in data.items():
        if hasattr(value, "__next__"):
            raise TypeError(
                f"`{name}` is {value!r}, which can be read once only; expected data "
                "for every run. Pass a function that makes it, a dataset, or arrays."
            )
        if not callable(value) and _pickled({"data": value}) is None:
            _save(name, value, folder / _DATASETS[name])
            data[name] = None
            notes.append(
                f"The elements of `{name}` were written down once, so every epoch of "
                "every run sees them in that order; pass a function that returns the "
                "dataset to shuffle anew."
            )
    text = _pickled({"build_model": build_model, **data})
    if text is None:
        raise TypeError(
            f"`build_model` {build_model!r} cannot be taken to another process; "
            "expected a function that holds no model, dataset or open file. Make that "
            "inside the function, or name the function as 'module:function'."
        )
    (folder / _PARCEL).write_bytes(text)
    return tuple(notes)


def unpack(folder: Path) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the building function and the data as they were packed."""
    parcel = _pickle().loads((folder / _PARCEL).read_bytes())
    build_model = parcel["build_model"]
    if isinstance(build_model, str):
        build_model = targets.load(build_model)
    for name, saved in _DATASETS.items():
        if (folder / saved).is_dir():
            parcel[name] = tf.data.Dataset.load(str(folder / saved)).prefetch(2)
    return build_model, parcel["train"], parcel["validation"]


def discard(folder: Path) -> None:
    """Throws away what `pack` wrote."""
    for name in _DATASETS.values():
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / _PARCEL).unlink(missing_ok=True)


def _pickle() -> Any:
    return checks.require("cloudpickle", extra="report", purpose="A fresh process")


def _pickled(value: Any) -> bytes | None:
    """Returns a value as bytes, None where it cannot be pickled."""
    dumps = _pickle().dumps
    try:
        return bytes(dumps(value))
    except Exception:  # whatever it holds pickles and fails in its own way
        return None


def _save(name: str, value: Any, path: Path) -> None:
    """Writes the elements of the dataset that a value is or builds."""
    dataset = value.build() if callable(getattr(value, "build", None)) else value
    is_dataset = isinstance(dataset, tf.data.Dataset)
    if not is_dataset or dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        what = "has no end" if is_dataset else f"is of type {type(dataset).__name__}"
        raise (ValueError if is_dataset else TypeError)(
            f"`{name}` {what}; expected arrays (x, y), a `tf.data.Dataset` that ends, "
            "a `Pipeline`, or a function that returns one. Add `.take(steps)`, or pass "
            "such a function."
        )
    dataset.save(str(path))


class Batch(NamedTuple):
    """A batch as `fit` takes it, and what is known of the rest."""

    parts: Any
    size: int  # its examples, of arrays what `fit` takes by default
    num_examples: int | None  # of the data, about; None where that is not known


def batch_of(data: Any) -> Batch:
    """Returns one batch of anything that `fit` takes."""
    arrays = arrays_of(data, needs_targets=False)
    if arrays is not None:
        number = len(tf.nest.flatten(arrays)[0])
        arrays = tf.nest.map_structure(lambda each: each[:_MAX_ROWS], arrays)
        parts = first_batch(dataset_of(arrays, _MAX_ROWS, needs_targets=False))
        return Batch(parts, min(_FIT_BATCH_SIZE, number), number)
    dataset = dataset_of(data)
    parts, length = first_batch(dataset), known_length(dataset)
    size = size_of(parts)
    return Batch(parts, size, None if length is None else length * size)


def as_fit_takes_it(data: Any) -> Any:
    """Returns arrays as a tuple, a `PyDataset` as it is, all else as a dataset."""
    if data is None or isinstance(data, keras.utils.PyDataset):
        return data
    arrays = arrays_of(data, needs_targets=False)
    return dataset_of(data) if arrays is None else arrays


def size_of(parts: Any) -> int:
    """Returns the examples of a batch."""
    first = tf.nest.flatten(parts)[0]
    return int(first.shape[0] or tf.shape(first)[0])


def rows(parts: Any, size: int) -> Any:
    """Returns `size` rows of each tensor of a batch, its own again and again."""
    places = np.arange(size) % size_of(parts)
    return tf.nest.map_structure(lambda each: tf.gather(each, places), parts)
