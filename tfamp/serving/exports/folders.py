"""The folder of an export: whole or not at all, in the place of a former one only."""

import errno
import glob
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from tfamp.records.record import BESIDE
from tfamp.records.units import format_bytes
from tfamp.serving.runtimes.manifest import SAVED_MODEL_FOLDERS, written_in

_FORMER = ".former"


# Ending of a file -> the format that has such files.
_FILES = {
    ".onnx": "onnx",
    ".tflite": "litert",
    ".xml": "openvino",
    ".pb": "saved_model",
}


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place.

    What exports of this name left behind that were killed is put in order first.
    """
    format = _FILES.get(path.suffix)
    if format is not None:
        raise ValueError(
            f"`path` is {str(path)!r}, the name of a file; expected one of a folder, "
            f"which holds the file and what it needs. Write `tfamp.export(model, "
            f"{path.stem!r}, format={format!r})`."
        )
    above = path.absolute().parent
    if not above.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, and its folder is not there; expected a name in "
            f"a folder that is. Make it with `mkdir -p {above}`."
        )
    for folder in (above, path):
        if folder.exists() and not os.access(folder, os.W_OK):
            raise PermissionError(
                errno.EACCES,
                f"`path` is {str(path)!r}, and {str(folder)!r} is read-only; expected "
                "the right to write. Make it writable, or pass another path.",
            )
    _clean(path.absolute())
    why = ""
    if path.is_symlink():
        why = f"a link to {os.readlink(path)!r}. Pass what the link points to"
    elif path.exists() and path.resolve() in (here := Path.cwd(), *here.parents):
        why = "in which this process works. Change to the folder above"
    elif path.exists() and written_in(path) is None:
        if not path.is_dir() or any(path.iterdir()):
            why = "where something else is than an export. Take it away"
    if why:
        raise FileExistsError(
            f"`path` is {str(path)!r}, {why}, or pass another path; expected a new "
            "name, an empty folder or a former export, which is replaced."
        )


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Of a former export go the files that its `export.json` names; others, such as the
    labels that a deployment reads, come along.

    What was there stays as it was if the disk is full, Ctrl-C comes at whatever moment,
    or the process is killed. Killed between the two moves at the end, which take
    microseconds, it lies beside, and the next export of that name puts it back.
    """
    target = path.absolute()
    beside, former = (
        target.with_name(f".{target.name}.{os.getpid()}{end}")
        for end in (BESIDE, _FORMER)
    )
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    new = [file.relative_to(source).as_posix() for file in files]
    kept = _own_files(target, new)
    try:
        beside.mkdir()
        for folder, name in [*((source, n) for n in new), *((target, n) for n in kept)]:
            copy = beside / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / name, copy, follow_symlinks=False)
        if target.exists():
            shutil.copymode(target, beside)
            os.replace(target, former)
        os.replace(beside, target)
    except OSError as error:
        size = format_bytes(sum(file.stat().st_size for file in files))
        raise OSError(
            error.errno,
            f"`path` is {str(path)!r}, which could not be written ({error.strerror}); "
            f"expected room for {size} and the right to write. What was there is as it "
            "was. Free some space, or pass another path.",
        ) from error
    finally:
        if former.exists() and not target.exists():
            os.replace(former, target)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _own_files(target: Path, new: Collection[str]) -> list[str]:
    """Returns the files in a former export's folder that are not of the export."""
    former = written_in(target) or ()
    found = []
    for folder, below, names in os.walk(target):
        links = [name for name in below if Path(folder, name).is_symlink()]
        paths = (Path(folder, name).relative_to(target) for name in (*names, *links))
        found += [path.as_posix() for path in paths if path.as_posix() not in former]
    # A SavedModel is all that lies in its folders.
    is_saved_model = "saved_model.pb" in new
    read = tuple(f"{name}/" for name in SAVED_MODEL_FOLDERS if is_saved_model)
    taken = [path for path in found if path in new or path.startswith(read)]
    if taken:
        raise FileExistsError(
            f"{str(target)!r} holds {taken}, which no export wrote and where this one "
            "has files of its own; expected other names. Nothing was written: move "
            "them, or pass another path."
        )
    return found


def _clean(target: Path) -> None:
    """Removes, or puts back, what killed exports of this name left beside it."""
    for end in (_FORMER, BESIDE):
        for left in target.parent.glob(f".{glob.escape(target.name)}.*{end}"):
            process = left.name[len(target.name) + 2 : -len(end)]
            if not process.isdigit() or _is_alive(int(process)):
                continue
            if end == _FORMER and not target.exists():
                os.replace(left, target)
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(process: int) -> bool:
    """States whether there is another process of a number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return process != os.getpid()
