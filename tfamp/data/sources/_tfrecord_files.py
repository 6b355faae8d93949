"""What TFRecord files are, told from a few of their bytes: packed, cut off, foreign."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import _frames
from tfamp.data.sources._files import shown
from tfamp.records.progress import progress
from tfamp.records.units import format_bytes

# Lengths of up to so many records are read at once, in 0.15 s.
MAX_WALKED_RECORDS = 100_000
_NUM_SAMPLED = 100
# Records that are parsed as a sample: one may be damaged.
_NUM_TRIED = 3


def compression_of(path: str) -> str:
    """Returns "", "GZIP" or "ZLIB" by the first bytes of a file.

    A plain file whose first length looks like the mark of a packed one is told by
    the checksum behind it, if that can be computed.
    """
    with open(path, "rb") as file:
        start = file.read(_frames.HEADER_BYTES)
    if start[:2] == b"\x1f\x8b":
        return "" if _is_header(start) else "GZIP"
    is_zlib = (
        len(start) > 1 and start[0] == 0x78 and (start[0] << 8 | start[1]) % 31 == 0
    )
    if is_zlib:
        return "" if _is_header(start) else "ZLIB"
    return ""


def walk(
    path: str,
    update: Callable[[int], None] = lambda done: None,
    *,
    before: int = 0,
    max_frames: int | None = None,
) -> tuple[int, int]:
    """Returns how many whole frames a plain file has, and the byte behind the last.

    Only lengths are read, and nothing is checked but that the frames end in the file.

    Args:
        path: The file, not compressed.
        update: Called with the number of frames so far, now and then.
        before: Frames of earlier files, which count there.
        max_frames: Where to stop, None for the end of the file.
    """
    size = os.path.getsize(path)
    number, offset = 0, 0
    with open(path, "rb", buffering=0) as file:
        while offset < size and number != max_frames:
            header = os.pread(file.fileno(), _frames.HEADER_BYTES, offset)
            if len(header) < _frames.HEADER_BYTES:
                break
            end = offset + _frames.FRAME_BYTES + _frames.HEADER.unpack(header)[0]
            if end > size:
                break
            number, offset = number + 1, end
            if number % 10_000 == 0:
                update(before + number)
    return number, offset


def is_tfrecord(path: str, compression: str) -> bool:
    """Whether a file begins with a frame, or has one within its first MiB.

    Without google-crc32c, which is needed to tell, every file passes.
    """
    try:
        checksum = _frames.crc32c()
    except ImportError:
        return True
    with open(path, "rb") as raw:
        try:
            start = _frames.unpacked(raw, compression).read(_frames.WINDOW_BYTES)
        except _frames.STREAM_ERRORS:
            return True  # told in full when it is read
    return _frames.first_header(start, 2**40, checksum) is not None


def _is_header(start: bytes) -> bool:
    """Whether 12 bytes are a frame's header; False where that cannot be computed."""
    try:
        checksum = _frames.crc32c()
    except ImportError:
        return False
    return _frames.first_header(start, 2**40, checksum) == 0


def mean_bytes(path: str, compression: str) -> int:
    """Returns the size of a frame in the file, from its first hundred, at least 1."""
    if compression:
        sizes = [len(r) for r in first_records(path, compression, _NUM_SAMPLED)]
        # Packed to a third, as text and small numbers are; this is an estimate.
        return max(1, sum(sizes) // max(1, 3 * len(sizes)))
    number, end = walk(path, max_frames=_NUM_SAMPLED)
    return max(1, end // max(1, number))


def first_records(path: str, compression: str, count: int) -> list[bytes]:
    """Returns the first records of a file, as many as can be read."""
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    readable = records.ignore_errors(log_warning=False).take(count)
    return list(readable.as_numpy_iterator())


def count_records(
    paths: Sequence[str], compressions: Sequence[str], *, always: bool
) -> tuple[int | None, str]:
    """Returns how many records files hold, and what is wrong with the first cut file.

    Args:
        paths: The files.
        compressions: "", "GZIP" or "ZLIB" for each.
        always: Whether to count however long it takes. Else packed files are not
            counted, nor those of more than `MAX_WALKED_RECORDS`, about.

    Returns:
        The number, None where they were not counted; and "" or the damage.
    """
    total = sum(os.path.getsize(path) for path in paths)
    about = total // mean_bytes(paths[0], compressions[0])
    if not always and (any(compressions) or about > MAX_WALKED_RECORDS):
        return None, ""
    count, damage = 0, ""
    title = f"Counting records of {format_bytes(total)}"
    with progress(title, unit="records") as update:
        for path, compression in zip(paths, compressions, strict=True):
            if compression:
                records = tf.data.TFRecordDataset(path, compression_type=compression)
                count += int(records.reduce(0, lambda n, _: n + 1))
                update(count)
                continue
            number, end = walk(path, update, before=count)
            count += number
            size = os.path.getsize(path)
            if end < size and not damage:
                damage = (
                    f"File {path!r} is cut off or damaged: record {number} at byte "
                    f"{end} does not end in the file, which has {size} bytes. Expected "
                    "whole records: restore the file, or leave out what is damaged "
                    "with `.on_error('skip')`."
                )
    return count, damage


def check_features(path: str, compression: str, features: Mapping[str, Any]) -> None:
    """Raises if none of the first records has the features.

    Raises:
        ValueError: Parsing fails for each of them.
    """
    records = first_records(path, compression, _NUM_TRIED)
    if not records:
        return
    failures = [why_unfit([record], features) for record in records]
    if not all(failures):
        return
    try:
        names = sorted(tf.train.Example.FromString(records[0]).features.feature)
        has = f"the first record has {shown(names)}" if names else "it has none"
    except Exception:  # protobuf's own error, whose module differs by version
        has = "the first record is no tf.train.Example"
    raise ValueError(
        f"The records of {path!r} do not fit `features` {shown(list(features))}: "
        f"{failures[0]}; {has}. Expected these features in all records: correct their "
        "names, shapes and dtypes, or pass `features=None` and parse in `.map`."
    )


def why_unfit(records: Any, features: Mapping[str, Any]) -> str | None:
    """Returns what is wrong with records that do not have the features, else None."""
    try:
        tf.io.parse_example(records, features)
    except UnicodeDecodeError:  # TensorFlow's error quotes the bytes
        return "cannot be parsed, and holds bytes that are no text"
    except tf.errors.InvalidArgumentError as error:
        first = error.message.splitlines()[0]
        return first.partition("} ")[2] or first
    return None
