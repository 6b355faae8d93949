"""States in files that are whole or not there, and bundles: folders of failing steps.

Files of states are found by their names alone, which only those have that are whole.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.records.checks import first_line, kind_and_line
from tfamp.records.record import BESIDE, Record
from tfamp.stepping.snapshots import State

# The member of an archive that is no variable: counters, paths and dtypes as JSON.
_ABOUT = "about"
# States that all workers have and that stay: a disk may lose what it told to hold.
_KEPT = 2
_NAME = re.compile(r"step-(\d+)\.worker-(\d+)-of-(\d+)\.npz")
# What is in a bundle.
_RECORD, _STATE, _BATCH, _MODEL = "bundle.json", "state.npz", "batch", "model.keras"
_WRITING = ".writing-"


def write(state: State, path: str | os.PathLike[str]) -> None:
    """Writes a state as an `.npz` that is whole, or raises OSError."""
    text = os.fspath(path)
    beside = f"{text}{BESIDE}"
    try:
        with tf.io.gfile.GFile(beside, "wb") as file:
            file.write(archive(state))
        if "://" not in text:
            _sync(beside)
        tf.io.gfile.rename(beside, text, overwrite=True)
    except (OSError, tf.errors.OpError) as error:
        _remove(beside)
        raise OSError(getattr(error, "message", str(error))) from error


def archive(state: State) -> bytes:
    """Returns the bytes of an `.npz` of a state."""
    dtypes = {name: array.dtype.name for name, array in state.arrays.items()}
    about = {"counters": state.counters, "paths": state.paths, "dtypes": dtypes}
    members: dict[str, Any] = {_ABOUT: np.frombuffer(json.dumps(about).encode(), "u1")}
    for name, array in state.arrays.items():
        # NumPy itself knows no bfloat16: it is written by its bits.
        is_known = array.dtype.isbuiltin == 1
        members[name] = array if is_known else array.view(f"u{array.itemsize}")
    content = io.BytesIO()
    np.savez(content, **members)
    return content.getvalue()


def read(path: str | os.PathLike[str]) -> State:
    """Reads a state that `write` wrote; the checksums of every part have to hold."""
    text = os.fspath(path)
    if not tf.io.gfile.exists(text):
        raise FileNotFoundError(
            f"Found no file {text!r}; expected one that tfamp wrote. Check the path."
        )
    try:
        with tf.io.gfile.GFile(text, "rb") as file:
            content = io.BytesIO(file.read())
        if bad := zipfile.ZipFile(content).testzip():
            raise ValueError(f"the bytes of {bad!r} in it are not its own")
        content.seek(0)
        members = np.load(content)
        about = json.loads(members[_ABOUT].tobytes())
        arrays = {
            name: members[name].view(tf.as_dtype(dtype).as_numpy_dtype)
            for name, dtype in about["dtypes"].items()
        }
        return State(arrays, about["counters"], about["paths"])
    except Exception as error:  # whatever damaged headers lead zip and NumPy to
        raise ValueError(
            f"The file {text!r} holds no whole state: {error}. Expected a file that "
            "tfamp finished. Delete it, and the one before is taken."
        ) from error


class Kept(NamedTuple):
    """A file in a folder, by what its name says."""

    number: int
    place: int
    num_workers: int
    name: str


class Folder:
    """The numbered states of one training, in a folder that all its workers see.

    A new one is whole in its place before the oldest goes; the last two that all
    workers have stay. What a killed process left half written here is removed.
    """

    def __init__(self, directory: str, place: int = 0, num_workers: int = 1) -> None:
        self.directory = folder_path(directory)
        self.place, self.num_workers = place, num_workers
        self._suffix = f".worker-{place}-of-{num_workers}.npz"
        make_folder(self.directory)
        for name in tf.io.gfile.listdir(self.directory):
            if name.endswith(f"{self._suffix}{BESIDE}"):
                tf.io.gfile.remove(os.path.join(self.directory, name))

    def newest(self) -> tuple[Kept, State] | None:
        """Returns the newest state that all workers have, None for none.

        One process passes over a damaged one with a warning; several raise ValueError.
        """
        for files in self._complete():
            mine = files[min(self.place, len(files) - 1)]
            path = os.path.join(self.directory, mine.name)
            try:
                return mine, read(path)
            except ValueError as error:
                if self.num_workers > 1:
                    raise
                logging.warning("Passed over %r, which is not whole (%s).", path, error)
        return None

    def write(self, state: State, number: int) -> None:
        """Writes a state under a number, and clears older ones."""
        name = f"step-{number:09d}{self._suffix}"
        write(state, os.path.join(self.directory, name))
        complete = [files[0].number for files in self._complete()]
        for each in self.listed() if len(complete) >= _KEPT else ():
            if each.number < complete[_KEPT - 1] and each.place == self.place:
                _remove(os.path.join(self.directory, each.name))

    def listed(self) -> list[Kept]:
        """Returns the files of all workers."""
        found = map(_NAME.fullmatch, tf.io.gfile.listdir(self.directory))
        return [Kept(int(m[1]), int(m[2]), int(m[3]), m[0]) for m in found if m]

    def _complete(self) -> list[list[Kept]]:
        """Returns the files of each number that all workers have, newest first."""
        found: dict[tuple[int, int], list[Kept]] = {}
        for each in sorted(self.listed()):
            found.setdefault((each.number, each.num_workers), []).append(each)
        newest_first = sorted(found.items(), reverse=True)
        return [files for (_, number), files in newest_first if len(files) == number]


def folder_path(path: object) -> str:
    """Returns the path of a folder as text; a TypeError says that it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`directory` is {path!r}, of type {type(path).__name__}; expected the "
            "path of a folder. Pass a string."
        )
    text = os.fspath(path)
    return text if "://" in text else os.fspath(Path(text).expanduser().absolute())


def make_folder(directory: str) -> None:
    """Makes a folder; a ValueError says that it cannot be made or written."""
    try:
        tf.io.gfile.makedirs(directory)
        why = "cannot be written"
        if "://" in directory or os.access(directory, os.W_OK | os.X_OK):
            return
    except (tf.errors.OpError, OSError) as error:
        why = f"cannot be made: {getattr(error, 'message', error)}"
    raise ValueError(
        f"`directory` {directory!r} {why}; expected a folder of yours, or a path where "
        "one can be made. Pass another path, or change its permissions."
    )


@dataclasses.dataclass(frozen=True)
class Bundle(Record):
    """What `bundle.json` says of a failing step; docs/triage.md has the rest."""

    SCHEMA: ClassVar[int] = 2

    cause: str
    message: str
    epoch: int
    step: int
    model_class: str
    policy: str
    versions: dict[str, str | None]
    no_model: str = ""
    notes: tuple[str, ...] = ()


def write_bundle(
    folder: Path,
    record: Bundle,
    state: State,
    batch: Any,
    save_model: Callable[[Path], None],
) -> Path:
    """Writes a bundle and returns its folder; after an error nothing is left of it."""
    beside = folder / f"{_WRITING}{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        write(state, beside / _STATE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a None in the batch
            tf.data.Dataset.from_tensors(batch).save(os.fspath(beside / _BATCH))
        try:
            save_model(beside / _MODEL)
        except OSError:
            raise  # the disk, not the model
        except Exception as error:  # whatever a user's `get_config` raises
            (beside / _MODEL).unlink(missing_ok=True)
            record = dataclasses.replace(record, no_model=kind_and_line(error))
        record.to_json(beside / _RECORD)
        for path in filter(Path.is_file, beside.rglob("*")):
            _sync(path)
        # Runs may share a folder.
        name = f"failure-{record.step:08d}-{record.cause}"
        names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
        target = next(folder / n for n in names if not (folder / n).exists())
        os.rename(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def read_bundle(path: str | os.PathLike[str]) -> tuple[Bundle, State, Any]:
    """Returns record, state and batch of a bundle, whose every byte is checked."""
    folder = Path(path)
    if not (folder / _RECORD).is_file():
        raise FileNotFoundError(
            f"Found no bundle in {str(path)!r}: expected a folder with a file "
            f"{_RECORD!r}, as `tfamp.callbacks.NanRecovery` writes it. Check the path."
        )
    try:
        record = Bundle.from_json(folder / _RECORD)
        state = read(folder / _STATE)
        batch = next(iter(tf.data.Dataset.load(os.fspath(folder / _BATCH))))
    except (ValueError, OSError, StopIteration, tf.errors.OpError) as error:
        raise ValueError(
            f"The bundle {str(path)!r} is damaged: {first_line(error)} Expected it as "
            "`tfamp.callbacks.NanRecovery` wrote it. Copy it again, or take another."
        ) from error
    return record, state, batch


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed here left of a bundle half written."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: str) -> None:
    with contextlib.suppress(tf.errors.OpError):
        tf.io.gfile.remove(path)


def _sync(path: str | Path) -> None:
    """Has a file reach the disk, as a crash of the system may follow."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
