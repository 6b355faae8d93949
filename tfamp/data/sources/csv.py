"""CSV files as a source, read by the thousand rows."""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp import _checks
from tfamp._units import format_bytes
from tfamp.data._progress import progress
from tfamp.data._sources import DATA, Source, files_identity
from tfamp.data._stages import Settings
from tfamp.data.sources._csv_format import DTYPES, NA_VALUES, Format, find_format
from tfamp.data.sources._csv_rows import count_rows, read_columns, require_arrow
from tfamp.data.sources._damage import report, summed_up
from tfamp.data.sources._files import check_text, find_files, is_gzip, open_bytes

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
        """Returns the same rows as columns of some thousand of them."""
        dtypes = {column.name: column.dtype for column in self.format.columns}
        specs = {
            name: tf.TensorSpec((None,), dtypes[name]) for name in self.format.selected
        }
        read = tf.data.Dataset.from_generator(
            functools.partial(self._columns, settings),
            output_signature=self._arranged(specs),
        )
        return summed_up(read, settings.errors)

    def _columns(self, settings: Settings) -> Iterator[Any]:
        """Yields columns of the files, and reports rows that do not fit."""
        for path in self.paths:

            def report_row(line: int, reason: str, path: str = path) -> None:
                where = f"{path}, line {line}"
                report(settings.errors, where, reason, self._total)

            for columns in read_columns(path, self.format, report_row):
                yield self._arranged(columns)

    def _arranged(self, columns: Mapping[str, Any]) -> Any:
        """Returns columns as elements hold them, the label apart."""
        features = {name: columns[name] for name in self.format.features}
        label = self.format.label
        return features if label is None else (features, columns[label])

    def _of_known_length(
        self, rows: tf.data.Dataset, settings: Settings
    ) -> tf.data.Dataset:
        if self.num_examples is None or settings.errors is not None:
            return rows
        return rows.apply(tf.data.experimental.assert_cardinality(self.num_examples))

    def _total(self) -> int:
        """Returns how many rows there are, about, to hold errors against."""
        if self.num_examples is not None:
            return self.num_examples
        with open_bytes(self.paths[0]) as file:
            start = file.read(2**18)
        num_bytes = sum(os.path.getsize(path) for path in self.paths)
        return num_bytes * (1 + start.count(b"\n")) // max(1, len(start))

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
        ImportError: pyarrow is not installed.
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
    require_arrow()
    found = find_files(paths, extensions=(".csv", ".tsv", ".txt", ".gz"))
    for path in found:
        check_text(path)
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
    is_packed = any(is_gzip(path) for path in paths)
    if asked == "auto" and (is_packed or total > MAX_COUNTED_BYTES):
        return None
    count = 0
    title = f"Counting rows of {format_bytes(total)}"
    with progress(title, unit="rows") as update:
        for path in paths:
            count += count_rows(path, form)
            update(count)
    return count
