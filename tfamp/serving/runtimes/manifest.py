"""`export.json`: what lies in an exported folder, and whether it still does."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfamp.serving.runtimes.signature import Signature

NAME = "export.json"
# Raised when the meaning of a field changes; folders of a later one are refused.
FORMAT_VERSION = 1
RUNTIMES = ("saved_model", "litert", "onnx", "openvino")
# Runtime -> the file that it is pointed to, where that is not the folder itself.
FILES = {"litert": "model.tflite", "onnx": "model.onnx", "openvino": "model.xml"}
# Where a SavedModel looks for files that are not named to it one by one.
SAVED_MODEL_FOLDERS = ("variables", "assets", "assets.extra")
_AGAIN = "Copy the folder again, or export the model again with `tfamp.export`."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `export.json` says."""

    runtime: str
    dtype: str
    scheme: str
    signature: Signature
    files: Mapping[str, str]  # file, with "/" between folders -> its SHA-256
    versions: Mapping[str, str]  # of the packages that wrote the folder
    processor: Mapping[str, Any]  # that it was tested on
    # Layer that stays in float32 -> why.
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gate: Mapping[str, Any] | None = None  # what the comparison with float32 found

    def write(self, folder: Path) -> None:
        """Writes `export.json` into a folder."""
        record = dataclasses.asdict(self) | {
            "format_version": FORMAT_VERSION,
            "signature": self.signature.to_dict(),
        }
        text = json.dumps(record, indent=2, sort_keys=True)
        (folder / NAME).write_text(f"{text}\n", encoding="utf-8")


def read(path: Path) -> Manifest:
    """Returns what `export.json` of a folder says; its files are not looked at."""
    file = path / NAME
    if not file.is_file():
        what = f"has no {NAME}" if path.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, which {what}; expected a folder that "
            "`tfamp.export` wrote. Correct the path, or export there."
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version, runtime = record["format_version"], record["runtime"]
        if version != FORMAT_VERSION or runtime not in RUNTIMES:
            raise ValueError(f"it is of format version {version!r}, for {runtime!r}")
        told = {name: value for name, value in record.items() if name in known}
        told["signature"] = Signature.from_dict(record["signature"])
        return Manifest(**told)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged, or of another tfamp: {type(error).__name__}: "
            f"{error}; expected version {FORMAT_VERSION}. {_AGAIN}"
        ) from error


def written_in(path: Path) -> frozenset[str] | None:
    """Returns the files that an export of whatever version wrote; None without any."""
    try:
        record = json.loads((path / NAME).read_text(encoding="utf-8"))
        return frozenset({NAME, *record["files"]} if record["runtime"] else ())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(path: Path, manifest: Manifest) -> None:
    """Raises `ValueError` unless a folder holds the very files that were written.

    What lies beside them is not looked at, but where the runtime would read it.
    """
    root, why = path.resolve(), ""
    for name, digest in manifest.files.items():
        file = path / name
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
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        file.relative_to(folder).as_posix(): sha256(file)
        for file in files
        if file.name != NAME
    }


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a file, read in parts."""
    digest = hashlib.sha256()
    with open(file, "rb") as stream:
        while part := stream.read(2**20):
            digest.update(part)
    return digest.hexdigest()
