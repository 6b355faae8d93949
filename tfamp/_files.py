"""Files that appear whole or not at all."""

import contextlib
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
    is killed, and no reader ever sees half of a file.

    Args:
        path: Where the file is to appear; the folder has to exist.
        durable: Whether it has to reach the disk first, as a crash of the system may
            follow.

    Raises:
        OSError: The disk is full, or the folder is missing or cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "answer.txt"
        >>> with whole(path) as beside:
        ...     num_written = beside.write_text("42")
        ...     path.exists()
        False
        >>> path.read_text()
        '42'
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


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder reach the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
