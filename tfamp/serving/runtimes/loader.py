"""`tfamp.load_exported`: one call to run what `tfamp.export` wrote."""

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tfamp.records import checks
from tfamp.serving.runtimes import manifest
from tfamp.serving.runtimes.signature import LoadedModel

if TYPE_CHECKING:
    import keras

_KERAS_FILE = ".keras"


def load_exported(
    path: "str | os.PathLike[str] | keras.Model", *, threads: int | None = None
) -> LoadedModel:
    """Loads what `tfamp.export` wrote or `tfamp.freeze` returned, to ask it to predict.

    Each file is compared with its SHA-256 first; nothing of the folder is run as
    Python. TensorFlow is imported for the format "saved_model" and Keras models alone,
    so that the others answer within a fraction of a second of the start of a process.
    A Keras model is traced once, without what `predict` does around each batch, and
    runs batches of 1 under XLA where that is faster, which is measured for a second.

    Args:
        path: The folder; or a `.keras` file, frozen or not, as `tfamp.load_model` takes
            it; or a Keras model itself, whose weights are shared.
        threads: Threads that one prediction may use, set once; by default one where
            `tfamp.export` found that faster, else as many as the cores that this
            process may use.

    Returns:
        The model: `.predict(x)`, `.run({name: array})`, `.signature`, `.runtime`. It
        may be asked from several threads at once. Outputs are float32 or integers.

    Raises:
        FileNotFoundError: There is no such folder, or it is none of `tfamp.export`.
        ImportError: The runtime is not installed; the message names the extra.
        TypeError: `path` is neither a path nor a Keras model.
        ValueError: A file is missing or changed, or a later version wrote the folder;
            a Keras model is not built, or does not tell its inputs.

    Example:
        >>> load_exported("/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: `path` is '/nowhere', which is no folder; ...
    """
    if threads is not None:
        checks.positive_int("threads", threads)
    if not isinstance(path, (str, os.PathLike)):
        return _of_keras(path, threads)
    folder = Path(path)
    if folder.suffix == _KERAS_FILE and not folder.is_dir():
        return _of_keras(folder, threads)
    found = manifest.read(folder)
    manifest.verify(folder, found)
    return open_model(folder, found, threads)


def open_model(
    folder: Path, found: manifest.Manifest, threads: int | None = None
) -> LoadedModel:
    """Loads a folder of which `export.json` says what is in it."""
    place = importlib.import_module(f"tfamp.serving.runtimes.{found.runtime}")
    loaded: LoadedModel = place.load(folder, found, _threads(threads or found.threads))
    return loaded


def _of_keras(model: "keras.Model | Path", threads: int | None) -> LoadedModel:
    from tfamp.serving.runtimes import keras_model

    return keras_model.load(model, _threads(threads))


def _threads(threads: int | None) -> int:
    from tfamp.machine.cpus import num_usable_cpus

    return threads or num_usable_cpus()
