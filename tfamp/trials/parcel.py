"""Takes functions and data to the processes of the runs.

Functions of modules go by name, functions of a script or notebook by their code, arrays
and datasets by their elements.
"""

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfamp.records import checks
from tfamp.trials import targets

_PARCEL = "parcel.pickle"
_DATASETS = {"train": "train_elements", "validation": "validation_elements"}


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Calls a function with those of the offered arguments that it has by name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return function()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = {
        name: value
        for name, value in offered.items()
        if name in parameters and parameters[name].kind in kinds
    }
    return function(**taken)


def parts(built: Any, *, of: str, compiled: bool = False) -> tuple[Any, Any, Any]:
    """Returns model, train and validation of what a function returned.

    It may have returned the model alone, (model, train) or all three; the rest is None.
    Messages call the function `of`; with `compiled` the model has to be so.
    """
    import keras

    model, *data = built if isinstance(built, (tuple, list)) else (built,)
    is_fine = isinstance(model, keras.Model) and len(data) <= 2
    if not is_fine or (compiled and not model.compiled):
        raise TypeError(
            f"{of} returned {built!r}; expected a {'compiled ' * compiled}model, "
            "(model, train) or (model, train, validation). Return the model first, "
            "compiled by `model.compile`."
        )
    train, validation = (*data, None, None)[:2]
    return model, train, validation


def name_of(build_model: Any) -> str:
    """Returns what a building function is called, or raises unless it is one."""
    if isinstance(build_model, str):
        return build_model
    import keras

    # A model can be called too, on inputs.
    if not callable(build_model) or isinstance(build_model, keras.Model):
        raise TypeError(
            f"`build_model` is {build_model!r}, of type {type(build_model).__name__}; "
            "expected a function that returns a compiled model, since each process "
            "builds its own. Pass the function, not what it returns."
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
            f"`build_model` {build_model!r} cannot be taken to another process: it "
            "holds something that cannot be pickled, such as a model, a dataset or an "
            "open file. Make that inside the function, or name the function as "
            "'module:function'."
        )
    (folder / _PARCEL).write_bytes(text)
    return tuple(notes)


def unpack(folder: Path) -> tuple[Callable[..., Any], Any, Any]:
    """Returns the building function and the data as they were packed."""
    import tensorflow as tf

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
    return checks.require("cloudpickle", extra="report", purpose="`tfamp.compare`")


def _pickled(value: Any) -> bytes | None:
    """Returns a value as bytes, None where it cannot be pickled."""
    try:
        text: bytes = _pickle().dumps(value)
    except Exception:  # whatever it holds pickles and fails in its own way
        return None
    return text


def _save(name: str, value: Any, path: Path) -> None:
    """Writes the elements of the dataset that a value is or builds."""
    import tensorflow as tf

    dataset = value.build() if callable(getattr(value, "build", None)) else value
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"`{name}` is of type {type(dataset).__name__}, which cannot be taken to "
            "another process; expected a function that returns data, a "
            "`tf.data.Dataset`, a `Pipeline`, or arrays (x, y)."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            f"`{name}` has no end, so its elements cannot be taken to the runs; "
            "expected a dataset that ends. Add `.take(steps)`, or pass a function "
            "that returns the dataset."
        )
    dataset.save(str(path))
