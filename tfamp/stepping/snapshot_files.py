"""States in files: NumPy archives that are whole or not there, the last of a run."""

import contextlib
import io
import json
import os
import re
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfamp.records import checks
from tfamp.records.record import BESIDE, whole
from tfamp.stepping.snapshots import State

# The member of an archive that is no variable: counters, paths and dtypes as JSON.
_ABOUT = "about"
_NAME = re.compile(r"good-(\d+)\.npz")


def write(state: State, path: str | os.PathLike[str]) -> None:
    """Writes a state as an `.npz` that has reached the disk before it has its name.

    What was at `path` stays until then, also where the process is killed.

    Raises:
        OSError: The disk is full, or the folder is missing or cannot be written.
    """
    with whole(path, durable=True) as beside, open(beside, "wb") as file:
        write_archive(state, file)


def write_archive(state: State, file: Any) -> None:
    """Writes a state as an `.npz` to an open file."""
    dtypes = {name: array.dtype.name for name, array in state.arrays.items()}
    about = {"counters": state.counters, "paths": state.paths, "dtypes": dtypes}
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    members: dict[str, Any] = {_ABOUT: text}
    members |= {name: _plain(array) for name, array in state.arrays.items()}
    np.savez(file, **members)


def read(path: str | os.PathLike[str]) -> State:
    """Reads a state that `write` wrote; the checksums of every part have to hold.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, was not written to its end, or is none.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(
            f"Found no file {str(path)!r}; expected a state that was written by "
            "`tfamp.stepping.snapshot_files.write`. Check the path."
        )
    try:
        return read_archive(target)
    except Exception as error:  # whatever damaged headers lead zip and NumPy to
        raise ValueError(
            f"The file {str(target)!r} holds no whole state: {error}. Expected a file "
            "that `tfamp.stepping.snapshot_files.write` finished. Take the other "
            "snapshot in its folder, or delete it."
        ) from error


def read_archive(source: Path | io.BytesIO) -> State:
    """Reads a state from a file that `write_archive` wrote, or the bytes of one.

    Where it is no whole archive, a ValueError is raised, or whatever damaged headers in
    it lead NumPy to.
    """
    check_archive(source)
    if isinstance(source, io.BytesIO):
        source.seek(0)
    with np.load(source) as file:
        about = _about(file)
        arrays = {
            name: file[name].view(tf.as_dtype(dtype).as_numpy_dtype)
            for name, dtype in about["dtypes"].items()
        }
        return State(arrays, about["counters"], about["paths"])


def check_archive(file: Path | io.BytesIO) -> None:
    """Raises unless a zip file is there to its end, each part with its checksum."""
    name = repr(file.name) if isinstance(file, Path) else "it"
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except Exception as error:  # whatever a damaged header leads to
        raise ValueError(f"{name} is no whole archive ({error})") from error
    if bad is not None:
        raise ValueError(f"the bytes of {bad!r} in {name} are not its own")


def _about(file: Any) -> dict[str, Any]:
    about: dict[str, Any] = json.loads(file[_ABOUT].tobytes())
    return about


def _plain(array: np.ndarray) -> np.ndarray:
    """Returns an array whose dtype NumPy itself knows: bfloat16 by its bits."""
    if array.dtype.isbuiltin == 1:
        return array
    return array.view(f"u{array.dtype.itemsize}")


class Slots:
    """Keeps the last states of a run in a folder, numbered in the order they came.

    A new one is whole in its place before the oldest goes. Only states that are known
    to be good belong here: `load` takes any that is whole. At least 2 are kept, since a
    remedy may need the one before. One process writes to the folder.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        self.keep = checks.positive_int("keep", keep, minimum=2)
        self.directory = made_folder("directory", directory)
        for left in self.directory.glob(f"*{BESIDE}"):
            left.unlink()  # by a process that was killed

    def save(self, state: State) -> Path:
        """Writes a good state and returns its file.

        Raises:
            OSError: It cannot be written. What was there before is still there.
        """
        held = self._newest_first()
        number = _number(held[0]) + 1 if held else 0
        path = self.directory / f"good-{number:06d}.npz"
        write(state, path)
        for old in held[self.keep - 1 :]:
            old.unlink()
        return path

    def load(
        self, accept: Callable[[dict[str, Any]], bool] | None = None
    ) -> State | None:
        """Reads the newest state that is whole, None where there is none.

        A damaged file is passed over with a warning, as is one whose counters `accept`
        refuses.
        """
        for path in self._newest_first():
            try:
                state = read(path)
            except (ValueError, OSError) as error:
                logging.warning("Passed over a snapshot. %s", error)
                continue
            if accept is None or accept(state.counters):
                return state
        return None

    def counters(self) -> dict[str, Any] | None:
        """Returns the counters of the newest state, None where there is none."""
        for path in self._newest_first():
            # NumPy leaves a file open that is no archive.
            with contextlib.suppress(Exception), open(path, "rb") as file:
                counters: dict[str, Any] = _about(np.load(file))["counters"]
                return counters
        return None

    def _newest_first(self) -> list[Path]:
        found = [p for p in self.directory.iterdir() if _NAME.fullmatch(p.name)]
        return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("good-"))


class Background:
    """Saves states in a thread, so that training waits for no disk.

    The thread lives as long as a write does. A process that ends waits for it.
    `seconds` are those of the last write, 0 before the first.
    """

    def __init__(
        self, slots: Slots, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.seconds = 0.0
        self._slots, self._clock = slots, clock
        self._thread: threading.Thread | None = None
        self._state: State | None = None
        self._has_warned = False

    @property
    def is_busy(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def holds(self, state: State) -> bool:
        """Returns whether a state is being written, so that it must not change."""
        return self.is_busy and self._state is state

    def start(self, state: State) -> bool:
        """Begins to write a state, which must not change until the write is over."""
        if self.is_busy:
            return False
        self._state = state
        self._thread = threading.Thread(target=self._write, args=(state,))
        self._thread.start()
        return True

    def finish(self) -> None:
        """Waits for the write that is under way, if there is one."""
        if self._thread is not None:
            self._thread.join()
        self._thread = self._state = None

    def _write(self, state: State) -> None:
        start = self._clock()
        try:
            self._slots.save(state)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                logging.warning(
                    "A good snapshot could not be written to %r (%s). Training goes "
                    "on, and the next one is tried too. Free space there.",
                    str(self._slots.directory),
                    error,
                )
        self.seconds = self._clock() - start


def folder_path(argument: str, path: object) -> str:
    """Returns the path of a folder as text; a TypeError says that it is none."""
    if isinstance(path, (str, os.PathLike)):
        return os.fspath(path)
    raise TypeError(
        f"`{argument}` is {path!r}, of type {type(path).__name__}; expected the path "
        "of a folder. Pass a string."
    )


def made_folder(argument: str, path: object) -> Path:
    """Returns the path of a folder that exists and can be written, made if need be.

    Raises:
        TypeError: It is no path.
        ValueError: It is a file, or cannot be made or written.
    """
    folder = Path(folder_path(argument, path)).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"`{argument}` {str(path)!r} cannot be made: {error}. Expected a folder, "
            "or a path where one can be made. Pass another path."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"`{argument}` {str(path)!r} cannot be written; expected a folder of "
            "yours. Pass another path, or change its permissions."
        )
    return folder
