"""TFRecord files as a source, parsed by the chunk.

TensorFlow reads and parses them. Where damaged records are to be skipped Python reads
the frames, at the same speed, since TensorFlow stops at the first one. A frame is the
payload's length (8 bytes, little-endian), a masked CRC32C of these 8, the payload, and
a masked CRC32C of it. Behind a damaged length nothing can be found.

Source: tensorflow/core/lib/io/record_writer.h; RFC 3720, section 12.1.
"""

import dataclasses
import itertools
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.data.sources import files_identity
from tfamp.data.sources._files import (
    ChunkedSource,
    checked_number,
    find_files,
    is_gzip,
    open_bytes,
)
from tfamp.data.stages import Settings, map_in_order
from tfamp.records import checks
from tfamp.records.console import progress

# Files read by turns. Not the number of cores: the order would depend on it.
FILES_AT_ONCE = 4
# Records in a chunk: at most so many, and at most so many bytes of them.
_CHUNK_RECORDS = 2048
_CHUNK_BYTES = 2**20
# Lengths of up to so many records are read at once, in 0.15 s.
MAX_WALKED_RECORDS = 100_000
_NUM_SAMPLED = 100
_HEADER = struct.Struct("<QI")
_FOOTER_BYTES = 4


class Frame(NamedTuple):
    """A record of a file, or a stretch of it that holds none."""

    number: int  # frames before it
    offset: int  # of its first byte, in the file as unpacked
    payload: bytes | None  # None where it is damaged
    damage: str = ""


@dataclasses.dataclass(frozen=True)
class TfrecordSource(ChunkedSource):
    """Records of TFRecord files, from four files by turns."""

    compressions: tuple[str, ...]  # "" or "GZIP" for each
    features: Mapping[str, Any] | None  # None for records as strings
    chunk_size: int
    damage: str = ""  # that counting met: TensorFlow takes a cut header for the end

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the records, parsed if there are features, `chunk_size` at a time."""
        if settings.errors is not None:
            _checksum()
            spec = tf.TensorSpec((None,), tf.string)
            records = self.generated(self._whole_records, spec, settings)
            if self.features is None:
                return records
            return map_in_order(records, self._parse, settings)
        if self.damage:
            raise ValueError(self.damage)
        files = tf.data.Dataset.from_tensor_slices(
            (list(self.paths), list(self.compressions))
        )
        at_once = min(FILES_AT_ONCE, len(self.paths))
        chunks = files.interleave(
            self._stock,
            cycle_length=at_once,
            block_length=1,
            # tf.data refuses more calls than files; AUTOTUNE is below them all.
            num_parallel_calls=min(at_once, settings.num_parallel_calls),
            deterministic=True,
        )
        if self.features is None:
            return chunks.map(lambda records, path, first: records)
        return map_in_order(chunks, self._parse, settings)

    # Nothing in these functions is for AutoGraph, whose look at them takes 0.5 s.
    @tf.autograph.experimental.do_not_convert
    def _stock(self, path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        """Returns (records, path, number of the first record) of one file."""
        records = tf.data.TFRecordDataset(path, compression_type=compression)

        def number(before: tf.Tensor, chunk: tf.Tensor) -> Any:
            return before + tf.size(chunk, tf.int64), (chunk, path, before)

        return records.batch(self.chunk_size).scan(tf.constant(0, tf.int64), number)

    @tf.autograph.experimental.do_not_convert
    def _parse(self, records: tf.Tensor, path: Any = None, first: Any = None) -> Any:
        """Parses; TensorFlow's error for a record begins with the name of that."""
        names = None
        if path is not None:
            numbers = tf.strings.as_string(first + tf.range(tf.size(records, tf.int64)))
            names = tf.strings.join([path, ", record ", numbers])
        return tf.io.parse_example(records, self.features, names)

    def _whole_records(self, settings: Settings) -> Iterator[tuple[int, list[bytes]]]:
        """Yields the same as the stock reader, without records that are damaged."""
        waiting = (self._chunks_of(path, settings) for path in self.paths)
        turns = list(itertools.islice(waiting, FILES_AT_ONCE))
        while turns:
            left = []
            for chunks in turns:
                records = next(chunks, None)
                if records is not None:
                    yield len(records), records
                    left.append(chunks)
                else:  # The next file takes its place.
                    left += itertools.islice(waiting, 1)
            turns = left

    def _chunks_of(self, path: str, settings: Settings) -> Iterator[list[bytes]]:
        """Yields the whole records of a file that fit, and reports the others."""
        frames = read_frames(path)
        while chunk := list(itertools.islice(frames, self.chunk_size)):
            whole = [frame.payload for frame in chunk if frame.payload is not None]
            fits = self.features is None or not _why_unfit(whole, self.features)
            if len(whole) == len(chunk) and fits:
                yield whole
                continue
            good = []
            for frame in chunk:
                where = f"{path}, record {frame.number}"
                if frame.payload is None:
                    self.report(
                        settings, f"{where} at byte {frame.offset}", frame.damage
                    )
                elif not fits and (why := _why_unfit([frame.payload], self.features)):
                    self.report(settings, where, why)
                else:
                    good.append(frame.payload)
            yield good

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        packed = ", GZIP" if any(self.compressions) else ""
        at_once = min(FILES_AT_ONCE, len(self.paths))
        turns = f"{at_once} files by turns, " if at_once > 1 else ""
        parsed = "parsed" if self.features is not None else "read"
        reason = f"{turns}{parsed} by {self.chunk_size}, order fixed"
        return f"TFRecord, {self.length('records')}{packed}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the features."""
        features = None
        if self.features is not None:
            features = sorted((key, repr(f)) for key, f in self.features.items())
        return ("tfrecord", features, self.chunk_size, files_identity(self.paths))


def tfrecord_source(
    paths: Any,
    *,
    features: Mapping[str, Any] | None = None,
    num_examples: int | str | None = "auto",
) -> TfrecordSource:
    """Returns the records of TFRecord files as a source, after a look at each file.

    `Pipeline.from_tfrecord` explains the arguments and the errors.
    """
    if features is not None and (not isinstance(features, Mapping) or not features):
        raise TypeError(
            f"`features` is {features!r}; expected a dict {{name: feature}}. Pass such "
            "as `{'x': tf.io.FixedLenFeature((), tf.float32)}`, or None for strings."
        )
    found = find_files(paths)
    compressions = tuple(map(_compression_of, found))
    frame_bytes = _frame_bytes(found[0], compressions[0])
    asked, damage = checked_number(num_examples), ""
    count = asked if isinstance(asked, int) else None
    if asked == "auto" and not any(compressions):
        about = sum(map(os.path.getsize, found)) // frame_bytes
        asked = "count" if about <= MAX_WALKED_RECORDS else None
    if asked == "count":
        count = 0
        with progress("Counting records", unit="records") as update:
            for path, compression in zip(found, compressions, strict=True):
                number, end = _walk(path, compression)
                count += number
                update(count)
                if not compression and end < os.path.getsize(path):
                    damage = (
                        f"File {path!r} is cut off or damaged: record {number} at byte "
                        f"{end} does not end in the file. Expected whole records: "
                        "restore the file, or leave out what is damaged with "
                        "`.on_error('skip')`."
                    )
    chunk_size = max(1, min(_CHUNK_RECORDS, _CHUNK_BYTES // frame_bytes))
    features = None if features is None else dict(features)
    return TfrecordSource(found, count, compressions, features, chunk_size, damage)


def read_frames(path: str) -> Iterator[Frame]:
    """Yields the frames of a file in order, and each damaged stretch once."""
    checksum, number, offset = _checksum(), 0, 0
    with _open(path, _compression_of(path)) as file:
        while header := file.read(_HEADER.size):
            if not _is_header(header, checksum):
                damage = "its length is damaged, so the rest of the file cannot be read"
                if len(header) < _HEADER.size:
                    damage = f"cut off after {len(header)} bytes"
                yield Frame(number, offset, None, damage)
                return
            length, _ = _HEADER.unpack(header)
            payload = file.read(length + _FOOTER_BYTES)
            if len(payload) < length + _FOOTER_BYTES:
                damage = f"cut off after {len(payload):,} of {length:,} bytes"
                yield Frame(number, offset, None, damage)
                return
            data, footer = payload[:-_FOOTER_BYTES], payload[-_FOOTER_BYTES:]
            if _masked(checksum(data)) == int.from_bytes(footer, "little"):
                yield Frame(number, offset, data)
            else:
                damage = "its bytes do not fit their checksum"
                yield Frame(number, offset, None, damage)
            number += 1
            offset += _HEADER.size + len(payload)


def _checksum() -> Callable[[bytes], int]:
    """Returns the function that computes checksums, of google-crc32c."""
    module = checks.require(
        "google_crc32c", extra="data", purpose="Reading past damaged TFRecords"
    )
    return module.value


def _masked(checksum: int) -> int:
    """Returns a checksum as TFRecord files store it."""
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _is_header(start: bytes, checksum: Callable[[bytes], int]) -> bool:
    """Whether bytes are a length and its checksum."""
    if len(start) < _HEADER.size:
        return False
    return _masked(checksum(start[:8])) == _HEADER.unpack(start)[1]


def _compression_of(path: str) -> str:
    """Returns "" or "GZIP" by the first bytes of a file; raises if it has no records.

    A plain file whose first length looks like the mark of gzip is told by the checksum
    behind it. Without google-crc32c, which is needed to tell, every file passes.
    """
    try:
        checksum = _checksum()
    except ImportError:
        return "GZIP" if is_gzip(path) else ""
    with open(path, "rb") as file:
        if _is_header(file.read(_HEADER.size), checksum):
            return ""
    if is_gzip(path):
        with open_bytes(path) as file:
            if _is_header(file.read(_HEADER.size), checksum):
                return "GZIP"
    raise ValueError(
        f"File {path!r} in `paths` is no TFRecord file: it begins with no record. "
        "Expected files that `tf.io.TFRecordWriter` wrote, plain or with GZIP. Leave "
        "it out."
    )


def _open(path: str, compression: str) -> Any:
    """Opens a file of records, through gzip where it is packed."""
    return open_bytes(path) if compression else open(path, "rb", buffering=0)


def _walk(
    path: str, compression: str, *, max_frames: int | None = None
) -> tuple[int, int]:
    """Returns how many frames a file has, and the byte behind the last; reads lengths.

    What a plain file breaks off with is no frame.
    """
    size = None if compression else os.path.getsize(path)
    number = offset = 0
    with _open(path, compression) as file:
        while number != max_frames:
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                break
            length = _HEADER.unpack(header)[0] + _FOOTER_BYTES
            end = offset + _HEADER.size + length
            if size is not None and end > size:
                break
            file.seek(length, os.SEEK_CUR)
            number, offset = number + 1, end
    return number, offset


def _frame_bytes(path: str, compression: str) -> int:
    """Returns the size of a frame in the file, from its first hundred, at least 1."""
    number, end = _walk(path, compression, max_frames=_NUM_SAMPLED)
    # Packed to a third, as text and small numbers are; this is an estimate.
    return max(1, end // max(1, number) // (3 if compression else 1))


def _why_unfit(records: Any, features: Any) -> str:
    """Returns what is wrong with records that do not have the features, else ""."""
    try:
        tf.io.parse_example(records, features)
    except UnicodeDecodeError:  # TensorFlow's error quotes the bytes
        return "cannot be parsed, and holds bytes that are no text"
    except tf.errors.InvalidArgumentError as error:
        first = error.message.splitlines()[0]
        return first.partition("} ")[2] or first
    return ""
