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
# Runtime -> where it looks for files that are not named to it one by one.
READ_FOLDERS: Mapping[str, tuple[str, ...]] = {
    "saved_model": ("variables", "assets", "assets.extra"),
    **dict.fromkeys(FILES, ()),
}
_CHUNK_BYTES = 2**20
_EXPORT_AGAIN = "Export the model again with `tfamp.export`."


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `export.json` says.

    Attributes:
        runtime: "saved_model", "litert", "onnx" or "openvino".
        dtype: "float32", "float16", "bfloat16" or "int8".
        scheme: How activations of an integer export come about: "weights", "dynamic"
            or "static"; "" for the others.
        signature: Inputs and outputs.
        files: File, with "/" between folders -> its SHA-256.
        versions: Package -> version that wrote the folder.
        processor: Name and instruction sets of the processor it was tested on.
        kept: Layer that stays in float32 -> why.
        gate: What the comparison with the float32 model found.
        plan: The dtypes of layers, where one was followed.
        threads: Of a prediction, where fewer than all cores were faster; None for all.
    """

    runtime: str
    dtype: str
    scheme: str
    signature: Signature
    files: Mapping[str, str]
    versions: Mapping[str, str]
    processor: Mapping[str, Any]
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gate: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    threads: int | None = None

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
    if not path.is_dir():
        raise FileNotFoundError(
            f"`path` is {str(path)!r}, which is no folder; expected one that "
            "`tfamp.export` wrote."
        )
    file = path / NAME
    if not file.is_file():
        raise FileNotFoundError(
            f"{str(path)!r} has no {NAME}; expected a folder that `tfamp.export` wrote."
        )
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        version = record.pop("format_version")
        is_known = isinstance(version, int) and version <= FORMAT_VERSION
        if is_known:
            record.pop("execution", None)  # of earlier versions
            signature = Signature.from_dict(record.pop("signature"))
            manifest = Manifest(signature=signature, **record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(file)!r} is damaged: {type(error).__name__}: {error}. "
            f"{_EXPORT_AGAIN}"
        ) from error
    if not is_known:
        raise ValueError(
            f"{str(file)!r} is of format version {version!r}; expected at most "
            f"{FORMAT_VERSION}. Update tfamp, or export the model with this version."
        )
    if manifest.runtime not in RUNTIMES:
        raise ValueError(
            f"{str(file)!r} names the runtime {manifest.runtime!r}; expected one of "
            f"{RUNTIMES}. {_EXPORT_AGAIN}"
        )
    return manifest


def written_in(path: Path) -> frozenset[str] | None:
    """Returns the files that an export wrote into a folder, None without any export.

    Of whatever version: an older or a later one is replaced as one of this version is.
    """
    try:
        record = json.loads((path / NAME).read_text(encoding="utf-8"))
        return frozenset({NAME, *record["files"]} if record["runtime"] else ())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verify(path: Path, manifest: Manifest) -> None:
    """Raises `ValueError` unless a folder holds the very files that were written.

    What lies beside them is not looked at, but where the runtime would read it.
    """
    root = path.resolve()
    for name, digest in manifest.files.items():
        file = path / name
        if root not in file.resolve().parents:
            raise ValueError(
                f"{NAME} names {name!r}, which lies outside of {str(path)!r}; expected "
                f"files inside. {_EXPORT_AGAIN}"
            )
        found = sha256(file) if file.is_file() else "missing"
        if found != digest:
            raise ValueError(
                f"{str(file)!r} is {'missing' if found == 'missing' else 'changed'}: "
                f"its SHA-256 is {found}; expected {digest}. Copy the folder again, or "
                "export the model again with `tfamp.export`."
            )
    for folder in READ_FOLDERS[manifest.runtime]:
        for file in (path / folder).rglob("*"):
            name = file.relative_to(path).as_posix()
            if file.is_file() and name not in manifest.files:
                raise ValueError(
                    f"{str(file)!r} is not named by {NAME}; expected no other files "
                    "where the runtime reads. Take it away."
                )


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
        while part := stream.read(_CHUNK_BYTES):
            digest.update(part)
    return digest.hexdigest()
