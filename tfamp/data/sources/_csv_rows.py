"""Reads the rows of CSV files as columns, through Arrow.

Arrow stops at the first row that does not fit, and does not tell its line. Python reads
on from there, names what is wrong, and hands back to Arrow behind some rows.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfamp.data.sources._csv_format import (
    MAX_FLOAT32_INTEGER,
    Column,
    Format,
    is_number,
)
from tfamp.data.sources._csv_records import Place, read_records
from tfamp.data.sources._files import open_bytes
from tfamp.records import checks

# Bytes in a call of Arrow, some 5,000 rows. Python reads records that are longer.
BLOCK_BYTES = 2**20
# Rows that Python reads in one go.
_CAREFUL_ROWS = 2048

# Called with the line of a row that does not fit and with the reason.
Report = Callable[[int, str], None]


class _UnfitError(ValueError):
    """Values that Arrow has read are not those of their column."""


def require_arrow(module: str = "") -> Any:
    """Returns pyarrow, or one of its modules.

    Raises:
        ImportError: It is not installed.
    """
    name = f"pyarrow.{module}" if module else "pyarrow"
    return checks.require(name, extra="data", purpose="`Pipeline.from_csv`")


def count_rows(path: str, form: Format) -> int:
    """Returns how many rows a file has, those that do not fit included."""
    first = dataclasses.replace(form.columns[0], dtype="string")
    try:
        batches = _batches(path, form, [first], _beginning(path, form))
        return sum(batch.num_rows for batch in batches)
    except require_arrow().ArrowInvalid:
        count = sum(1 for _ in read_records(path, form.delimiter))
        return count - int(form.has_header)


def read_columns(path: str, form: Format, report: Report) -> Iterator[dict[str, Any]]:
    """Yields the selected columns of a file's rows, some thousand rows at a time.

    Args:
        path: The file, plain or compressed with gzip.
        form: What the columns are.
        report: Takes a row that does not fit; the row is left out.
    """
    place: Place | None = _beginning(path, form)
    while place is not None:
        num_read = num_checked = 0
        records = read_records(path, form.delimiter, place)
        try:
            for batch in _batches(path, form, form.columns, place):
                if _spans_lines(batch, form):
                    # To Arrow a quote that stays open swallows rows without an error.
                    unchecked = num_read + batch.num_rows - num_checked
                    if any(one.fault for one in itertools.islice(records, unchecked)):
                        raise _UnfitError(path)
                    num_checked += unchecked
                yield {
                    column.name: _values(batch.column(number), column)
                    for number, column in enumerate(form.columns)
                    if column.name in form.selected
                }
                num_read += batch.num_rows
            return
        except (require_arrow().ArrowInvalid, _UnfitError):
            rows, place = _careful(path, form, place, num_read, report)
        if rows:
            yield {
                column.name: _converted([row[number] for row in rows], column, form)
                for number, column in enumerate(form.columns)
                if column.name in form.selected
            }


def _beginning(path: str, form: Format) -> Place:
    """Returns where the first row of a file begins."""
    if not form.has_header:
        return Place()
    return next(read_records(path, form.delimiter)).end


def _careful(
    path: str, form: Format, place: Place, num_read: int, report: Report
) -> tuple[list[list[str]], Place | None]:
    """Returns some rows that fit, and where the next one begins, None for nowhere.

    Args:
        path: The file.
        form: What the columns are.
        place: Where Arrow began.
        num_read: Rows that it has read there.
        report: Takes the rows that do not fit.
    """
    rows: list[list[str]] = []
    records = read_records(path, form.delimiter, place)
    for record in itertools.islice(records, num_read, None):
        fault = record.fault or fault_of(record.fields, form)
        if fault is None:
            rows.append(record.fields)
        else:
            report(record.line, fault)
        if len(rows) == _CAREFUL_ROWS:
            return rows, record.end
    return rows, None


def fault_of(fields: Sequence[str], form: Format) -> str | None:
    """Returns what is wrong with the fields of a row, None for nothing."""
    if len(fields) != len(form.columns):
        return f"{len(fields)} fields, expected {len(form.columns)}"
    for column, value in zip(form.columns, fields, strict=True):
        if column.dtype == "string":
            continue
        is_missing = value in form.na_values
        if is_missing and column.dtype.startswith("int"):
            return (
                f"column {column.name!r} is missing, which {column.dtype} cannot "
                f"say; pass `dtypes={{{column.name!r}: 'float64'}}`"
            )
        if not is_missing and not is_number(value, column.dtype):
            value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return (
                f"column {column.name!r} holds {value!r}, expected {column.dtype} "
                "(see `dtypes`) or one of `na_values`"
            )
        if not is_missing and column.holds_integers and _is_rounded(float(value)):
            return (
                f"column {column.name!r} holds {value!r}, which float32 would "
                f"round; pass `dtypes={{{column.name!r}: 'float64'}}`"
            )
    return None


def _batches(
    path: str, form: Format, columns: Sequence[Column], place: Place
) -> Iterator[Any]:
    """Yields Arrow's record batches of some columns, from a place on.

    Raises:
        pyarrow.ArrowInvalid: A row does not fit, or nothing is left to be read.
    """
    arrow, arrow_csv = require_arrow(), require_arrow("csv")
    types = {c.name: _arrow_type(c) for c in columns}
    with open_bytes(path) as file:
        file.seek(place.offset)
        with arrow_csv.open_csv(
            arrow.PythonFile(file, mode="r"),
            arrow_csv.ReadOptions(
                column_names=[column.name for column in form.columns],
                block_size=BLOCK_BYTES,
            ),
            arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=types,
                include_columns=list(types),
                null_values=_text_gaps(form),
                strings_can_be_null=True,
            ),
        ) as reader:
            yield from reader


def _spans_lines(batch: Any, form: Format) -> bool:
    """Whether a text of a batch holds a line end."""
    compute = require_arrow("compute")
    return any(
        compute.any(compute.match_substring(values, "\n")).as_py()
        for values, column in zip(batch.columns, form.columns, strict=True)
        if column.dtype == "string"
    )


def _text_gaps(form: Format) -> list[str]:
    """Returns what stands for a missing value in text; numbers know "nan" as well."""
    return [value for value in form.na_values if value.lower() != "nan"]


def _arrow_type(column: Column) -> str:
    if column.holds_integers:
        return "double"
    return {"string": "binary", "float32": "float", "float64": "double"}.get(
        column.dtype, column.dtype
    )


def _values(values: Any, column: Column) -> Any:
    """Returns a column that Arrow has read, in its own dtype.

    Raises:
        _UnfitError: An integer is missing, or would be rounded.
    """
    if column.dtype == "string":
        return values.fill_null(b"").to_numpy(zero_copy_only=False)
    if values.null_count and column.dtype.startswith("int"):
        raise _UnfitError(column.name)
    numbers = values.to_numpy(zero_copy_only=False)
    if column.holds_integers and _is_rounded(numbers).any():
        raise _UnfitError(column.name)
    return numbers.astype(column.dtype, copy=False)


def _converted(texts: Sequence[str], column: Column, form: Format) -> Any:
    """Returns a column that Python has read, in its own dtype."""
    if column.dtype == "string":
        gaps = _text_gaps(form)
        return [
            b"" if text in gaps else text.encode("utf-8", "surrogateescape")
            for text in texts
        ]
    number = int if column.dtype.startswith("int") else float
    values = ["nan" if text in form.na_values else text for text in texts]
    return np.array([number(value) for value in values], column.dtype)


def _is_rounded(value: Any) -> Any:
    """Whether float32 would round an integer; True for some that it holds."""
    return (abs(value) > MAX_FLOAT32_INTEGER) & (abs(value) < float("inf"))
