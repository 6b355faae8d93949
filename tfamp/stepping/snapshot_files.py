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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.records.record import BESIDE, whole
from tfamp.stepping.snapshots import State

# The member of an archive that is no variable: counters, paths and dtypes as JSON.
_ABOUT = "about"


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

    A new one is whole in its place before the oldest goes; the last `keep` that all
    workers have stay. `directory` is local, or any path that `tf.io.gfile` opens, such
    as "gs://..."; `place` is that of this worker, and `kind` begins the names.

    Raises:
        TypeError: `directory` is no path.
        ValueError: It is a file, or cannot be made or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        kind: str,
        *,
        keep: int = 2,
        place: int = 0,
        num_workers: int = 1,
    ) -> None:
        self.directory, self.kind, self.keep = folder_path(directory), kind, keep
        self.place, self.num_workers = place, num_workers
        self._is_local = "://" not in self.directory
        self._pattern = re.compile(
            rf"{kind}-(\d+)(?:\.worker-(\d+)-of-(\d+))?\.npz"  # the last version: alone
        )
        self._passed_over: set[str] = set()

    def prepare(self) -> None:
        """Makes the folder, and clears what a killed process left half written."""
        try:
            tf.io.gfile.makedirs(self.directory)
        except (tf.errors.OpError, OSError) as error:
            why = f"cannot be made: {getattr(error, 'message', error)}"
            raise _unusable(self.directory, why) from error
        if self._is_local and not os.access(self.directory, os.W_OK | os.X_OK):
            raise _unusable(self.directory, "cannot be written")
        for name in tf.io.gfile.listdir(self.directory):
            is_mine = name.startswith(f".{self.kind}-") and self._suffix in name
            if is_mine and name.endswith(BESIDE):
                tf.io.gfile.remove(self._path(name))

    def load(self) -> Iterator[tuple[Kept, State]]:
        """Yields the states that all workers have whole, the newest first.

        A damaged one is passed over with a warning; where there are several workers,
        who have to go on from the same, one that is whole but for its content raises
        ValueError.
        """
        for files in self._complete():
            if not all(map(self._is_whole, files)):
                continue
            mine = files[self.place if self.place < len(files) else 0]
            try:
                yield mine, read(self._path(mine.name))
            except ValueError as error:
                if self.num_workers > 1:
                    raise
                self._pass_over(mine, error)

    def newest(self) -> tuple[Kept, State] | None:
        """Returns the first that `load` yields, None where there is none."""
        return next(self.load(), None)

    def is_empty(self) -> bool:
        """Returns whether no file of any worker is there."""
        return not self._listed()

    def write(self, state: State, number: int | None = None) -> None:
        """Writes a state under a number, None for the next one, and clears older ones.

        After an OSError what was there before still is.
        """
        if number is None:
            number = max((each.number for each in self._listed()), default=-1) + 1
        path = self._path(f"{self.kind}-{number:09d}{self._suffix}")
        if self._is_local:
            write(state, path)
        else:
            self._write_far(state, path)
        # More than one, since a disk may lose what it has told to hold.
        complete = [files[0].number for files in self._complete()]
        first = complete[self.keep - 1] if len(complete) >= self.keep else -1
        for each in self._listed():
            is_mine = each.place == self.place or each.num_workers != self.num_workers
            if each.number < first and is_mine:
                with contextlib.suppress(tf.errors.OpError):
                    tf.io.gfile.remove(self._path(each.name))

    @property
    def _suffix(self) -> str:
        return f".worker-{self.place}-of-{self.num_workers}.npz"

    def _write_far(self, state: State, path: str) -> None:
        content, beside = io.BytesIO(), f"{path}{BESIDE}"
        write_archive(state, content)
        try:
            with tf.io.gfile.GFile(beside, "wb") as file:
                file.write(content.getvalue())
            tf.io.gfile.rename(beside, path, overwrite=True)
        except tf.errors.OpError as error:
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.remove(beside)
            raise OSError(error.message) from error

    def _complete(self) -> list[list[Kept]]:
        """Returns the files of each number that all workers have, newest first."""
        found: dict[tuple[int, int], dict[int, Kept]] = {}
        for each in self._listed():
            found.setdefault((each.number, each.num_workers), {})[each.place] = each
        # Of two trainings with the same step, that with as many workers comes first.
        newest_first = sorted(
            found, key=lambda key: (key[0], key[1] == self.num_workers), reverse=True
        )
        return [
            [found[key][place] for place in range(key[1])]
            for key in newest_first
            if len(found[key]) == key[1]
        ]

    def _listed(self) -> list[Kept]:
        found = map(self._pattern.fullmatch, tf.io.gfile.listdir(self.directory))
        return [
            Kept(int(m[1]), int(m[2] or 0), int(m[3] or 1), m[0])
            for m in found
            if m is not None
        ]

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
        if kept.name not in self._passed_over:
            self._passed_over.add(kept.name)
            path = self._path(kept.name)
            logging.warning("Passed over %r, which is not whole (%s).", path, error)

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)


def folder_path(path: object) -> str:
    """Returns the path of a folder as text; a TypeError says that it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`directory` is {path!r}, of type {type(path).__name__}; expected the "
            "path of a folder. Pass a string."
        )
    text = os.fspath(path)
    return text if "://" in text else os.fspath(Path(text).expanduser().absolute())


def _unusable(directory: str, why: str) -> ValueError:
    return ValueError(
        f"`directory` {directory!r} {why}; expected a folder of yours, or a path where "
        "one can be made. Pass another path, or change its permissions."
    )
