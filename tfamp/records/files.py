"""Files that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

# What ends the name of a file that is being written.
BESIDE = ".writing"


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[Path]:
    """Yields a path beside another; the file written there takes the other's place.

    What was there before stays until then, also where the block raises or the process
    is killed, and no reader ever sees half of a file. The folder has to exist. With
    `durable` the file reaches the disk first, as a crash of the system may follow.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{BESIDE}")
    try:
        yield beside
        if durable:
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        sync_folder(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text so that a reader or a crash never sees half of it.

    An OSError says that the folder is not there, the path a folder, or the disk full.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(target)!r}, and its folder is not there; expected a file "
            f"in a folder that is. Make it with `mkdir -p {target.parent}`."
        )
    if target.is_dir():
        raise IsADirectoryError(
            f"`path` is {str(target)!r}, a folder; expected a file. Add a name to it, "
            f"as in {str(target / 'report.html')!r}."
        )
    try:
        with whole(target) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        # Windows has no quotas to run out of.
        full = error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
        remedy = "Free some space" if full else "Make the folder writable"
        raise OSError(
            error.errno,
            f"`path` is {str(target)!r}, which could not be written "
            f"({error.strerror}); expected room for {len(text.encode()):,} bytes and "
            f"the right to write. {remedy}, or pass another path.",
        ) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder reach the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
