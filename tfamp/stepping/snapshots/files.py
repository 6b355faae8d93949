"""A state in one file, which is whole or not there.

The file begins with a mark, then come the bytes of the arrays one after another, a
table of contents as JSON, and last a few bytes that say where the table is and what
its checksum is. So arrays go out as they are, each read once for its checksum and
once by the system, and a file whose end is missing is known at once.
"""

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tensorflow as tf

from tfamp.records.files import whole
from tfamp.stepping.snapshots.state import State

_START, _END = b"tfampST1", b"tfampEND"
# Offset, length and checksum of the table, and the mark that closes the file.
_FOOTER = struct.Struct("<QQI8s")


def write(state: State, path: str | os.PathLike[str]) -> None:
    """Writes a state to a file that appears whole or not at all.

    It is written beside its place, made to reach the disk, and moved there; what was
    at `path` stays until then, also where the process is killed.

    Args:
        state: The state.
        path: Where to; the folder has to exist.

    Raises:
        OSError: The disk is full, or the folder is missing or cannot be written. What
            was at `path` is still there.
    """
    with whole(path, durable=True) as beside, open(beside, "wb") as file:
        _write(state, file)


def read(path: str | os.PathLike[str]) -> State:
    """Reads a state that `write` wrote, and verifies every byte of it.

    Args:
        path: The file.

    Returns:
        The state, bit by bit as it was.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, was not written to its end, or is none.
    """
    target = Path(path)
    if not target.is_file():
        raise FileNotFoundError(
            f"Found no file {str(path)!r}; expected a state that was written by "
            "`tfamp.stepping.snapshots.write`. Check the path."
        )
    with open(target, "rb") as file:
        table = _read_table(file, target)
        arrays = {}
        for entry in table["arrays"]:
            dtype = tf.as_dtype(entry["dtype"]).as_numpy_dtype
            array = np.empty(tuple(entry["shape"]), dtype)
            file.seek(entry["offset"])
            num_read = file.readinto(_bytes_of(array))
            if num_read != array.nbytes or _checksum(array) != entry["checksum"]:
                raise _damaged(target, f"the bytes of {entry['name']} are not its own")
            arrays[entry["name"]] = array
    return State(arrays, table["counters"], table["paths"])


def read_counters(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the counters of a file without reading its arrays.

    Raises:
        ValueError: As `read`; damage inside an array is not seen.
    """
    target = Path(path)
    with open(target, "rb") as file:
        counters: dict[str, Any] = _read_table(file, target)["counters"]
    return counters


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Writes a small text file as `write` writes a state."""
    with whole(path, durable=True) as beside:
        beside.write_text(text, encoding="utf-8")


def _write(state: State, file: BinaryIO) -> None:
    file.write(_START)
    entries, offset = [], len(_START)
    for name, array in state.arrays.items():
        file.write(_bytes_of(array))
        entries.append(
            {
                "name": name,
                "dtype": array.dtype.name,
                "shape": list(array.shape),
                "offset": offset,
                "checksum": _checksum(array),
            }
        )
        offset += array.nbytes
    table = {"arrays": entries, "counters": state.counters, "paths": state.paths}
    text = json.dumps(table).encode()
    file.write(text)
    file.write(_FOOTER.pack(offset, len(text), zlib.crc32(text), _END))


def _read_table(file: BinaryIO, path: Path) -> dict[str, Any]:
    size = file.seek(0, os.SEEK_END)
    if size < len(_START) + _FOOTER.size:
        raise _damaged(path, f"it has only {size} bytes")
    file.seek(0)
    if file.read(len(_START)) != _START:
        raise _damaged(path, "it does not begin as one")
    file.seek(size - _FOOTER.size)
    offset, length, checksum, end = _FOOTER.unpack(file.read(_FOOTER.size))
    if end != _END or offset + length + _FOOTER.size != size:
        raise _damaged(path, "its end is missing, so it was not written to the end")
    file.seek(offset)
    text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise _damaged(path, "its table of contents is not its own")
    table: dict[str, Any] = json.loads(text)
    return table


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns the memory of an array; bfloat16 is unknown to `memoryview` itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(_bytes_of(array))


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(
        f"The file {str(path)!r} holds no whole state: {why}. Expected a file that "
        "`tfamp.stepping.snapshots.write` finished. Take the other snapshot in its "
        "folder, or delete it."
    )
