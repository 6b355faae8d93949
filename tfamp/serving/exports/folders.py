"""A folder that appears whole or not at all, where an export was or nothing was."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfamp.records.checks import short_error
from tfamp.records.files import BESIDE
from tfamp.records.units import format_bytes
from tfamp.serving.runtimes.manifest import NAME

# Of a model's weights: as converters read them, and before and after lowering.
_COPIES = 4


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

    What was there stays as it was if the block raises, Ctrl-C comes at whatever moment,
    or the process is killed. Killed between the two moves at the end, which take
    microseconds, it lies beside as `.NAME.TOKEN.former`.
    """
    target = path.absolute()
    token = secrets.token_hex(4)
    beside = target.with_name(f".{target.name}.{token}{BESIDE}")
    former = target.with_name(f".{target.name}.{token}.former")
    try:
        beside.mkdir()
        yield beside
        if target.exists():
            os.replace(target, former)
        os.replace(beside, target)
    finally:
        if former.exists() and not target.exists():
            os.replace(former, target)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Raises:
        OSError: The disk is full, or does not let the folder be written.
    """
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    try:
        with whole(path) as beside:
            for file in files:
                copy = beside / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
    except OSError as error:
        remedy = "Free some space" if _is_full(error) else "Make its folder writable"
        size = format_bytes(sum(file.stat().st_size for file in files))
        raise OSError(
            error.errno,
            f"`path` is {str(path)!r}, which could not be written ({error.strerror}); "
            f"expected room for {size} and the right to write. What was there is as it "
            f"was. {remedy}, or pass another path.",
        ) from error


@contextlib.contextmanager
def said_if_full(size_bytes: int) -> Iterator[None]:
    """Says that the disk of temporary files is too full where that may be the cause.

    Libraries say so each in their own words, or not at all.

    Args:
        size_bytes: Of the weights of the model that the block writes and converts.

    Raises:
        OSError: The block failed, and the disk has too little left for it.
    """
    try:
        yield
    except Exception as error:
        where = tempfile.gettempdir()
        free, needed = shutil.disk_usage(where).free, _COPIES * size_bytes
        is_told = isinstance(error, (ImportError, OSError, TypeError, ValueError))
        if not _is_full(error) and (is_told or free >= needed):
            raise
        raise OSError(
            errno.ENOSPC,
            f"Writing the model failed in {where!r}, where {format_bytes(free)} are "
            f"free: {short_error(error)}; expected room for {_COPIES} times its "
            f"weights, {format_bytes(needed)}. Free some space there, or set TMPDIR "
            "to a folder that has more.",
        ) from error


def _is_full(error: Exception) -> bool:
    """States whether an error says that a disk or a quota is full."""
    number = error.errno if isinstance(error, OSError) else None
    return number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
