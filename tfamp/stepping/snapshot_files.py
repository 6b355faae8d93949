"""States in files: NumPy archives that are whole or not there, the last of a run.

They are found by their names alone, so that no index can be torn from them. A file has
its name only when it is whole.
"""

import contextlib
import io
import json
import os
import re
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.records.record import BESIDE, whole
from tfamp.stepping.snapshots import State

# The member of an archive that is no variable: counters, paths and dtypes as JSON.
_ABOUT = "about"
# States that all workers have and that stay: a disk may lose what it told to hold.
_KEPT = 2
_NAME = re.compile(r"step-(\d+)\.worker-(\d+)-of-(\d+)\.npz")


def write(state: State, path: str | os.PathLike[str]) -> None:
    """Writes a state as an `.npz` that has reached the disk before it has its name.

    What was at `path` stays until then, also where the process is killed. An OSError
    says that the disk is full, or the folder is missing or cannot be written.
    """
    with whole(path, durable=True) as beside, open(beside, "wb") as file:
        write_archive(state, file)


def write_archive(state: State, file: Any) -> None:
    """Writes a state as an `.npz` to an open file."""
    dtypes = {name: array.dtype.name for name, array in state.arrays.items()}
    about = {"counters": state.counters, "paths": state.paths, "dtypes": dtypes}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    members: dict[str, Any] = {_ABOUT: text}
    for name, array in state.arrays.items():
        # NumPy itself knows no bfloat16: it is written by its bits.
        is_known = array.dtype.isbuiltin == 1
        members[name] = array if is_known else array.view(f"u{array.dtype.itemsize}")
    np.savez(file, **members)


def read(path: str | os.PathLike[str]) -> State:
    """Reads a state that `write` wrote; the checksums of every part have to hold.

    Any path that `tf.io.gfile` opens will do. A FileNotFoundError says that there is no
    such file, a ValueError that it is damaged, or none of ours.
    """
    text = os.fspath(path)
    if not tf.io.gfile.exists(text):
        raise FileNotFoundError(
            f"Found no file {text!r}; expected one that tfamp wrote. Check the path."
        )
    try:
        with tf.io.gfile.GFile(text, "rb") as file:
            content = io.BytesIO(file.read())
        with zipfile.ZipFile(content) as archive:
            if bad := archive.testzip():
                raise ValueError(f"the bytes of {bad!r} in it are not its own")
        content.seek(0)
        with np.load(content) as members:
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
    workers have stay. `directory` is local, or any path that `tf.io.gfile` opens, such
    as "gs://..."; `place` is that of this worker.
    """

    def __init__(
        self, directory: str | os.PathLike[str], place: int = 0, num_workers: int = 1
    ) -> None:
        self.directory = folder_path(directory)
        self.place, self.num_workers = place, num_workers
        self._is_local = "://" not in self.directory

    def prepare(self) -> None:
        """Makes the folder, and clears what a killed process left half written."""
        make_folder(self.directory)
        for name in tf.io.gfile.listdir(self.directory):
            if self._suffix in name and name.endswith(BESIDE):
                tf.io.gfile.remove(self._path(name))

    def newest(self) -> tuple[Kept, State] | None:
        """Returns the newest state that all workers have whole, None for none.

        A damaged one is passed over with a warning; where there are several workers,
        who have to go on from the same, one that is whole but for its content raises
        ValueError.
        """
        for files in self._complete():
            if not all(map(self._is_whole, files)):
                continue
            mine = files[self.place if self.place < len(files) else 0]
            try:
                return mine, read(self._path(mine.name))
            except ValueError as error:
                if self.num_workers > 1:
                    raise
                self._pass_over(mine, error)
        return None

    def is_empty(self) -> bool:
        """Returns whether no file of any worker is there."""
        return not self._listed()

    def write(self, state: State, number: int) -> None:
        """Writes a state under a number, and clears older ones.

        After an OSError what was there before still is.
        """
        path = self._path(f"step-{number:09d}{self._suffix}")
        if self._is_local:
            write(state, path)
        else:
            _write_far(state, path)
        complete = [files[0].number for files in self._complete()]
        first = complete[_KEPT - 1] if len(complete) >= _KEPT else -1
        for each in self._listed():
            is_mine = each.place == self.place or each.num_workers != self.num_workers
            if each.number < first and is_mine:
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(self._path(each.name))

    @property
    def _suffix(self) -> str:
        return f".worker-{self.place}-of-{self.num_workers}.npz"

    def _complete(self) -> list[list[Kept]]:
        """Returns the files of each number that all workers have, newest first."""
        found: dict[tuple[int, bool, int], dict[int, Kept]] = {}
        for each in self._listed():
            # Of two trainings with the same step, that with as many workers is first.
            is_alike = each.num_workers == self.num_workers
            key = (each.number, is_alike, each.num_workers)
            found.setdefault(key, {})[each.place] = each
        return [
            [files[place] for place in sorted(files)]
            for key, files in sorted(found.items(), reverse=True)
            if len(files) == key[2]
        ]

    def _listed(self) -> list[Kept]:
        found = map(_NAME.fullmatch, tf.io.gfile.listdir(self.directory))
        return [Kept(int(m[1]), int(m[2]), int(m[3]), m[0]) for m in found if m]

    def _is_whole(self, kept: Kept) -> bool:
        """Returns whether a file is there to its end; warns of one that is not."""
        try:
            path = self._path(kept.name)
            # The end of the file alone is read, which lists what is in it.
            with tf.io.gfile.GFile(path, "rb") as file, zipfile.ZipFile(file):
                return True
        except (zipfile.BadZipFile, OSError, tf.errors.OpError) as error:
            self._pass_over(kept, error)
            return False

    def _pass_over(self, kept: Kept, error: Exception) -> None:
        path = self._path(kept.name)
        logging.warning("Passed over %r, which is not whole (%s).", path, error)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


def _write_far(state: State, path: str) -> None:
    content, beside = io.BytesIO(), f"{path}{BESIDE}"
    write_archive(state, content)
    try:
        with tf.io.gfile.GFile(beside, "wb") as file:
            file.write(content.getvalue())
        tf.io.gfile.rename(beside, path, overwrite=True)
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


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
    why = "cannot be written"
    try:
        tf.io.gfile.makedirs(directory)
        if "://" in directory or os.access(directory, os.W_OK | os.X_OK):
            return
    except (tf.errors.OpError, OSError) as error:
        why = f"cannot be made: {getattr(error, 'message', error)}"
    raise ValueError(
        f"`directory` {directory!r} {why}; expected a folder of yours, or a path where "
        "one can be made. Pass another path, or change its permissions."
    )
