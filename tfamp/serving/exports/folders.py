"""A folder that appears whole or not at all, where an export was or nothing was."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfamp.records.files import BESIDE
from tfamp.serving.runtimes.manifest import NAME


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place.

    Raises:
        FileExistsError: Something else is there.
        FileNotFoundError: The folder it is to lie in is not there.
    """
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, and its folder is not there; expected a name in "
            f"a folder that is. Make it with `mkdir -p {path.absolute().parent}`."
        )
    is_free = not path.exists() and not path.is_symlink()
    is_export = path.is_dir() and not path.is_symlink() and (path / NAME).is_file()
    if not (is_free or is_export or (path.is_dir() and not any(path.iterdir()))):
        raise FileExistsError(
            f"`path` is {str(path)!r}, where something else is than an export; "
            "expected a new name, an empty folder or a former export, which is "
            "replaced. Pass another path."
        )


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a folder beside another; when the block ends it takes the other's place.

    What was there stays as it was if the block raises or the process is killed.
    """
    target = path.absolute()
    token = secrets.token_hex(4)
    beside = target.with_name(f".{target.name}.{token}{BESIDE}")
    former = target.with_name(f".{target.name}.{token}.former")
    beside.mkdir()
    try:
        yield beside
        if target.exists():
            os.replace(target, former)
        try:
            os.replace(beside, target)
        except OSError:
            if former.exists():
                os.replace(former, target)
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
