"""An exported folder: `export.json`, whether it is as written, how it gets there."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from tfamp.records.record import BESIDE, Record
from tfamp.serving.runtimes.signature import Signature

NAME = "export.json"
FORMAT_VERSION = 1  # of the meaning of the fields
RUNTIMES = ("saved_model", "litert", "onnx", "openvino")
# Runtime -> the file that it is pointed to, "" for the folder itself.
_ELSEWHERE = {"litert": "model.tflite", "onnx": "model.onnx", "openvino": "model.xml"}
FILES = {"saved_model": "", **_ELSEWHERE}
# Where a SavedModel looks for files that are not named to it one by one.
SAVED_MODEL_FOLDERS = ("variables", "assets", "assets.extra")
_AGAIN = "Copy the folder again, or export the model again with `tfamp.export`."


@dataclasses.dataclass(frozen=True)
class Manifest(Record):
    """What `export.json` says."""

    runtime: str
    dtype: str
    scheme: str
    signature: Signature
    files: dict[str, str]  # file, with "/" between folders -> its SHA-256
    versions: dict[str, str]  # of the packages that wrote the folder
    # Layer that stays in float32 -> why.
    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    gate: dict[str, Any] | None = None  # what the comparison with float32 found

    def write(self, folder: Path) -> None:
        """Writes `export.json` into a folder."""
        record = self.to_dict() | {"format_version": FORMAT_VERSION}
        text = json.dumps(record, indent=2, sort_keys=True)
        (folder / NAME).write_text(f"{text}\n", encoding="utf-8")


def read(path: Path) -> Manifest:
    """Returns what `export.json` of a folder says; its files are not looked at."""
    file = path / NAME
    if not file.is_file():
        what = f"has no {NAME}" if path.is_dir() else "is no folder"
        told = f"`path` is {str(path)!r}, which {what}; expected a folder that"
        raise FileNotFoundError(f"{told} `tfamp.export` wrote. Correct the path.")
    known = {field.name for field in dataclasses.fields(Manifest)}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version, runtime = record["format_version"], record["runtime"]
        if version != FORMAT_VERSION or runtime not in RUNTIMES:
            raise ValueError(f"it is of format version {version!r}, for {runtime!r}")
        return Manifest.from_dict({k: v for k, v in record.items() if k in known})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{str(file)!r} is damaged, or of another tfamp: {error!r}; expected"
        raise ValueError(f"{told} version {FORMAT_VERSION}. {_AGAIN}") from error


def written_in(path: Path) -> frozenset[str] | None:
    """Returns the files that an export of whatever version wrote; None without any."""
    try:
        record = json.loads((path / NAME).read_text(encoding="utf-8"))
        return frozenset({NAME, *record["files"]} if record["runtime"] else ())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(path: Path, manifest: Manifest) -> None:
    """Raises unless a folder holds what was written, and no more that is read."""
    root = path.resolve()
    for name, digest in manifest.files.items():
        file, why = path / name, ""
        if root not in file.resolve().parents:
            why = f"lies outside of {str(path)!r}"
        elif not file.is_file():
            why = "is missing"
        elif (found := sha256(file)) != digest:
            why = f"is changed: its SHA-256 is {found}; expected {digest}"
        if why:
            raise ValueError(f"{str(file)!r}, named by {NAME}, {why}. {_AGAIN}")
    folders = SAVED_MODEL_FOLDERS if manifest.runtime == "saved_model" else ()
    for file in (file for folder in folders for file in (path / folder).rglob("*")):
        if file.is_file() and file.relative_to(path).as_posix() not in manifest.files:
            raise ValueError(f"{str(file)!r} is not named by {NAME}. Take it away.")


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of all files in a folder but `export.json`."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    found = {file.relative_to(folder).as_posix(): sha256(file) for file in files}
    found.pop(NAME, None)
    return found


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def check_target(path: Path) -> None:
    """Raises unless a folder may be written at `path`, or take an export's place."""
    above = path.absolute().parent
    if not above.is_dir() or not os.access(above, os.W_OK):
        told = f"`path` is {str(path)!r}, whose folder is not there, or read-only. "
        raise FileNotFoundError(f"{told}Make it with `mkdir -p {above}`.")
    _put_in_order(path.absolute())
    others = [] if written_in(path) else own_files(path)  # of an export they come along
    if path.is_symlink() or path.is_file() or others:
        told = f"holds {others[:3]}" if others else "is a file or a link"
        raise FileExistsError(
            f"`path` is {str(path)!r}, which {told}; expected a new name, an empty "
            "folder, or a former export, which is replaced. Pass another path."
        )


def own_files(path: Path) -> list[str]:
    """Returns the files in a folder that no export wrote, such as a list of labels."""
    files = {file for file in path.rglob("*") if file.is_symlink() or file.is_file()}
    names = {file.relative_to(path).as_posix() for file in files}
    return sorted(names - (written_in(path) or frozenset()))


def place(source: Path, path: Path) -> None:
    """Copies a folder to where it belongs, whole or not at all.

    Files of the user's in a former export's folder come along. What was there stays if
    the disk is full, at Ctrl-C, or where the process is killed: between both moves at
    the end it lies beside, and the next export of that name puts it back.
    """
    target = path.absolute()
    beside, former = _beside(target)
    kept = own_files(target)
    read = ("variables/", "assets/")  # a SavedModel is all that lies in there
    if taken := [n for n in kept if (source / n).exists() or n.startswith(read)]:
        told = f"{str(target)!r} holds {taken}, where this export has files of its own"
        raise FileExistsError(f"{told}, and no export wrote. Move them.")
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
        told = f"`path` is {str(path)!r}, which cannot be written ({error}); expected "
        told += "room for the export and the right to write. What was there is there."
        raise OSError(error.errno, told) from error
    finally:
        _put_in_order(target)


def _beside(target: Path) -> tuple[Path, Path]:
    name = f".{target.name}"
    return target.with_name(f"{name}{BESIDE}"), target.with_name(f"{name}.former")


def _put_in_order(target: Path) -> None:
    """Puts a former export back where none took its place, and removes what is left."""
    beside, former = _beside(target)
    if former.exists() and not target.exists():
        os.replace(former, target)
    shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(former, ignore_errors=True)
