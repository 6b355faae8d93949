"""TFRecord files as a source, parsed by the chunk.

TensorFlow reads and parses them. Where damaged records are to be skipped Python reads
the frames, at the same speed, since TensorFlow stops at the first one.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp.data._sources import files_identity
from tfamp.data._stages import Settings, map_in_order
from tfamp.data.sources import _frames
from tfamp.data.sources._chunked import ChunkedSource, checked_number
from tfamp.data.sources._files import find_files
from tfamp.data.sources._tfrecord_files import (
    check_features,
    compression_of,
    count_records,
    is_tfrecord,
    mean_bytes,
    why_unfit,
)
from tfamp.records import checks

# Files read by turns. Not the number of cores: the order would depend on it.
FILES_AT_ONCE = 4
# Records in a chunk: at most so many, and at most so many bytes of them.
_CHUNK_RECORDS = 2048
_CHUNK_BYTES = 2**20

Features = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TfrecordSource(ChunkedSource):
    """Records of TFRecord files, from four files by turns.

    Attributes:
        compressions: "", "GZIP" or "ZLIB" for each.
        features: What `tf.io.parse_example` takes, None for records as strings.
        chunk_size: Records that are read and parsed at once.
        damage: What counting met, "" for nothing.
    """

    compressions: tuple[str, ...]
    features: Features | None
    chunk_size: int
    damage: str = ""

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the records, parsed if there are features, `chunk_size` at a time.

        Raises:
            ValueError: A file is cut off, and errors are not skipped.
        """
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
        whole = self._whole(file, settings)
        while chunk := list(itertools.islice(whole, self.chunk_size)):
            yield self._fitting(file, chunk, settings)

    def _whole(self, file: int, settings: Settings) -> Iterator[_frames.Frame]:
        for frame in _frames.read_frames(self.paths[file], self.compressions[file]):
            if frame.payload is not None:
                yield frame
            else:
                self._report(file, frame.number, frame.damage, settings, frame.offset)

    def _fitting(
        self, file: int, frames: list[_frames.Frame], settings: Settings
    ) -> list[bytes]:
        """Returns the records that have the features, and reports the others."""
        records = [frame.payload or b"" for frame in frames]
        if self.features is None or why_unfit(records, self.features) is None:
            return records
        good = []
        for frame, record in zip(frames, records, strict=True):
            message = why_unfit([record], self.features)
            if message is None:
                good.append(record)
            else:
                self._report(file, frame.number, message, settings)
        return good

    def _report(
        self,
        file: int,
        number: int,
        message: str,
        settings: Settings,
        offset: int | None = None,
    ) -> None:
        where = f"{self.paths[file]}, record {number}"
        if offset is not None:
            packed = " of the unpacked file" if self.compressions[file] else ""
            where += f" at byte {offset}{packed}"
        self.report(settings, where, message)

    def about(self) -> int:
        """Returns how many records there are, about, by the size of the first."""
        if self.num_examples is not None:
            return self.num_examples
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return max(1, num_bytes // mean_bytes(self.paths[0], self.compressions[0]))

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
        return ("tfrecord", features, self.chunk_size, files_identity(self.paths))


def tfrecord_source(
    paths: Any,
    *,
    features: Features | None = None,
    compression: str | None = "auto",
    num_examples: int | str | None = "auto",
) -> TfrecordSource:
    """Returns the records of TFRecord files as a source, after a look at each file.

    Arguments are those of `Pipeline.from_tfrecord`, which explains them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A file is missing, empty or no TFRecord file, or the first records
            do not have the features.
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
        compression_of(path) if compression == "auto" else compression or ""
        for path in found
    )
    for path, kind in zip(found, compressions, strict=True):
        if not is_tfrecord(path, kind):
            raise ValueError(
                f"File {path!r} in `paths` is no TFRecord file: no record begins in "
                f"its first MiB{f' as {kind}' if kind else ''}. Expected files that "
                "`tf.io.TFRecordWriter` wrote. Leave it out, or check `compression`."
            )
    if features is not None:
        check_features(found[0], compressions[0], features)
    count, damage = checked_number(num_examples), ""
    if isinstance(count, str):
        count, damage = count_records(found, compressions, always=count == "count")
    chunk_size = max(
        1, min(_CHUNK_RECORDS, _CHUNK_BYTES // mean_bytes(found[0], compressions[0]))
    )
    features = None if features is None else dict(features)
    return TfrecordSource(found, count, compressions, features, chunk_size, damage)
