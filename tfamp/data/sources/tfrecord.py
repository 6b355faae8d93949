"""TFRecord files as a source, parsed by the chunk.

TensorFlow stops at a damaged record, or takes it for the end, and names no file. So the
bytes of the records of plain files are added up: fewer than the file has are an error.
Where damage is to be skipped, each file is read once beforehand, and left out if it is
damaged. A record is its length (8 bytes, little-endian), a checksum, the payload, and
a checksum.

Source: tensorflow/core/lib/io/record_writer.h.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfamp.data._elements import message_of
from tfamp.data.sources import files_identity
from tfamp.data.sources._files import ChunkedSource, find_files, is_gzip
from tfamp.data.stages import Settings, map_in_order, settings_of
from tfamp.records.console import progress

# Files read by turns. Not the number of cores: the order would depend on it.
FILES_AT_ONCE = 4
_CHUNK_RECORDS, _CHUNK_BYTES = 2048, 2**20
_MAX_WALKED_RECORDS = 100_000
_NUM_SAMPLED = 100
_FRAME_BYTES = 16  # of a record beside its payload
_DAMAGED = (
    "File {} is cut off or damaged: record {} at byte {} cannot be read. Expected "
    "whole records: restore the file, or leave it out with `.on_error('skip')`."
)


@dataclasses.dataclass(frozen=True)
class TfrecordSource(ChunkedSource):
    """Records of TFRecord files, from four files by turns."""

    compressions: tuple[str, ...]  # "" or "GZIP" for each
    features: Mapping[str, Any] | None  # None for records as strings
    chunk_size: int
    damage: str = ""  # that counting met: TensorFlow takes a cut header for the end
    left_out: frozenset[str] = frozenset()  # files that are damaged

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the records, parsed if there are features, `chunk_size` at a time."""
        if self.damage and settings.errors is None:
            raise ValueError(self.damage)
        kept = [path for path in self.paths if path not in self.left_out]
        at_once = max(1, min(FILES_AT_ONCE, len(kept)))
        found = dict(zip(self.paths, self.compressions, strict=True))
        rows = [_row(path, found[path]) for path in kept]
        files = tf.constant(rows, tf.string, (len(kept), 3))
        chunks = tf.data.Dataset.from_tensor_slices(files).interleave(
            self._stock,
            cycle_length=at_once,
            block_length=1,
            num_parallel_calls=min(at_once, settings.num_parallel_calls),
            deterministic=True,
        )
        return map_in_order(chunks, self._parse, settings)

    # Nothing in these functions is for AutoGraph, whose look at them takes 0.5 s.
    @tf.autograph.experimental.do_not_convert
    def _stock(self, file: tf.Tensor) -> tf.data.Dataset:
        """Returns (records, path, number of the first record) of one file."""
        path, size = file[0], tf.strings.to_number(file[2], tf.int64)
        records = tf.data.TFRecordDataset(path, compression_type=file[1])
        last = tf.data.Dataset.from_tensors(tf.constant([], tf.string))
        is_packed = any(self.compressions)
        if not is_packed:
            records = records.ignore_errors(log_warning=False)

        def number(before: Any, chunk: tf.Tensor) -> Any:
            count, end = before
            bytes_of = tf.cast(tf.strings.length(chunk), tf.int64) + _FRAME_BYTES
            after = count + tf.size(chunk, tf.int64), end + tf.reduce_sum(bytes_of)
            is_whole = is_packed or (tf.size(chunk) > 0) | (end == size)
            text = tf.strings.format(_DAMAGED, (path, count, end))
            with tf.control_dependencies([tf.debugging.Assert(is_whole, [text])]):
                return after, (tf.identity(chunk), path, count)

        zero = tf.constant(0, tf.int64)
        chunks = records.batch(self.chunk_size).concatenate(last)
        chunks = chunks.scan((zero, zero), number)
        return chunks.filter(lambda records, *rest: tf.size(records) > 0)

    @tf.autograph.experimental.do_not_convert
    def _parse(self, records: tf.Tensor, path: tf.Tensor, first: tf.Tensor) -> Any:
        """Parses; TensorFlow's error for a record begins with the name of that."""
        if self.features is None:
            return records
        numbers = tf.strings.as_string(first + tf.range(tf.size(records, tf.int64)))
        names = tf.strings.join([path, ", record ", numbers])
        return tf.io.parse_example(records, self.features, names)

    def without_damage(self, log: Any) -> "TfrecordSource":
        """Returns the source without files that are damaged, all of which are read."""
        bad = set()
        with progress("Checking files", len(self.paths), unit="files") as update:
            for number, path in enumerate(self.paths):
                if message := self._damage_of(path, self.compressions[number]):
                    log.add(path, message)
                    bad.add(path)
                update(number + 1)
        log.finish(len(self.paths) - len(bad), "files")
        return dataclasses.replace(self, left_out=frozenset(bad))

    def _damage_of(self, path: str, compression: str) -> str:
        """Returns why not all of a file can be read and parsed, "" if it can."""
        try:
            stock = self._stock(tf.constant(_row(path, compression)))
            for _ in map_in_order(stock, self._parse, settings_of("auto")):
                pass
        except tf.errors.OpError as error:
            return message_of(error)
        except UnicodeDecodeError:  # TensorFlow's error quotes the bytes
            return "a record cannot be parsed, and holds bytes that are no text"
        return ""

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        packed = ", GZIP" if any(self.compressions) else ""
        turns = f"{min(FILES_AT_ONCE, len(self.paths))} file(s) by turns"
        parsed = "parsed" if self.features is not None else "read"
        reason = f"{turns}, {parsed} by {self.chunk_size}, order fixed"
        return f"TFRecord, {self.length('records')}{packed}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the features."""
        features = sorted((key, repr(f)) for key, f in (self.features or {}).items())
        files = files_identity(self.paths)
        return ("tfrecord", features, self.chunk_size, sorted(self.left_out), files)


def _row(path: str, compression: str) -> list[str]:
    """Returns path, compression and bytes of a file, as texts."""
    return [path, compression, str(os.path.getsize(path))]


def tfrecord_source(paths: Any, features: Mapping[str, Any] | None) -> TfrecordSource:
    """Returns the records of TFRecord files as a source, after a look at each file."""
    found = find_files(paths)
    compressions = tuple(map(_compression_of, found))
    count, damage, chunk_size = None, "", _CHUNK_RECORDS // 8
    if not any(compressions):
        number, end = _walk(found[0], _NUM_SAMPLED)
        size = max(_FRAME_BYTES, end // number)
        chunk_size = max(1, min(_CHUNK_RECORDS, _CHUNK_BYTES // size))
        if sum(map(os.path.getsize, found)) // size <= _MAX_WALKED_RECORDS:
            count = 0
            for path in found:
                number, end = _walk(path)
                count += number
                if end < os.path.getsize(path):
                    damage = _DAMAGED.format(repr(path), number, end)
    features = None if features is None else dict(features)
    return TfrecordSource(found, count, compressions, features, chunk_size, damage)


def _compression_of(path: str) -> str:
    """Returns "" or "GZIP" by the beginning of a file; raises if it has no records."""
    if is_gzip(path):
        packed = tf.data.TFRecordDataset(path, compression_type="GZIP")
        try:
            if next(iter(packed), None) is not None:
                return "GZIP"
        except tf.errors.OpError:
            pass
    if _walk(path, 1)[0] == 1:
        return ""
    raise ValueError(
        f"File {path!r} in `paths` begins with no record, or a damaged one. "
        "Expected files that `tf.io.TFRecordWriter` wrote, plain or with GZIP. Leave "
        "it out."
    )


def _walk(path: str, max_records: int | None = None) -> tuple[int, int]:
    """Returns how many records a plain file has, and the byte behind the last."""
    size, number, end = os.path.getsize(path), 0, 0
    with open(path, "rb", buffering=0) as file:
        while number != max_records:
            file.seek(end)
            header = file.read(8)
            after = end + int.from_bytes(header, "little") + _FRAME_BYTES
            if len(header) < 8 or after > size:
                break
            number, end = number + 1, after
    return number, end
