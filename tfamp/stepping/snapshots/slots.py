"""A folder with the last few good states, of which one is always whole.

States go to files in turn, so the newest one is never written over; the manifest,
which says in what order they came, is written last. A process that is killed at any
moment leaves the manifest of before or of after, and under each the files it names.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import logging

from tfamp.records import checks
from tfamp.records.files import BESIDE
from tfamp.stepping.snapshots import files
from tfamp.stepping.snapshots.state import State

MANIFEST = "manifest.json"
_SUFFIX = ".state"
_NAME = re.compile(r"good-\d+\.state")


class Slots:
    """Keeps the last `keep` states in a folder.

    Only states that are known to be good belong here: `load` takes any that is whole.

    Args:
        directory: The folder, made if need be. One process writes to it.
        keep: Number of files, at least 2, or the only one would be written over.

    Raises:
        ValueError: `keep` is below 2, or the folder cannot be made or written.
        TypeError: An argument has the wrong type.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2) -> None:
        self.keep = checks.positive_int("keep", keep, minimum=2)
        self.directory = made_folder("directory", directory)
        for left in self.directory.glob(f"*{BESIDE}"):
            left.unlink()  # by a process that was killed

    def save(self, state: State, **facts: Any) -> Path:
        """Writes a state in the place of the oldest one.

        Args:
            state: The state, a good one.
            **facts: Goes into the manifest, as JSON.

        Returns:
            The file.

        Raises:
            OSError: It cannot be written. What was there before is still there.
        """
        entries, taken = self._entries(), self._newest_first()
        names = [f"good-{i}{_SUFFIX}" for i in range(self.keep)]
        free = [name for name in names if name not in taken]
        # Newest first: the last name is the oldest state.
        name = free[0] if free else [n for n in taken if n in names][-1]
        files.write(state, self.directory / name)
        entry = {"file": name, **state.counters, **facts}
        others = [e for e in entries if e["file"] != name]
        table = {"states": [entry, *others[: self.keep - 1]]}
        files.write_text(json.dumps(table, indent=1), self.directory / MANIFEST)
        return self.directory / name

    def load(
        self, accept: Callable[[dict[str, Any]], bool] | None = None
    ) -> State | None:
        """Reads the newest state that is whole, None where there is none.

        A damaged file is passed over with a warning. So is a manifest: then the files
        themselves say which is the newest.

        Args:
            accept: Takes the counters of a state; None takes all.
        """
        for name in self._newest_first():
            try:
                state = files.read(self.directory / name)
            except (ValueError, OSError) as error:
                logging.warning("Passed over a snapshot. %s", error)
                continue
            if accept is None or accept(state.counters):
                return state
        return None

    def counters(self) -> dict[str, Any] | None:
        """Returns the counters of the newest state, None where there is none."""
        for name in self._newest_first():
            try:
                return files.read_counters(self.directory / name)
            except (ValueError, OSError):
                continue
        return None

    def _newest_first(self) -> list[str]:
        listed = [entry["file"] for entry in self._entries()]
        found = [p.name for p in self.directory.iterdir() if _NAME.fullmatch(p.name)]
        # Killed after a file was in place and before the manifest was.
        unlisted = [name for name in found if name not in listed]
        if not listed:
            return sorted(unlisted, key=self._written_at, reverse=True)
        return [name for name in listed if name in found] + unlisted

    def _written_at(self, name: str) -> float:
        return (self.directory / name).stat().st_mtime

    def _entries(self) -> list[dict[str, Any]]:
        """Returns what the manifest lists, newest first."""
        try:
            table = json.loads((self.directory / MANIFEST).read_text("utf-8"))
            entries: list[dict[str, Any]] = [
                entry for entry in table["states"] if _NAME.fullmatch(entry["file"])
            ]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            logging.warning(
                "Passed over the damaged manifest %r (%s); the files beside it tell "
                "which is the newest.",
                str(self.directory / MANIFEST),
                error,
            )
            return []
        return entries


def made_folder(argument: str, path: object) -> Path:
    """Returns the path of a folder that exists and can be written, made if need be.

    Raises:
        TypeError: It is no path.
        ValueError: It is a file, or cannot be made or written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"`{argument}` is {path!r}, of type {type(path).__name__}; expected the "
            "path of a folder. Pass a string."
        )
    folder = Path(os.fspath(path)).expanduser().absolute()
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
