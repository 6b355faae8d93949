"""TFRecord files as a source, parsed by the chunk.

TensorFlow reads and parses them. Where damaged records are to be skipped Python reads
the frames, at the same speed, since TensorFlow stops at the first one. Behind a length
that is damaged the rest of a file is lost to either.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import _frames, files_identity
from tfamp.data.sources._files import (
    ChunkedSource,
    checked_number,
    find_files,
    listed,
)
from tfamp.data.stages import Settings, map_in_order
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.units import format_bytes

# Files read by turns. Not the number of cores: the order would depend on it.
FILES_AT_ONCE = 4
# Records in a chunk: at most so many, and at most so many bytes of them.
_CHUNK_RECORDS = 2048
_CHUNK_BYTES = 2**20
# Lengths of up to so many records are read at once, in 0.15 s.
MAX_WALKED_RECORDS = 100_000
_NUM_SAMPLED = 100
# Records that are parsed as a sample: one may be damaged.
_NUM_TRIED = 3

Features = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TfrecordSource(ChunkedSource):
    """Records of TFRecord files, from four files by turns."""

    compressions: tuple[str, ...]  # "", "GZIP" or "ZLIB" for each
    features: Features | None  # None for records as strings
    chunk_size: int
    damage: str = ""  # that counting met

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the records, parsed if there are features, `chunk_size` at a time."""
        if settings.errors is not None:
            _frames.crc32c()
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
            return chunks.map(lambda path, first, records: records)
        return map_in_order(chunks, self._parse_named, settings)

    # Nothing in these functions is for AutoGraph, whose look at them takes 0.5 s.
    @tf.autograph.experimental.do_not_convert
    def _stock(self, path: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        """Returns (path, number of the first record, records) of one file."""
        records = tf.data.TFRecordDataset(path, compression_type=compression)

        def number(before: tf.Tensor, chunk: tf.Tensor) -> Any:
            return before + tf.size(chunk, tf.int64), (path, before, chunk)

        return records.batch(self.chunk_size).scan(tf.constant(0, tf.int64), number)

    @tf.autograph.experimental.do_not_convert
    def _parse_named(
        self, path: tf.Tensor, first: tf.Tensor, records: tf.Tensor
    ) -> Any:
        """Parses; TensorFlow's error for a record begins with the name of that."""
        numbers = first + tf.range(tf.size(records, tf.int64))
        names = tf.strings.join([path, ", record ", tf.strings.as_string(numbers)])
        return tf.io.parse_example(records, self.features, names)

    @tf.autograph.experimental.do_not_convert
    def _parse(self, records: tf.Tensor) -> Any:
        return tf.io.parse_example(records, self.features)

    def _whole_records(self, settings: Settings) -> Iterator[tuple[int, list[bytes]]]:
        """Yields the same as the stock reader, without records that are damaged."""
        waiting = (self._chunks_of(file, settings) for file in range(len(self.paths)))
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

    def _chunks_of(self, file: int, settings: Settings) -> Iterator[list[bytes]]:
        """Yields the whole records of a file that fit, and reports the others."""
        frames = _frames.read_frames(self.paths[file], self.compressions[file])
        whole = (frame for frame in frames if self._is_whole(file, frame, settings))
        while chunk := list(itertools.islice(whole, self.chunk_size)):
            yield self._fitting(file, chunk, settings)

    def _is_whole(self, file: int, frame: _frames.Frame, settings: Settings) -> bool:
        """Whether a frame holds a record; reports it if it does not."""
        if frame.payload is not None:
            return True
        packed = " of the unpacked file" if self.compressions[file] else ""
        place = f"{frame.number} at byte {frame.offset}{packed}"
        self.report(settings, f"{self.paths[file]}, record {place}", frame.damage)
        return False

    def _fitting(
        self, file: int, frames: list[_frames.Frame], settings: Settings
    ) -> list[bytes]:
        """Returns the records that have the features, and reports the others."""
        records = [frame.payload or b"" for frame in frames]
        if self.features is None or _why_unfit(records, self.features) is None:
            return records
        good = []
        for frame, record in zip(frames, records, strict=True):
            message = _why_unfit([record], self.features)
            if message is None:
                good.append(record)
            else:
                where = f"{self.paths[file]}, record {frame.number}"
                self.report(settings, where, message)
        return good

    def about(self) -> int:
        """Returns how many records there are, about, by the size of the first."""
        if self.num_examples is not None:
            return self.num_examples
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return max(1, num_bytes // _mean_bytes(self.paths[0], self.compressions[0]))

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        kinds = sorted(set(filter(None, self.compressions)))
        packed = f", {' and '.join(kinds)}" if kinds else ""
        at_once = min(FILES_AT_ONCE, len(self.paths))
        turns = f"{at_once} files by turns, " if at_once > 1 else ""
        parsed = "parsed" if self.features is not None else "read"
        reason = f"{turns}{parsed} by {self.chunk_size}, order fixed"
        return f"TFRecord, {self.files()}{packed}, {self.length('records')}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and the features."""
        features = None
        if self.features is not None:
            features = sorted((key, repr(f)) for key, f in self.features.items())
        files = files_identity(self.paths)
        return ("tfrecord", features, self.chunk_size, files)


def tfrecord_source(
    paths: Any,
    *,
    features: Features | None = None,
    compression: str | None = "auto",
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
    if compression is not None:
        checks.choice("compression", compression, ["auto", "GZIP", "ZLIB"])
    compressions = tuple(
        _frames.compression_of(path) if compression == "auto" else compression or ""
        for path in found
    )
    for path, kind in zip(found, compressions, strict=True):
        if not _frames.is_tfrecord(path, kind):
            raise ValueError(
                f"File {path!r} in `paths` is no TFRecord file: it begins with no "
                f"record{f' as {kind}' if kind else ''}. Expected files that "
                "`tf.io.TFRecordWriter` wrote. Leave it out, or check `compression`."
            )
    if features is not None:
        _check_features(found[0], compressions[0], features)
    record_bytes = _mean_bytes(found[0], compressions[0])
    count, damage = checked_number(num_examples), ""
    if isinstance(count, str):
        about = sum(map(os.path.getsize, found)) // record_bytes
        is_cheap = not any(compressions) and about <= MAX_WALKED_RECORDS
        is_asked = count == "count"
        count = None
        if is_asked or is_cheap:
            count, damage = _count(found, compressions)
    chunk_size = max(1, min(_CHUNK_RECORDS, _CHUNK_BYTES // record_bytes))
    features = None if features is None else dict(features)
    return TfrecordSource(found, count, compressions, features, chunk_size, damage)


def _mean_bytes(path: str, compression: str) -> int:
    """Returns the size of a frame in the file, from its first hundred, at least 1."""
    if compression:
        sizes = [len(r) for r in _first_records(path, compression, _NUM_SAMPLED)]
        # Packed to a third, as text and small numbers are; this is an estimate.
        return max(1, sum(sizes) // max(1, 3 * len(sizes)))
    number, end = _frames.walk(path, max_frames=_NUM_SAMPLED)
    return max(1, end // max(1, number))


def _first_records(path: str, compression: str, count: int) -> list[bytes]:
    """Returns the first records of a file, as many as can be read."""
    records = tf.data.TFRecordDataset(path, compression_type=compression)
    readable = records.ignore_errors(log_warning=False).take(count)
    return list(readable.as_numpy_iterator())


def _count(paths: Sequence[str], compressions: Sequence[str]) -> tuple[int, str]:
    """Returns the number of records, and what is wrong with the first file cut off."""
    count, damage = 0, ""
    size = format_bytes(sum(map(os.path.getsize, paths)))
    with progress(f"Counting records of {size}", unit="records") as update:
        for path, compression in zip(paths, compressions, strict=True):
            if compression:
                records = tf.data.TFRecordDataset(path, compression_type=compression)
                count += int(records.reduce(0, lambda n, _: n + 1))
                update(count)
                continue
            number, end = _frames.walk(path, update, before=count)
            count += number
            num_bytes = os.path.getsize(path)
            if end < num_bytes and not damage:
                damage = (
                    f"File {path!r} is cut off or damaged: record {number} at byte "
                    f"{end} does not end in the file, which has {num_bytes} bytes. "
                    "Expected whole records: restore the file, or leave out what is "
                    "damaged with `.on_error('skip')`."
                )
    return count, damage


def _check_features(path: str, compression: str, features: Features) -> None:
    """Raises if none of the first records has the features."""
    records = _first_records(path, compression, _NUM_TRIED)
    failures = [_why_unfit([record], features) for record in records]
    if not records or not all(failures):
        return
    try:
        names = sorted(tf.train.Example.FromString(records[0]).features.feature)
        has = f"the first record has {listed(names)}" if names else "it has none"
    except Exception:  # protobuf's own error, whose module differs by version
        has = "the first record is no tf.train.Example"
    raise ValueError(
        f"The records of {path!r} do not fit `features` {listed(list(features))}: "
        f"{failures[0]}; {has}. Expected these features in all records: correct their "
        "names, shapes and dtypes, or pass `features=None` and parse in `.map`."
    )


def _why_unfit(records: Any, features: Features) -> str | None:
    """Returns what is wrong with records that do not have the features, else None."""
    try:
        tf.io.parse_example(records, features)
    except UnicodeDecodeError:  # TensorFlow's error quotes the bytes
        return "cannot be parsed, and holds bytes that are no text"
    except tf.errors.InvalidArgumentError as error:
        first = error.message.splitlines()[0]
        return first.partition("} ")[2] or first
    return None
