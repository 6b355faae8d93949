"""The folder of an export: whole or not at all, in the place of a former one only."""

import contextlib
import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from tfamp.records.checks import short_error
from tfamp.records.record import BESIDE
from tfamp.records.units import format_bytes
from tfamp.serving.runtimes.manifest import READ_FOLDERS, written_in

# Of a model's weights: as converters read them, and before and after lowering.
_COPIES = 4


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place."""
    above = path.absolute().parent
    if not above.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, and its folder is not there; expected a name in "
            f"a folder that is. Make it with `mkdir -p {above}`."
        )
    if path.is_symlink():
        raise FileExistsError(
            f"`path` is {str(path)!r}, a link to {os.readlink(path)!r}; expected the "
            "name of a folder. Pass what the link points to, or another path and move "
            "the link there."
        )
    if path.exists() and path.resolve() in (here := Path.cwd(), *here.parents):
        raise FileExistsError(
            f"`path` is {str(path)!r}, in which this process works; expected another "
            "folder, as a former export is moved away. Change to the folder above, and "
            "pass its name."
        )
    is_export = path.is_dir() and written_in(path) is not None
    is_free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if not (is_free or is_export):
        raise FileExistsError(
            f"`path` is {str(path)!r}, where something else is than an export; "
            "expected a new name, an empty folder or a former export, which is "
            "replaced. Pass another path."
        )
    for folder in (above, path):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(
                errno.EACCES,
                f"`path` is {str(path)!r}, and {str(folder)!r} is read-only; expected "
                "the right to write. Make it writable, or pass another path.",
            )


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Of a former export go the files that its `export.json` names; others, such as the
    labels that a deployment reads, come along.

    What was there stays as it was if the disk is full, Ctrl-C comes at whatever moment,
    or the process is killed. Killed between the two moves at the end, which take
    microseconds, it lies beside as `.NAME.TOKEN.former`.
    """
    target = path.absolute()
    token = secrets.token_hex(4)
    beside = target.with_name(f".{target.name}.{token}{BESIDE}")
    former = target.with_name(f".{target.name}.{token}.former")
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    new = [file.relative_to(source).as_posix() for file in files]
    others = _others(target, new)
    try:
        beside.mkdir()
        for folder, names in ((source, new), (target, others)):
            for name in names:
                copy = beside / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                if folder is source:
                    shutil.copyfile(folder / name, copy)
                else:
                    shutil.copy2(folder / name, copy, follow_symlinks=False)
        if target.exists():
            shutil.copymode(target, beside)
            os.replace(target, former)
        os.replace(beside, target)
    except OSError as error:
        remedy = "Free some space" if _is_full(error) else "Make its folder writable"
        size = format_bytes(sum(file.stat().st_size for file in files))
        raise OSError(
            error.errno,
            f"`path` is {str(path)!r}, which could not be written ({error.strerror}); "
            f"expected room for {size} and the right to write. What was there is as it "
            f"was. {remedy}, or pass another path.",
        ) from error
    finally:
        if former.exists() and not target.exists():
            os.replace(former, target)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _others(target: Path, new: Collection[str]) -> list[str]:
    """Returns the files in a former export's folder that are not of the export."""
    former = written_in(target) or ()
    found = []
    for folder, below, names in os.walk(target):
        links = [name for name in below if Path(folder, name).is_symlink()]
        paths = (Path(folder, name).relative_to(target) for name in (*names, *links))
        found += [path.as_posix() for path in paths if path.as_posix() not in former]
    # A SavedModel is all that lies in its folders.
    is_saved_model = "saved_model.pb" in new
    read = tuple(f"{name}/" for name in READ_FOLDERS["saved_model"] if is_saved_model)
    taken = [path for path in found if path in new or path.startswith(read)]
    if taken:
        raise FileExistsError(
            f"{str(target)!r} holds {taken}, which no export wrote and where this one "
            "has files of its own; expected other names. Nothing was written: move "
            "them, or pass another path."
        )
    return found


@contextlib.contextmanager
def said_if_full(size_bytes: int) -> Iterator[None]:
    """Says that the disk of temporary files is too full where that may be the cause.

    Libraries say so each in their own words, or not at all.
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
