"""Reads the rows of CSV files as columns, through Arrow.

Arrow stops at the first row that does not fit, and does not tell its line. Python reads
on from there, names what is wrong, and hands back to Arrow behind some rows.
"""

import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from tfamp.data.sources._files import BYTE_ORDER_MARK, open_bytes
from tfamp.records import checks

# float32 holds all integers up to here.
MAX_FLOAT32_INTEGER = 2**24
# Bytes in a call of Arrow, some 5,000 rows. Python reads records that are longer.
BLOCK_BYTES = 2**20
# Rows that Python reads in one go.
_CAREFUL_ROWS = 2048
# Longest field, in characters. Beyond, its quote is taken for one that stays open.
_MAX_FIELD = 4 * 2**20
_ARROW_TYPES = {"string": "binary", "float32": "float", "float64": "double"}
_OPEN_QUOTE = "a quote that is not closed, or stands inside an unquoted field"
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity|nan)", re.I
)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the files: its name, and its dtype, one of `DTYPES`.

    `holds_integers` says that float32 was inferred for integers with gaps, so that a
    larger integer must not be rounded.
    """

    name: str
    dtype: str
    holds_integers: bool = False

    @property
    def arrow_type(self) -> str:
        """What Arrow reads it as."""
        if self.holds_integers:
            return "double"
        return _ARROW_TYPES.get(self.dtype, self.dtype)


@dataclasses.dataclass(frozen=True)
class Format:
    """How to read rows: all columns in the order of the files, and which are wanted.

    `features` and `label` name columns; the empty field is among `na_values`, and these
    are among `number_gaps`, what is missing where numbers are. The types were inferred
    from `num_inferred_rows` rows.
    """

    columns: tuple[Column, ...]
    features: tuple[str, ...]
    label: str | None
    delimiter: str
    na_values: tuple[str, ...]
    number_gaps: tuple[str, ...]
    has_header: bool
    num_inferred_rows: int

    @property
    def selected(self) -> list[tuple[int, Column]]:
        """The features and the label: the number of each column, and the column."""
        names = (*self.features, self.label)
        return [pair for pair in enumerate(self.columns) if pair[1].name in names]

    @property
    def text_gaps(self) -> list[str]:
        """What stands for a missing value in text; numbers know "nan" as well."""
        return [value for value in self.na_values if value.lower() != "nan"]


class Place(NamedTuple):
    """The beginning of a line: bytes before it in the unpacked file, and its number."""

    offset: int = 0
    line: int = 1


class Record(NamedTuple):
    """A record of a file, as text: its first line, its fields, the place behind it.

    Undecodable bytes are surrogates. With a `fault` it is a line that is no record.
    """

    line: int
    fields: list[str]
    end: Place
    fault: str = ""


class _UnfitError(ValueError):
    """Values that Arrow has read are not those of their column."""


def require_arrow(module: str = "") -> Any:
    """Returns pyarrow, or one of its modules, or says how to install it."""
    name = f"pyarrow.{module}" if module else "pyarrow"
    return checks.require(name, extra="data", purpose="`Pipeline.from_csv`")


def read_records(
    path: str, delimiter: str, place: Place | None = None
) -> Iterator[Record]:
    """Yields the records of a file that are not empty, from a place on.

    A quote that is never closed costs its own line.
    """
    place = place or Place()
    with open_bytes(path) as file:
        while True:
            file.seek(place.offset)
            lines: list[bytes] = []
            reader = csv.reader(_decoded(file, lines), delimiter=delimiter, strict=True)
            fault = ""
            while not fault:
                lines.clear()
                fields, fault = _next(reader, lines, delimiter)
                if fields is None:
                    return
                read = lines[:1] if fault else lines
                end = Place(place.offset + sum(map(len, read)), place.line + len(read))
                if fields or fault:
                    yield Record(place.line, fields, end, fault)
                place = end


def _decoded(file: IO[bytes], lines: list[bytes]) -> Iterator[str]:
    """Yields the lines of a file as text, and adds each to `lines`."""
    is_first = file.tell() == 0
    for line in file:
        lines.append(line)
        if is_first:
            line, is_first = line.removeprefix(BYTE_ORDER_MARK), False
        yield line.decode("utf-8", "surrogateescape")


def _next(
    reader: Iterator[list[str]], lines: Sequence[bytes], delimiter: str
) -> tuple[list[str] | None, str]:
    """Returns the fields of the next record, None for no record, and its fault."""
    limit = csv.field_size_limit(_MAX_FIELD)
    try:
        try:
            return next(reader, None), ""
        except csv.Error:
            if len(lines) > 1 or lines[0].count(b'"') % 2:
                raise
            # Text behind a closing quote is part of the field, as Arrow has it.
            text = lines[0].decode("utf-8", "surrogateescape")
            return next(csv.reader([text], delimiter=delimiter)), ""
    except csv.Error as error:
        is_quote = any(b'"' in line for line in lines)
        return [], _OPEN_QUOTE if is_quote else str(error)
    finally:
        csv.field_size_limit(limit)


def is_number(text: str, dtype: str = "float32") -> bool:
    """Whether `text` is a number of a dtype."""
    text = text.strip()
    if not dtype.startswith("int"):
        return _NUMBER.fullmatch(text) is not None
    if not _INTEGER.fullmatch(text):
        return False
    limit = 2 ** (int(dtype[3:]) - 1)
    return -limit <= int(text) < limit


def count_rows(path: str, form: Format) -> int:
    """Returns how many rows a file has, those that do not fit included."""
    first = dataclasses.replace(form.columns[0], dtype="string")
    try:
        batches = _batches(path, form, [first], _beginning(path, form))
        return sum(batch.num_rows for batch in batches)
    except require_arrow().ArrowInvalid:
        count = sum(1 for _ in read_records(path, form.delimiter))
        return count - int(form.has_header)


def read_columns(
    path: str, form: Format, report: Callable[[int, str], None]
) -> Iterator[dict[str, Any]]:
    """Yields the selected columns of a file's rows, some thousand rows at a time.

    A row that does not fit is left out; its line and the reason go to `report`.
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
                    c.name: _values(batch.column(n), c, form) for n, c in form.selected
                }
                num_read += batch.num_rows
            return
        except (require_arrow().ArrowInvalid, _UnfitError):
            rows, place = _careful(path, form, place, num_read, report)
        if rows:
            columns = list(zip(*rows, strict=True))
            yield {c.name: _converted(columns[n], c, form) for n, c in form.selected}


def _beginning(path: str, form: Format) -> Place:
    """Returns where the first row of a file begins."""
    if not form.has_header:
        return Place()
    return next(read_records(path, form.delimiter)).end


def _careful(
    path: str,
    form: Format,
    place: Place,
    num_read: int,
    report: Callable[[int, str], None],
) -> tuple[list[list[str]], Place | None]:
    """Returns some rows that fit, and where the next one begins, None for nowhere.

    Arrow began at `place` and has read `num_read` rows there.
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
        remedy = f"pass `dtypes={{{column.name!r}: 'float64'}}`"
        if column.dtype == "string":
            continue
        if value in form.number_gaps:
            if column.dtype.startswith("int"):
                missing = f"is missing, which {column.dtype} cannot say"
                return f"column {column.name!r} {missing}; {remedy}"
        elif not is_number(value, column.dtype):
            value = value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return (
                f"column {column.name!r} holds {value!r}, expected {column.dtype} "
                "(see `dtypes`) or one of `na_values`"
            )
        elif column.holds_integers and _is_rounded(float(value)):
            rounded = f"holds {value!r}, which float32 would round"
            return f"column {column.name!r} {rounded}; {remedy}"
    return None


def _batches(
    path: str, form: Format, columns: Sequence[Column], place: Place
) -> Iterator[Any]:
    """Yields Arrow's batches of some columns; ArrowInvalid where a row is unfit."""
    arrow, arrow_csv = require_arrow(), require_arrow("csv")
    types = {column.name: column.arrow_type for column in columns}
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
                null_values=[v for v in form.number_gaps if v.strip().lower() != "nan"],
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


def _values(values: Any, column: Column, form: Format) -> Any:
    """Returns a column that Arrow has read, in its own dtype, if that holds it."""
    if column.dtype == "string":
        compute, gaps = require_arrow("compute"), [t.encode() for t in form.text_gaps]
        missing = compute.is_in(values, require_arrow().array(gaps, values.type))
        kept = compute.if_else(
            missing, require_arrow().scalar(b"", values.type), values
        )
        return kept.to_numpy(zero_copy_only=False)
    if values.null_count and column.dtype.startswith("int"):
        raise _UnfitError(column.name)
    numbers = values.to_numpy(zero_copy_only=False)
    if column.holds_integers and _is_rounded(numbers).any():
        raise _UnfitError(column.name)
    return numbers.astype(column.dtype, copy=False)


def _converted(texts: Sequence[str], column: Column, form: Format) -> Any:
    """Returns a column that Python has read, in its own dtype."""
    if column.dtype == "string":
        gaps = form.text_gaps
        present = ("" if text in gaps else text for text in texts)
        return [text.encode("utf-8", "surrogateescape") for text in present]
    number = int if column.dtype.startswith("int") else float
    values = ["nan" if text in form.number_gaps else text for text in texts]
    return np.array([number(value) for value in values], column.dtype)


def _is_rounded(value: Any) -> Any:
    """Whether float32 would round an integer; True for some that it holds."""
    return (abs(value) > MAX_FLOAT32_INTEGER) & (abs(value) < float("inf"))
