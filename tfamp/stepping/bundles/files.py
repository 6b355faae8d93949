"""Writes and reads bundles: folders that are whole or not there.

A bundle is built in a folder beside its place and renamed when all of it has reached
the disk. So a process that is killed leaves no half of one, only a hidden folder, which
`remove_leftovers` takes away.
"""

import dataclasses
import os
import platform
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tfamp.records.files import sync_folder
from tfamp.stepping import snapshots
from tfamp.stepping.bundles.record import Bundle, FileMark

RECORD, STATE, BATCHES = "bundle.json", "state.tfamp", "batches.tfamp"
RANDOM, MODEL = "random.tfamp", "model.keras"
_LEFTOVER = re.compile(r"\.writing-(?P<host>[^-]*)-(?P<process>\d+)-.+")
_CHUNK_BYTES = 2**20


class Contents(NamedTuple):
    """What a bundle is made of.

    Attributes:
        record: `bundle.json`.
        state: The model's variables from before the failure.
        batches: Arrays of the kept batches, by the names in the record.
        random: States of random generators when the state was taken.
    """

    record: Bundle
    state: snapshots.State
    batches: Mapping[str, np.ndarray]
    random: Mapping[str, np.ndarray]


def write(folder: Path, contents: Contents, save_model: Callable[[Path], str]) -> Path:
    """Writes a bundle.

    Args:
        folder: Where its folder is made.
        contents: What it holds.
        save_model: Writes the model to a path, and returns why a fresh process cannot
            rebuild it from there alone, or an empty text. Where it raises, the bundle
            has no model.

    Returns:
        The bundle's folder.

    Raises:
        OSError: The disk is full, or the folder cannot be written. Nothing is left of
            the bundle.
    """
    beside = folder / _writing_name(contents.record)
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        _check_space(folder, contents)
        snapshots.write(contents.state, beside / STATE)
        for name, arrays in ((BATCHES, contents.batches), (RANDOM, contents.random)):
            snapshots.write(snapshots.State(dict(arrays), {}), beside / name)
        record = _with_model(contents.record, beside, save_model)
        marks = {path.name: _mark(path) for path in sorted(beside.iterdir())}
        record = dataclasses.replace(record, files=marks).sealed()
        record.to_json(beside / RECORD)
        _sync(beside)
        target = _free_name(folder, contents.record)
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_folder(folder)
    return target


def read(path: str | os.PathLike[str]) -> Contents:
    """Reads a bundle and verifies every byte of it.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no bundle.
        ValueError: The bundle is damaged.
    """
    folder = Path(path)
    record = read_record(folder)
    for name, mark in record.files.items():
        target = folder / name
        if not target.is_file():
            raise _damaged(folder, f"its file {name!r} is missing")
        found = _mark(target)
        if found.num_bytes != mark.num_bytes:
            raise _damaged(
                folder,
                f"its file {name!r} has {found.num_bytes} bytes of {mark.num_bytes}",
            )
        if found != mark:
            raise _damaged(folder, f"the bytes of its file {name!r} are not its own")
    return Contents(
        record,
        snapshots.read(folder / STATE),
        snapshots.read(folder / BATCHES).arrays,
        snapshots.read(folder / RANDOM).arrays,
    )


def read_record(path: str | os.PathLike[str]) -> Bundle:
    """Reads `bundle.json` of a bundle and verifies it.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no bundle.
        ValueError: The record is damaged, or of a later version of tfamp.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(
            f"Found no bundle in {str(path)!r}: expected a folder with a file "
            f"{RECORD!r}, as `tfamp.callbacks.FlightRecorder` writes it. Check the "
            "path."
        )
    record = Bundle.from_json(folder / RECORD)
    if record.checksum != record.computed_checksum():
        raise _damaged(folder, f"its file {RECORD!r} was changed")
    return record


def remove_leftovers(folder: Path) -> int:
    """Removes what processes that were killed here left half written.

    Returns:
        How many folders were removed.
    """
    num_removed = 0
    for path in folder.glob(".writing-*"):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or match["host"] != _host():
            continue
        if not _is_running(int(match["process"])):
            shutil.rmtree(path, ignore_errors=True)
            num_removed += 1
    return num_removed


def _with_model(
    record: Bundle, beside: Path, save_model: Callable[[Path], str]
) -> Bundle:
    target = beside / MODEL
    try:
        why = save_model(target)
        return dataclasses.replace(record, has_model=True, needs_build=why)
    except OSError:
        raise  # the disk, not the model
    except Exception as error:  # whatever a user's `get_config` raises
        target.unlink(missing_ok=True)
        first = (str(error).strip().splitlines() or [""])[0]
        why = f"it cannot be saved ({type(error).__name__}: {first})"
        return dataclasses.replace(record, has_model=False, needs_build=why)


def _check_space(folder: Path, contents: Contents) -> None:
    """Raises before a byte is written where the disk cannot hold the bundle."""
    arrays = [*contents.batches.values(), *contents.random.values()]
    # The model's file holds the variables once more.
    needed = 2 * contents.state.num_bytes + sum(array.nbytes for array in arrays)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"A bundle of {needed} bytes does not fit in {str(folder)!r}, where {free} "
            "bytes are free. Free some space, or pass another `directory`."
        )


def _mark(path: Path) -> FileMark:
    checksum, size = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return FileMark(size, checksum)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def _free_name(folder: Path, record: Bundle) -> Path:
    """Returns a path that nothing has yet: runs may share a folder."""
    name = f"failure-{record.step:08d}-{record.cause}"
    target, number = folder / name, 1
    while target.exists():
        number += 1
        target = folder / f"{name}-{number}"
    return target


def _writing_name(record: Bundle) -> str:
    return f".writing-{_host()}-{os.getpid()}-{record.step}-{record.cause}"


def _host() -> str:
    return re.sub(r"\W", "_", platform.node())


def _is_running(process: int) -> bool:
    if sys.platform == "win32":
        return True  # `os.kill` ends processes there, so nobody can be asked
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of another user
    return True


def _damaged(folder: Path, why: str) -> ValueError:
    return ValueError(
        f"The bundle {str(folder)!r} is damaged: {why}. Expected it as "
        "`tfamp.callbacks.FlightRecorder` wrote it. Copy it again, or take another one."
    )
