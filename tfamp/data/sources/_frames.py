"""Reads the frames of TFRecord files in Python: where they lie, and past damage.

A frame is the payload's length (8 bytes, little-endian), a masked CRC32C of these 8,
the payload, and a masked CRC32C of it. A damaged payload leaves the next frame where
it was; behind a damaged length nothing can be found.

Source: tensorflow/core/lib/io/record_writer.h; RFC 3720, section 12.1.
"""

import contextlib
import gzip
import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from tfamp.records import checks

HEADER_BYTES = 12
FOOTER_BYTES = 4
HEADER = struct.Struct("<QI")
_STREAM_ERRORS = (EOFError, OSError, zlib.error)
_MASK = 0xA282EAD8


class Frame(NamedTuple):
    """A record of a file, or a stretch of it that holds none."""

    number: int  # frames before it, as far as they were found
    offset: int  # of its first byte, in the file as unpacked
    payload: bytes | None  # None where it is damaged
    damage: str = ""


class BrokenStreamError(ValueError):
    """A compressed file breaks off, so that nothing behind can be read."""


def crc32c() -> Callable[[bytes], int]:
    """Returns the function that computes checksums, of google-crc32c."""
    module = checks.require(
        "google_crc32c", extra="data", purpose="Reading past damaged TFRecords"
    )
    return module.value


def masked(checksum: int) -> int:
    """Returns a checksum as TFRecord files store it."""
    return ((checksum >> 15 | checksum << 17) + _MASK) & 0xFFFFFFFF


def compression_of(path: str) -> str:
    """Returns "", "GZIP" or "ZLIB" by the first bytes of a file.

    A plain file whose first length looks like the mark of a packed one is told by
    the checksum behind it, if that can be computed.
    """
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    kind = "GZIP" if start[:2] == b"\x1f\x8b" else ""
    if start[:1] == b"\x78" and int.from_bytes(start[:2], "big") % 31 == 0:
        kind = "ZLIB"
    if kind:
        with contextlib.suppress(ImportError):
            kind = "" if _is_header(start, crc32c()) else kind
    return kind


def is_tfrecord(path: str, compression: str) -> bool:
    """Whether a file begins with the length of a frame.

    Without google-crc32c, which is needed to tell, every file passes.
    """
    try:
        checksum = crc32c()
    except ImportError:
        return True
    with open(path, "rb") as raw:
        try:
            start = _unpacked(raw, compression).read(HEADER_BYTES)
        except _STREAM_ERRORS:
            return True  # told in full when it is read
    return _is_header(start, checksum)


def walk(
    path: str,
    update: Callable[[int], None] = lambda num_frames: None,
    *,
    before: int = 0,
    max_frames: int | None = None,
) -> tuple[int, int]:
    """Returns how many whole frames a plain file has, and the byte behind the last.

    Only lengths are read, and nothing is checked but that the frames end in the file.
    `update` is called with the number so far, `before` added, now and then.
    """
    size = os.path.getsize(path)
    number, offset = 0, 0
    with open(path, "rb", buffering=0) as file:
        while offset < size and number != max_frames:
            header = os.pread(file.fileno(), HEADER_BYTES, offset)
            if len(header) < HEADER_BYTES:
                break
            end = offset + HEADER_BYTES + HEADER.unpack(header)[0] + FOOTER_BYTES
            if end > size:
                break
            number, offset = number + 1, end
            if number % 10_000 == 0:
                update(before + number)
    return number, offset


def read_frames(path: str, compression: str = "") -> Iterator[Frame]:
    """Yields the frames of a file in order, and each damaged stretch once.

    Behind them a BrokenStreamError says that the compression is damaged.
    """
    checksum = crc32c()
    size = os.path.getsize(path)
    num_frames = 0
    with open(path, "rb") as raw:
        file = _unpacked(raw, compression)
        try:
            for frame in _frames(file, None if compression else size, checksum):
                num_frames = frame.number + 1
                yield frame
        except _STREAM_ERRORS as error:
            at = raw.tell()
            num_lost = round(num_frames * (size - at) / max(1, at))
            raise BrokenStreamError(
                f"{path}: the {compression} stream breaks near byte {at:,} of "
                f"{size:,} ({error}), after {num_frames:,} records; about "
                f"{num_lost:,} more cannot be "
                "read. Expected a whole stream: restore the file, or leave it out"
            ) from error


def _frames(
    file: IO[bytes], size: int | None, checksum: Callable[[bytes], int]
) -> Iterator[Frame]:
    """Yields frames from a file that stands at the beginning of one."""
    number = offset = 0
    while header := file.read(HEADER_BYTES):
        if len(header) < HEADER_BYTES:
            yield Frame(number, offset, None, f"cut off after {len(header)} bytes")
            return
        if not _is_header(header, checksum):
            rest = (
                "what follows" if size is None else f"the last {size - offset:,} bytes"
            )
            damage = f"its length is damaged, so {rest} of the file cannot be read"
            yield Frame(number, offset, None, damage)
            return
        length, _ = HEADER.unpack(header)
        payload = file.read(length + FOOTER_BYTES)
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
        offset += HEADER_BYTES + len(payload)


def _is_header(start: bytes, checksum: Callable[[bytes], int]) -> bool:
    """Whether bytes are a length and its checksum."""
    if len(start) < HEADER_BYTES:
        return False
    return masked(checksum(start[:8])) == HEADER.unpack(start[:HEADER_BYTES])[1]


def _unpacked(raw: IO[bytes], compression: str) -> IO[bytes]:
    """Returns a file to read what `raw` holds."""
    if compression == "GZIP":
        return gzip.open(raw)  # type: ignore[return-value]
    return io.BufferedReader(_Zlib(raw)) if compression == "ZLIB" else raw


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
