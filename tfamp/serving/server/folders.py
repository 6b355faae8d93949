"""Where models lie: one exported folder, or a folder of numbered versions."""

import os
from pathlib import Path
from typing import NamedTuple

# What every exported folder has.
RECORD = "export.json"
# The number of a folder that has no versions.
ONLY = "1"
# A name goes into addresses and metrics.
_ALLOWED = frozenset(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
)

# Of each file of a folder: its name, when it changed, its size and its number on disk.
Stamp = tuple[tuple[str, int, int, int], ...]


class Source(NamedTuple):
    """A model to serve: its name in addresses, and where it lies."""

    name: str
    path: Path


def sources(texts: list[str]) -> list[Source]:
    """Returns the models that `PATH` and `NAME=PATH` name.

    Raises:
        FileNotFoundError: A path does not exist, or holds no exported model.
        ValueError: A name cannot stand in an address, or came twice.

    Example:
        >>> sources(["digits=nowhere"])
        Traceback (most recent call last):
        ...
        FileNotFoundError: There is no folder 'nowhere' for model 'digits'; expected \
one that `tfamp.export` wrote, or one of numbered versions. Correct the path.
    """
    found: list[Source] = []
    for text in texts:
        name, equals, rest = text.partition("=")
        path = Path(rest if equals else text)
        name = name if equals else path.resolve().name
        if not name or not _ALLOWED.issuperset(name):
            raise ValueError(
                f"The model of {text!r} is called {name!r}; expected letters, digits, "
                f"'.', '_' and '-'. Name it, as in 'digits={path}'."
            )
        if any(each.name == name for each in found):
            raise ValueError(
                f"Two models are called {name!r}; expected one. Name them, as in "
                f"'first={path}'."
            )
        if path.is_file():
            raise FileNotFoundError(
                f"{str(path)!r} is a file; expected a folder that `tfamp.export` "
                f"wrote. Write one with `tfamp export {path}`, or name the folder that "
                "the file is in."
            )
        if not path.is_dir():
            raise FileNotFoundError(
                f"There is no folder {str(path)!r} for model {name!r}; expected one "
                "that `tfamp.export` wrote, or one of numbered versions. Correct the "
                "path."
            )
        found.append(Source(name, path))
        if not versions(path):
            raise FileNotFoundError(
                f"Folder {str(path)!r} holds neither {RECORD} nor numbered folders "
                "with it; expected an exported model, or its versions. Write one with "
                "`tfamp.export`."
            )
    return found


def versions(path: Path) -> dict[str, Path]:
    """Returns the exported folders of a model by their numbers."""
    if (path / RECORD).is_file():
        return {ONLY: path}
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return {}
    return {
        str(int(entry.name)): entry
        for entry in entries
        if entry.name.isascii() and entry.name.isdigit() and (entry / RECORD).is_file()
    }


def stamp(folder: Path) -> Stamp:
    """Returns what changes when a file of the folder does; () where it is gone."""
    found = []
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            try:
                known = os.stat(path)
            except OSError:
                continue
            found.append((path, known.st_mtime_ns, known.st_size, known.st_ino))
    return tuple(sorted(found))
