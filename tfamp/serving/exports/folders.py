"""The folder of an export: whole or not at all, in the place of a former one only."""

import os
import shutil
from pathlib import Path

from tfamp.records.record import BESIDE
from tfamp.records.units import format_bytes
from tfamp.serving.runtimes.manifest import written_in

# Ending of a file -> the format that has such files.
_FILES = {
    ".onnx": "onnx",
    ".tflite": "litert",
    ".xml": "openvino",
    ".pb": "saved_model",
}


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place."""
    format = _FILES.get(path.suffix)
    if format is not None:
        raise ValueError(
            f"`path` is {str(path)!r}, the name of a file; expected one of a folder, "
            f"which holds the file and what it needs. Write `tfamp.export(model, "
            f"{path.stem!r}, format={format!r})`."
        )
    above = path.absolute().parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, and its folder is not there, or read-only; "
            "expected a name in a folder where you may write. Make it with `mkdir -p "
            f"{above}`, or pass another path."
        )
    _put_in_order(path.absolute())
    others = [] if written_in(path) else own_files(path)  # of an export they come along
    is_here = path.exists() and path.resolve() in (here := Path.cwd(), *here.parents)
    is_file = path.is_symlink() or path.is_file()
    if is_here or is_file or others:
        told = f"holds {others[:3]}" if others else "is a file or a link"
        if is_here:
            told = "is the folder of this process, or above it"
        raise FileExistsError(
            f"`path` is {str(path)!r}, which {told}; expected a new name, an empty "
            "folder, or a former export, which is replaced. Move what is there, or "
            "pass another path."
        )


def own_files(path: Path) -> list[str]:
    """Returns the files in a folder that no export wrote, such as a list of labels."""
    files = {file for file in path.rglob("*") if file.is_symlink() or file.is_file()}
    names = {file.relative_to(path).as_posix() for file in files}
    return sorted(names - (written_in(path) or frozenset()))


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Files of the user's in a former export's folder come along. What was there stays as
    it was if the disk is full, Ctrl-C comes at whatever moment, or the process is
    killed. Killed between the two moves at the end, which take microseconds, it lies
    beside, and the next export of that name puts it back.
    """
    target = path.absolute()
    beside, former = _beside(target)
    kept = own_files(target)
    read = ("variables/", "assets/")  # a SavedModel is all that lies in there
    if taken := [n for n in kept if (source / n).exists() or n.startswith(read)]:
        raise FileExistsError(
            f"{str(target)!r} holds {taken}, which no export wrote and where this one "
            "has files of its own; expected other names. Move them, or pass another "
            "path."
        )
    try:
        shutil.copytree(source, beside)
        for name in kept:
            (beside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / name, beside / name, follow_symlinks=False)
        if target.exists():
            shutil.copymode(target, beside)
            os.replace(target, former)
        os.replace(beside, target)
    except OSError as error:
        files = (file for file in source.rglob("*") if file.is_file())
        size = format_bytes(sum(file.stat().st_size for file in files))
        raise OSError(
            getattr(error, "errno", None),
            f"`path` is {str(path)!r}, which could not be written ({error}); expected "
            f"room for {size} and the right to write. What was there is as it was. "
            "Free some space, or pass another path.",
        ) from error
    finally:
        _put_in_order(target)


def _beside(target: Path) -> tuple[Path, Path]:
    """Returns where the new folder is written, and where the former one waits."""
    new, former = (f".{target.name}{end}" for end in (BESIDE, ".former"))
    return target.with_name(new), target.with_name(former)


def _put_in_order(target: Path) -> None:
    """Puts a former export back where none took its place, and removes what is left."""
    beside, former = _beside(target)
    if former.exists() and not target.exists():
        os.replace(former, target)
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)
