"""CSV files as a source, read by the thousand rows."""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data._sources import files_identity
from tfamp.data._stages import Settings
from tfamp.data.sources._chunked import ChunkedSource, checked_number
from tfamp.data.sources._csv_format import DTYPES, NA_VALUES, Format, find_format
from tfamp.data.sources._csv_rows import count_rows, read_columns, require_arrow
from tfamp.data.sources._files import check_text, find_files, is_gzip
from tfamp.records import checks
from tfamp.records.progress import progress
from tfamp.records.units import format_bytes

# Rows of files up to this size in all are counted at once, in a tenth of a second.
MAX_COUNTED_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class CsvSource(ChunkedSource):
    """Rows of CSV files, one file after another.

    Attributes:
        format: What their columns are.
    """

    format: Format

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the rows as columns of some thousand of them."""
        dtypes = {column.name: column.dtype for column in self.format.columns}
        specs = {
            name: tf.TensorSpec((None,), dtypes[name]) for name in self.format.selected
        }
        return self.generated(self.read, self._arranged(specs), settings)

    def read(self, settings: Settings) -> Iterator[tuple[int, Any]]:
        """Yields columns, each time behind the number of rows; reports unfit rows."""
        for path in self.paths:

            def report(line: int, reason: str, path: str = path) -> None:
                self.report(settings, f"{path}, line {line}", reason)

            for columns in read_columns(path, self.format, report):
                (first, *_) = columns.values()
                yield len(first), self._arranged(columns)

    def _arranged(self, columns: Mapping[str, Any]) -> Any:
        """Returns columns as elements hold them, the label apart."""
        features = {name: columns[name] for name in self.format.features}
        label = self.format.label
        return features if label is None else (features, columns[label])

    def explain(self, dataset: tf.data.Dataset) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        form = self.format
        selected = [c.dtype for c in form.columns if c.name in form.selected]
        counts = {dtype: selected.count(dtype) for dtype in DTYPES}
        types = ", ".join(f"{n} {dtype}" for dtype, n in counts.items() if n)
        reason = f"{types}, by the first {form.num_inferred_rows:,} rows; gaps are NaN"
        return f"CSV, {self.files()}, {self.length('rows')}", reason

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
        num_infer_rows=checks.positive_int("num_infer_rows", num_infer_rows),
    )
    asked = checked_number(num_examples)
    count = _counted(found, form, asked) if isinstance(asked, str) else asked
    return CsvSource(found, count, form)


def _counted(paths: tuple[str, ...], form: Format, asked: str) -> int | None:
    """Returns the number of rows, None where "auto" does not count them."""
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
