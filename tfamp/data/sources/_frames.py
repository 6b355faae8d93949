"""Reads the frames of TFRecord files in Python: where they lie, and past damage.

A frame is the payload's length (8 bytes, little-endian), a masked CRC32C of these 8,
the payload, and a masked CRC32C of it. A damaged payload leaves the next frame where
it was; behind a damaged length the next one is found by its checksum.

Source: tensorflow/core/lib/io/record_writer.h; RFC 3720, section 12.1.
"""

import dataclasses
import gzip
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np

from tfamp.records import checks

HEADER_BYTES = 12
FOOTER_BYTES = 4
FRAME_BYTES = HEADER_BYTES + FOOTER_BYTES
# Searched at once for the next frame.
WINDOW_BYTES = 2**20
HEADER = struct.Struct("<QI")
STREAM_ERRORS = (EOFError, OSError, zlib.error)
_MASK = 0xA282EAD8


@dataclasses.dataclass(frozen=True)
class Frame:
    """A record of a file, or a stretch of it that holds none.

    Attributes:
        number: How many frames lie before it, as far as they were found.
        offset: Its first byte, in the file as unpacked.
        payload: The record, None where it is damaged.
        damage: What is wrong with it, "" for nothing.
    """

    number: int
    offset: int
    payload: bytes | None
    damage: str = ""


class BrokenStreamError(ValueError):
    """A compressed file breaks off, so that nothing behind can be read."""


def crc32c() -> Callable[[bytes], int]:
    """Returns the function that computes the checksum of bytes.

    Raises:
        ImportError: google-crc32c is not installed.
    """
    module = checks.require(
        "google_crc32c", extra="data", purpose="Reading past damaged TFRecords"
    )
    return module.value


def masked(checksum: int) -> int:
    """Returns a checksum as TFRecord files store it.

    Example:
        >>> hex(masked(0))
        '0xa282ead8'
    """
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def read_frames(path: str, compression: str = "") -> Iterator[Frame]:
    """Yields the frames of a file in order, and each damaged stretch once.

    Args:
        path: The file.
        compression: As `compression_of` gives it.

    Raises:
        BrokenStreamError: The compression is damaged; the records before it are
            yielded first.
    """
    checksum = crc32c()
    size = os.path.getsize(path)
    with open(path, "rb") as raw:
        reader = _Reader(unpacked(raw, compression), None if compression else size)
        try:
            yield from _frames(reader, checksum)
        except STREAM_ERRORS as error:
            raise BrokenStreamError(
                f"{path}: the {compression} stream breaks near byte {raw.tell():,} of "
                f"{size:,} ({error}), after {reader.num_frames:,} records; about "
                f"{_num_lost(raw.tell(), size, reader.num_frames):,} more cannot be "
                "read. Expected a whole stream: restore the file, or leave it out"
            ) from error


class _Reader:
    """A file that is read forward, and whose next bytes can be put back."""

    def __init__(self, file: IO[bytes], size: int | None) -> None:
        self._file, self.size, self.offset = file, size, 0
        self._kept = b""
        self.num_frames = 0

    def read(self, count: int) -> bytes:
        """Returns the next `count` bytes, fewer at the end."""
        # A damaged length asks for more than there is, or than memory holds.
        if self.size is not None:
            count = max(0, min(count, self.size - self.offset))
        if self._kept:
            data, self._kept = self._kept[:count], self._kept[count:]
            if len(data) < count:
                data += self._file.read(count - len(data))
        else:
            data = self._file.read(count)
        self.offset += len(data)
        return data

    def put_back(self, data: bytes) -> None:
        """Makes `data` the next bytes to be read."""
        self._kept = data + self._kept
        self.offset -= len(data)


def _frames(reader: _Reader, checksum: Callable[[bytes], int]) -> Iterator[Frame]:
    """Yields frames from a reader that stands at the beginning of one."""
    number = 0
    while True:
        offset = reader.offset
        reader.num_frames = number
        header = reader.read(HEADER_BYTES)
        if not header:
            return
        if len(header) < HEADER_BYTES:
            yield Frame(number, offset, None, f"cut off after {len(header)} bytes")
            return
        length, stored = HEADER.unpack(header)
        if masked(checksum(header[:8])) != stored:
            reader.put_back(header[1:])
            lost = _to_next_frame(reader, checksum) + 1
            damage = f"its length is damaged, so the next {lost:,} bytes are lost"
            yield Frame(number, offset, None, damage)
            number += 1
            continue
        payload = reader.read(length + FOOTER_BYTES)
        if len(payload) < length + FOOTER_BYTES:
            damage = f"cut off after {len(payload):,} of {length:,} bytes"
            yield Frame(number, offset, None, damage)
            return
        data, footer = payload[:-FOOTER_BYTES], payload[-FOOTER_BYTES:]
        if masked(checksum(data)) == int.from_bytes(footer, "little"):
            yield Frame(number, offset, data)
        else:
            yield Frame(number, offset, None, "its bytes do not fit their checksum")
        number += 1


def _to_next_frame(reader: _Reader, checksum: Callable[[bytes], int]) -> int:
    """Moves to the next byte where a frame begins, or the end; returns how far."""
    passed = 0
    while True:
        window = reader.read(WINDOW_BYTES)
        limit = 2**40 if reader.size is None else reader.size
        at = first_header(window, limit, checksum)
        if at is not None:
            reader.put_back(window[at:])
            return passed + at
        # The next header may begin in this window and end in the next one.
        keep = min(len(window), HEADER_BYTES - 1)
        if len(window) < WINDOW_BYTES:
            return passed + len(window)
        reader.put_back(window[-keep:])
        passed += len(window) - keep


def first_header(
    window: bytes, limit: int, checksum: Callable[[bytes], int]
) -> int | None:
    """Returns where the first valid header of a frame shorter than `limit` begins."""
    count = len(window) - HEADER_BYTES + 1
    if count <= 0:
        return None
    # The highest bytes of a length are zero, which rules out nearly all places.
    highest = np.frombuffer(window, np.uint8)[7 : 7 + count] == 0
    sixth = np.frombuffer(window, np.uint8)[6 : 6 + count] == 0
    for at in np.flatnonzero(highest & sixth).tolist():
        length, stored = HEADER.unpack_from(window, at)
        if length <= limit and masked(checksum(window[at : at + 8])) == stored:
            return at
    return None


def _num_lost(position: int, size: int, num_read: int) -> int:
    """Returns how many records the unread rest of a packed file held, about."""
    return round(num_read * (size - position) / max(1, position))


def unpacked(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Returns a file to read what `raw` holds."""
    if compression == "GZIP":
        return gzip.open(raw)  # type: ignore[return-value]
    if compression == "ZLIB":
        return io.BufferedReader(_Zlib(raw))
    return raw


class _Zlib(io.RawIOBase):
    """Unpacks a zlib stream while it is read."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        """States that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills `buffer` with what comes next."""
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._raw.read(65536)
            if not packed:
                raise EOFError("it ends before its end mark")
            data = self._inflate.decompress(packed, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0
