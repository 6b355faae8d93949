"""`tfamp.load_exported`: one call to run what `tfamp.export` wrote."""

import importlib
import os
from pathlib import Path

from tfamp.records import checks
from tfamp.serving.runtimes import manifest
from tfamp.serving.runtimes.signature import LoadedModel


def load_exported(
    path: str | os.PathLike[str], *, threads: int | None = None
) -> LoadedModel:
    """Loads a folder that `tfamp.export` wrote, to ask it for predictions.

    Each file is compared with its SHA-256 first; nothing of the folder is run as
    Python. TensorFlow is imported for the format "saved_model" alone, so that the
    others answer within a fraction of a second of the start of a process.

    Args:
        path: The folder.
        threads: Threads that one prediction may use, set once; by default as many as
            the cores that this process may use.

    Returns:
        The model: `.predict(x)`, `.run({name: array})`, `.signature`, `.runtime`. It
        may be asked from several threads at once.

    Raises:
        FileNotFoundError: There is no such folder, or it is none of `tfamp.export`.
        ImportError: The runtime is not installed; the message names the extra.
        ValueError: A file is missing or changed, or a later version wrote the folder.

    Example:
        >>> load_exported("/nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: `path` is '/nowhere', which is no folder; ...
    """
    if threads is not None:
        checks.positive_int("threads", threads)
    folder = Path(path)
    found = manifest.read(folder)
    manifest.verify(folder, found)
    return open_model(folder, found, threads)


def open_model(
    folder: Path, found: manifest.Manifest, threads: int | None = None
) -> LoadedModel:
    """Loads a folder of which `export.json` says what is in it."""
    from tfamp.machine.cpus import num_usable_cpus

    place = importlib.import_module(f"tfamp.serving.runtimes.{found.runtime}")
    loaded: LoadedModel = place.load(folder, found, threads or num_usable_cpus())
    return loaded
