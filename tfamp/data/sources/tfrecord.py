"""TFRecord files as a source, parsed by the chunk.

TensorFlow reads and parses them. Where damaged records are to be skipped Python reads
the frames, at the same speed, since TensorFlow stops at the first one.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfamp import _checks
from tfamp.data._sources import DATA, Source, files_identity
from tfamp.data._stages import Settings, map_in_order
from tfamp.data.sources import _frames
from tfamp.data.sources._damage import report, summed_up
from tfamp.data.sources._files import find_files
from tfamp.data.sources._tfrecord_files import (
    check_features,
    compression_of,
    count_records,
    is_tfrecord,
    mean_bytes,
    why_unfit,
)

# Files read by turns. Not the number of cores: the order would depend on it.
FILES_AT_ONCE = 4
# Records in a chunk: at most so many, and at most so many bytes of them.
_CHUNK_RECORDS = 2048
_CHUNK_BYTES = 2**20
_NUMBER = tf.TensorSpec((), tf.int64)

Features = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TfrecordSource(Source):
    """Records of TFRecord files, from four files by turns.

    Attributes:
        paths: The files.
        compressions: "", "GZIP" or "ZLIB" for each.
        features: What `tf.io.parse_example` takes, None for records as strings.
        chunk_size: Records that are read and parsed at once.
        num_examples: Records in all, None where they were not counted.
        damage: What counting met, "" for nothing.
    """

    shard_policy = DATA
    skips_errors = True
    paths: tuple[str, ...]
    compressions: tuple[str, ...]
    features: Features | None
    chunk_size: int
    num_examples: int | None
    damage: str

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the records, parsed if there are features.

        Raises:
            ValueError: A file is cut off, and errors are not skipped.
        """
        records = self.chunks(settings).unbatch()
        if self.num_examples is None or settings.errors is not None:
            return records
        known = tf.data.experimental.assert_cardinality(self.num_examples)
        return records.apply(known)

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the same records in batches of `chunk_size` or fewer."""
        if settings.errors is None and self.damage:
            raise ValueError(self.damage)
        if settings.errors is not None:
            _frames.crc32c()
        files = tf.data.Dataset.from_tensor_slices(
            (tf.range(len(self.paths), dtype=tf.int64), list(self.compressions))
        )
        at_once = min(FILES_AT_ONCE, len(self.paths))

        # Nothing in these functions is for AutoGraph, whose look at them takes 0.5 s.
        @tf.autograph.experimental.do_not_convert
        def read(file: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
            if settings.errors is None:
                return self._stock(file, compression)
            spec = (_NUMBER, _NUMBER, tf.TensorSpec((None,), tf.string))

            def frames(file: Any) -> Iterator[Any]:
                return self._whole(int(file), settings)

            return tf.data.Dataset.from_generator(
                frames, output_signature=spec, args=(file,)
            )

        @tf.autograph.experimental.do_not_convert
        def parse(file: tf.Tensor, first: tf.Tensor, records: tf.Tensor) -> Any:
            if self.features is None:
                return records
            if settings.errors is not None:

                def fitting(file: Any, first: Any, records: Any) -> tf.Tensor:
                    return self._fitting(int(file), int(first), records, settings)

                good = tf.py_function(fitting, [file, first, records], tf.string)
                records = tf.ensure_shape(good, (None,))
                return tf.io.parse_example(records, self.features)
            numbers = first + tf.range(tf.size(records, tf.int64))
            path = tf.gather(list(self.paths), file)
            # TensorFlow's error for a record that does not fit begins with its name.
            names = tf.strings.join([path, ", record ", tf.strings.as_string(numbers)])
            return tf.io.parse_example(records, self.features, names)

        chunks = files.interleave(
            read,
            cycle_length=at_once,
            block_length=1,
            # tf.data refuses more calls than files; AUTOTUNE is below them all.
            num_parallel_calls=min(at_once, settings.num_parallel_calls),
            deterministic=True,
        )
        return summed_up(map_in_order(chunks, parse, settings), settings.errors)

    def _stock(self, file: tf.Tensor, compression: tf.Tensor) -> tf.data.Dataset:
        """Returns (file, number of the first record, records) of one file."""
        path = tf.gather(list(self.paths), file)
        records = tf.data.TFRecordDataset(path, compression_type=compression)

        def number(before: tf.Tensor, chunk: tf.Tensor) -> Any:
            return before + tf.size(chunk, tf.int64), (file, before, chunk)

        return records.batch(self.chunk_size).scan(tf.constant(0, tf.int64), number)

    def _whole(
        self, file: int, settings: Settings
    ) -> Iterator[tuple[int, int, list[bytes]]]:
        """Yields the same without damaged records, which it reports."""
        chunk: list[bytes] = []
        first = 0
        for frame in _frames.read_frames(self.paths[file], self.compressions[file]):
            # A chunk is of consecutive records, so that each has its number.
            if chunk and (frame.payload is None or len(chunk) == self.chunk_size):
                yield file, first, chunk
                chunk = []
            if frame.payload is None:
                self._report(file, frame.number, frame.offset, frame.damage, settings)
                continue
            if not chunk:
                first = frame.number
            chunk.append(frame.payload)
        if chunk:
            yield file, first, chunk

    def _fitting(
        self, file: int, first: int, records: tf.Tensor, settings: Settings
    ) -> tf.Tensor:
        """Returns the records that fit the features, and reports the others."""
        features = self.features or {}
        if why_unfit(records, features) is None:
            return records
        good = []
        for number, record in enumerate(records.numpy().tolist()):
            message = why_unfit([record], features)
            if message is None:
                good.append(record)
            else:
                self._report(file, first + number, None, message, settings)
        return tf.constant(good, tf.string)

    def _report(
        self,
        file: int,
        number: int,
        offset: int | None,
        message: str,
        settings: Settings,
    ) -> None:
        where = f"{self.paths[file]}, record {number}"
        if offset is not None:
            packed = " of the unpacked file" if self.compressions[file] else ""
            where += f" at byte {offset}{packed}"
        report(settings.errors, where, message, self._total)

    def _total(self) -> int:
        """Returns how many records there are, about, to hold errors against."""
        if self.num_examples is not None:
            return self.num_examples
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return max(1, num_bytes // mean_bytes(self.paths[0], self.compressions[0]))

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        num_files = len(self.paths)
        files = f"{num_files} file" if num_files == 1 else f"{num_files:,} files"
        kinds = sorted(set(filter(None, self.compressions)))
        packed = f", {' and '.join(kinds)}" if kinds else ""
        if self.num_examples is None:
            size = "length unknown (`num_examples`)"
        else:
            size = f"{self.num_examples:,} records"
        at_once = min(FILES_AT_ONCE, num_files)
        turns = f"{at_once} files by turns, " if at_once > 1 else ""
        parsed = "parsed" if self.features is not None else "read"
        reason = f"{turns}{parsed} by {self.chunk_size}, order fixed"
        return f"TFRecord, {files}{packed}, {size}", reason

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

    Args:
        paths: A file, a folder, a pattern such as "data/train-*", or a list of these.
        features: {name: feature} as `tf.io.parse_example` takes it. Records are then
            parsed by the chunk, which is eight times as fast as one by one, and
            elements are dicts. None for the records as strings.
        compression: "auto" to tell by the first bytes of each file, which may differ;
            "GZIP", "ZLIB", or None for none.
        num_examples: Records in all. "auto" counts plain files of about 100,000
            records or fewer by their lengths, without reading them; "count" counts in
            any case, for which packed files are read once; None leaves the length of
            the dataset unknown.

    Returns:
        A source of records, from four files by turns.

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
        _checks.choice("compression", compression, ["auto", "GZIP", "ZLIB"])
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
    count: int | None = None
    damage = ""
    if isinstance(num_examples, str):
        _checks.choice("num_examples", num_examples, ["auto", "count"])
        is_asked = num_examples == "count"
        count, damage = count_records(found, compressions, always=is_asked)
    elif num_examples is not None:
        count = _checks.positive_int("num_examples", num_examples)
    chunk_size = max(
        1, min(_CHUNK_RECORDS, _CHUNK_BYTES // mean_bytes(found[0], compressions[0]))
    )
    features = None if features is None else dict(features)
    return TfrecordSource(found, compressions, features, chunk_size, count, damage)
