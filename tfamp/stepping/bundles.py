"""Bundles: a failing training step in a folder, with all that looking into it takes.

A bundle is built in a hidden folder and renamed when all of it has reached the disk, so
a process that is killed leaves no half of one.
"""

import dataclasses
import itertools
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import tensorflow as tf

from tfamp.records.checks import first_line
from tfamp.records.record import Record, sync_folder
from tfamp.stepping import snapshot_files
from tfamp.stepping.snapshots import State

RECORD, STATE, BATCH, MODEL = "bundle.json", "state.npz", "batch", "model.keras"
_WRITING = ".writing-"


@dataclasses.dataclass(frozen=True)
class Bundle(Record):
    """What `bundle.json` says of a failing step; docs/triage.md has the rest.

    Args:
        cause: "loss", "weights", "skip" or "error".
        message: What was seen, a sentence.
        epoch: Its epoch, from 0.
        step: Batches drawn in this `fit` up to and with it.
        model_class: Where the class of the model is.
        policy: The policy in force.
        versions: Of what it ran on.
        no_model: Why `model.keras` is not there, or "".
        notes: What a reader should know.
    """

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


def write(
    folder: Path,
    record: Bundle,
    state: State,
    batch: Any,
    save_model: Callable[[Path], None],
) -> Path:
    """Writes a bundle and returns its folder; after an error nothing is left of it.

    Where `save_model`, which takes a path, raises, the bundle has no model.
    """
    beside = folder / f"{_WRITING}{os.getpid()}-{record.step}-{record.cause}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        snapshot_files.write(state, beside / STATE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a None in the batch
            tf.data.Dataset.from_tensors(batch).save(os.fspath(beside / BATCH))
        try:
            save_model(beside / MODEL)
        except OSError:
            raise  # the disk, not the model
        except Exception as error:  # whatever a user's `get_config` raises
            (beside / MODEL).unlink(missing_ok=True)
            why = f"{type(error).__name__}: {first_line(error)}"
            record = dataclasses.replace(record, no_model=why)
        record.to_json(beside / RECORD)
        for path in beside.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        sync_folder(beside)
        # Runs may share a folder.
        name = f"failure-{record.step:08d}-{record.cause}"
        names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
        target = next(folder / n for n in names if not (folder / n).exists())
        os.rename(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync_folder(folder)
    return target


def read(path: str | os.PathLike[str]) -> tuple[Bundle, State, Any]:
    """Returns record, state and batch of a bundle, whose every byte is checked.

    Raises:
        FileNotFoundError: There is no such folder, or it holds no bundle.
        ValueError: The bundle is damaged, or of another version of tfamp.
    """
    folder = Path(path)
    if not (folder / RECORD).is_file():
        raise FileNotFoundError(
            f"Found no bundle in {str(path)!r}: expected a folder with a file "
            f"{RECORD!r}, as `tfamp.callbacks.NanRecovery` writes it. Check the path."
        )
    try:
        record = Bundle.from_json(folder / RECORD)
        state = snapshot_files.read(folder / STATE)
        batch = next(iter(tf.data.Dataset.load(os.fspath(folder / BATCH))))
    except (ValueError, OSError, StopIteration, tf.errors.OpError) as error:
        raise ValueError(
            f"The bundle {str(path)!r} is damaged: {first_line(error)} Expected it as "
            "`tfamp.callbacks.NanRecovery` wrote it. Copy it again, or take another."
        ) from error
    return record, state, batch


def remove_leftovers(folder: Path) -> None:
    """Removes what a process that was killed here left half written."""
    for path in folder.glob(f"{_WRITING}*"):
        shutil.rmtree(path, ignore_errors=True)
