"""Writing of a report's files: whole or not at all, with errors that help."""

import errno
import os
from pathlib import Path

from tfamp._files import whole


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text so that a reader or a crash never sees half of it.

    Args:
        path: Where to; the folder has to exist.
        text: The whole file.

    Raises:
        FileNotFoundError: The folder does not exist.
        IsADirectoryError: `path` is a folder.
        OSError: The disk is full, or does not let the file be written.
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
