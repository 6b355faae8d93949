"""Writes and reads bundles: folders that are whole or not there.

A bundle is built in a folder beside its place and renamed when all of it has reached
the disk. So a process that is killed leaves no half of one, only a hidden folder, which
`remove_leftovers` takes away. Random generators that are no variables are in it too.
"""

import dataclasses
import os
import platform
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfamp.records.files import sync_folder
from tfamp.stepping import snapshots
from tfamp.stepping.bundles.record import Bundle
from tfamp.stepping.snapshots.files import check_archive

RECORD, STATE, BATCHES = "bundle.json", "state.npz", "batches.npz"
RANDOM, MODEL = "random.npz", "model.keras"
_LEFTOVER = re.compile(r"\.writing-(?P<host>[^-]*)-(?P<process>\d+)-.+")


def take_random() -> dict[str, np.ndarray]:
    """Returns the states of Python's, NumPy's and TensorFlow's global generators.

    Stateless draws and Keras's seed generators, which Dropout and the like use, need
    none of them; operations such as `tf.random.normal` keep a state of their own that
    cannot be read.
    """
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python/version": np.array(version, np.int64),
        "python/internal": np.array(internal, np.uint32),
        "python/gauss": np.array(np.nan if gauss is None else gauss),
        "numpy/kind": np.frombuffer(str(kind).encode(), np.uint8),
        "numpy/keys": np.array(keys, np.uint32),
        "numpy/position": np.array([position, has_gauss], np.int64),
        "numpy/gauss": np.array(cached, np.float64),
    }
    state = _generator_state()
    if state is not None:
        states["tensorflow/state"] = state
    return states


def put_random(states: Mapping[str, np.ndarray]) -> None:
    """Gives the generators the states that `take_random` returned."""
    gauss = float(states["python/gauss"])
    random.setstate(
        (
            int(states["python/version"]),
            tuple(states["python/internal"].tolist()),
            None if np.isnan(gauss) else gauss,
        )
    )
    position, has_gauss = states["numpy/position"].tolist()
    np.random.set_state(
        (
            states["numpy/kind"].tobytes().decode(),
            states["numpy/keys"],
            position,
            has_gauss,
            float(states["numpy/gauss"]),
        )
    )
    if "tensorflow/state" in states:
        generator: Any = tf.random.get_global_generator()
        if generator.state.shape == states["tensorflow/state"].shape:
            generator.state.assign(states["tensorflow/state"])


def _generator_state() -> np.ndarray | None:
    """Returns the state of TensorFlow's global generator, one replica's alone."""
    generator: Any = tf.random.get_global_generator()
    try:
        return np.array(generator.state.numpy())
    except (AttributeError, NotImplementedError, ValueError):
        return None  # made under a strategy, with a state for each replica


class Contents(NamedTuple):
    """What a bundle is made of."""

    record: Bundle
    state: snapshots.State
    batches: Mapping[str, np.ndarray]
    random: Mapping[str, np.ndarray]


def write(folder: Path, contents: Contents, save_model: Callable[[Path], str]) -> Path:
    """Writes a bundle and returns its folder; after an error nothing is left of it.

    Args:
        folder: Where its folder is made.
        contents: What it holds.
        save_model: Writes the model to a path, and returns why a fresh process cannot
            rebuild it from there alone, or an empty text. Where it raises, the bundle
            has no model.
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
        record.sealed().to_json(beside / RECORD)
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
    names = (STATE, BATCHES, RANDOM)
    for name in (*names, MODEL) if record.has_model else names:
        if not (folder / name).is_file():
            raise _damaged(folder, f"its file {name!r} is missing")
    try:
        state, batches, random_states = (snapshots.read(folder / n) for n in names)
        if record.has_model:
            check_archive(folder / MODEL)
    except ValueError as error:
        raise _damaged(folder, str(error)) from error
    return Contents(record, state, batches.arrays, random_states.arrays)


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
    if (folder / "state.tfamp").exists():
        raise _damaged(folder, "a version before the first release wrote it")
    record = Bundle.from_json(folder / RECORD)
    if record.checksum != record.computed_checksum():
        raise _damaged(folder, f"its file {RECORD!r} was changed")
    return record


def remove_leftovers(folder: Path) -> int:
    """Removes what processes that were killed here left half written."""
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
