"""CSV files as a source, parsed by the thousand rows."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp import _checks
from tfamp._units import format_bytes
from tfamp.data._progress import progress
from tfamp.data._sources import DATA, Source, files_identity
from tfamp.data._stages import Settings, map_in_order
from tfamp.data.sources import _blocks
from tfamp.data.sources._csv_format import DTYPES, NA_VALUES, Format, find_format
from tfamp.data.sources._csv_parse import Parser
from tfamp.data.sources._damage import report, summed_up, tried
from tfamp.data.sources._files import find_files

# Rows of files up to this size in all are counted at once, in a tenth of a second.
MAX_COUNTED_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class CsvSource(Source):
    """Rows of CSV files, one file after another.

    Attributes:
        paths: The files.
        format: What their columns are.
        num_examples: Rows in all, None where they were not counted.
    """

    # By rows: files differ in length, and there may be fewer than workers.
    shard_policy = DATA
    skips_errors = True
    paths: tuple[str, ...]
    format: Format
    num_examples: int | None

    def dataset(self, settings: Settings) -> tf.data.Dataset:
        """Returns the rows as scalars, in the order of the files."""
        return self._of_known_length(self.chunks(settings).unbatch(), settings)

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the same rows as columns of some 2,000 of them."""
        parser = Parser(self.format)
        num_skipped = int(self.format.has_header)

        def blocks() -> Iterator[tuple[int, int, bytes, bytes]]:
            for file, path in enumerate(self.paths):
                for found in _blocks.read_records(
                    path, delimiter=self.format.delimiter, num_skipped=num_skipped
                ):
                    yield file, *found

        number, text = tf.TensorSpec((), tf.int64), tf.TensorSpec((), tf.string)
        spec = (number, number, text, text)

        @tf.autograph.experimental.do_not_convert
        def parse(
            file: tf.Tensor, line: tf.Tensor, block: tf.Tensor, separator: tf.Tensor
        ) -> Any:
            records = tf.strings.split(block, separator)

            def repaired() -> tf.Tensor:
                def kept(file: Any, line: Any, records: Any) -> tf.Tensor:
                    return self._kept(int(file), int(line), records, settings)

                good = tf.py_function(kept, [file, line, records], tf.string)
                return tf.ensure_shape(good, (None,))

            return tried(parser, records, repaired)

        read = tf.data.Dataset.from_generator(blocks, output_signature=spec)
        return summed_up(map_in_order(read, parse, settings), settings.errors)

    def _of_known_length(
        self, rows: tf.data.Dataset, settings: Settings
    ) -> tf.data.Dataset:
        if self.num_examples is None or settings.errors is not None:
            return rows
        return rows.apply(tf.data.experimental.assert_cardinality(self.num_examples))

    def _kept(
        self, file: int, line: int, given: tf.Tensor, settings: Settings
    ) -> tf.Tensor:
        """Returns the records that can be parsed, and reports the others."""
        parser = Parser(self.format)
        records = given.numpy().tolist()
        lines = [line]
        for record in records:
            lines.append(lines[-1] + 1 + record.count(b"\n"))
        bad = parser.find_bad(records)
        for number in bad:
            where = f"{self.paths[file]}, line {lines[number]}"
            report(settings.errors, where, parser.reason(records[number]), self._total)
        for number in reversed(bad):
            del records[number]
        return tf.constant(records, tf.string)

    def _total(self) -> int:
        """Returns how many rows there are, about, to hold errors against."""
        if self.num_examples is not None:
            return self.num_examples
        _, block = next(_blocks.read_blocks(self.paths[0]))
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return num_bytes * (1 + block.count(b"\n")) // max(1, len(block))

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        form = self.format
        if self.num_examples is None:
            rows = "length unknown (`num_examples`)"
        else:
            rows = f"{self.num_examples:,} rows"
        num_files = len(self.paths)
        files = f"{num_files} file" if num_files == 1 else f"{num_files:,} files"
        selected = [c.dtype for c in form.columns if c.name in form.selected]
        counts = {dtype: selected.count(dtype) for dtype in DTYPES}
        types = ", ".join(f"{n} {dtype}" for dtype, n in counts.items() if n)
        reason = f"{types}, by the first {form.num_inferred_rows:,} rows; gaps are NaN"
        return f"CSV, {files}, {rows}", reason

    def identity(self) -> Any:
        """Returns the files with size and time of change, and how they are read."""
        return ("csv", self.format, files_identity(self.paths))


def csv_source(
    paths: Any,
    *,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    header: bool = True,
    column_names: Sequence[str] | None = None,
    delimiter: str = ",",
    na_values: Sequence[str] = NA_VALUES,
    num_infer_rows: int = 1000,
    num_examples: int | str | None = "auto",
) -> CsvSource:
    """Returns the rows of CSV files as a source, after a look at the head of each.

    Arguments are those of `Pipeline.from_csv`, which explains them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A file is missing, empty, without rows or with other columns, a
            column does not exist, or the delimiter is another one.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r':
        raise ValueError(
            f"`delimiter` is {delimiter!r}; expected one character, no quote. Pass "
            "',', ';', '|' or a tab."
        )
    if isinstance(na_values, str):
        raise TypeError(
            f"`na_values` is {na_values!r}; expected a sequence of strings. Pass "
            f"`na_values=[{na_values!r}]`."
        )
    if header and column_names is not None:
        raise ValueError(
            f"`column_names` is {tuple(column_names)!r} and `header` True; expected "
            "names only for files without a header. Pass `header=False`, or leave "
            "them out."
        )
    found = find_files(paths, extensions=(".csv", ".tsv", ".txt", ".gz"))
    for path in found:
        _blocks.check_text(path)
    form = find_format(
        found,
        label=label,
        columns=columns,
        dtypes=dtypes,
        header=bool(header),
        column_names=column_names,
        delimiter=delimiter,
        na_values=tuple(dict.fromkeys(("", *na_values))),
        num_infer_rows=_checks.positive_int("num_infer_rows", num_infer_rows),
    )
    return CsvSource(found, form, _num_examples(found, form, num_examples))


def _num_examples(
    paths: tuple[str, ...], form: Format, asked: int | str | None
) -> int | None:
    """Returns the number of rows as asked for."""
    if asked is None:
        return None
    if not isinstance(asked, str):
        return _checks.positive_int("num_examples", asked)
    _checks.choice("num_examples", asked, ["auto", "count"])
    total = sum(os.path.getsize(path) for path in paths)
    is_packed = any(_blocks.is_gzip(path) for path in paths)
    if asked == "auto" and (is_packed or total > MAX_COUNTED_BYTES):
        return None
    count = 0
    title = f"Counting rows of {format_bytes(total)}"
    with progress(title, unit="rows") as update:
        for path in paths:
            for _, block, separator in _blocks.read_records(
                path, delimiter=form.delimiter, num_skipped=int(form.has_header)
            ):
                count += sum(map(bool, block.split(separator)))
                update(count)
    return count
