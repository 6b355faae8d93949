"""CSV files as a source: Arrow reads columns by the thousand rows.

Arrow stops at the first row that does not fit and swallows what follows a quote that
stays open. So a file with such a row, or with a line end inside a value, is read on row
by row: each row that does not fit is left out and named by its line.
"""

import collections
import csv
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import files_identity
from tfamp.data.sources._files import (
    BYTE_ORDER_MARK,
    ChunkedSource,
    check_text,
    checked_number,
    find_files,
    is_counted,
    listed,
    open_bytes,
)
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.console import progress

DTYPES = ("float32", "float64", "int32", "int64", "string")
NA_VALUES = ("", "NA", "nan", "NaN")
# Unless `na_values` are given, these are gaps among numbers; in text they are words.
# What pandas takes for missing, and signs that files of statistics have.
_GAPS_OF_NUMBERS = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"),
    *("1.#QNAN", "<NA>", "N/A", "NULL", "None", "n/a", "null", "na", "none"),
    *("?", "-", "."),
)
# float32 and float64 hold all integers up to here.
_MAX_FLOAT32_INTEGER, _MAX_FLOAT64_INTEGER = 2**24, 2**53
_BLOCK_BYTES = 2**20
# Rows that are converted at once where Python reads them.
_ROWS_AT_ONCE = 4096
_ARROW_TYPES = {"string": "binary", "float32": "float", "float64": "double"}
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity|nan)", re.I
)
_OPEN_QUOTE = "a quote that is not closed, or stands inside an unquoted field"


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
    """How to read rows: all columns in the order of the files, and which are wanted."""

    columns: tuple[Column, ...]
    features: tuple[str, ...]
    label: str | None
    delimiter: str
    text_gaps: tuple[str, ...]
    number_gaps: tuple[str, ...]

    @property
    def selected(self) -> list[tuple[int, Column]]:
        """The features and the label: the number of each column, and the column."""
        names = (*self.features, self.label)
        return [pair for pair in enumerate(self.columns) if pair[1].name in names]


@dataclasses.dataclass(frozen=True)
class CsvSource(ChunkedSource):
    """Rows of CSV files, one file after another; `format` says what they hold."""

    format: Format

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the rows as columns of some thousand of them."""
        selected = self.format.selected
        specs = {c.name: tf.TensorSpec((None,), c.dtype) for _, c in selected}
        return self.generated(self._read, self._arranged(specs), settings)

    def _read(self, settings: Settings) -> Iterator[tuple[int, Any]]:
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
        counts = collections.Counter(c.dtype for _, c in self.format.selected)
        types = ", ".join(
            f"{counts[dtype]} {dtype}" for dtype in DTYPES if counts[dtype]
        )
        return f"CSV, {self.length('rows')}", f"{types}; gaps are NaN"

    def identity(self) -> Any:
        """Returns the files with size and time of change, and how they are read."""
        return ("csv", self.format, files_identity(self.paths))


def csv_source(
    paths: Any,
    *,
    label: str | None = None,
    columns: Sequence[str] | None = None,
    dtypes: Mapping[str, Any] | None = None,
    delimiter: str = ",",
    na_values: Sequence[str] = NA_VALUES,
    num_infer_rows: int = 1000,
    num_examples: int | str | None = "auto",
) -> CsvSource:
    """Returns the rows of CSV files as a source, after a look at the head of each.

    `Pipeline.from_csv` explains the arguments and the errors.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r':
        raise ValueError(
            f"`delimiter` is {delimiter!r}; expected one character, no quote. Pass "
            "',', ';', '|' or a tab."
        )
    for argument, value in (("na_values", na_values), ("columns", columns)):
        if isinstance(value, str):
            raise TypeError(
                f"`{argument}` is {value!r}; expected a sequence of strings. Pass "
                f"`{argument}=[{value!r}]`."
            )
    _arrow()
    found = find_files(paths, extensions=(".csv", ".tsv", ".txt", ".gz"))
    limit = checks.positive_int("num_infer_rows", num_infer_rows)
    names, rows = _names_and_rows(found, delimiter, limit)
    given = _given_dtypes(dtypes or {}, names)
    wanted = _wanted(names, columns, label)
    gaps = tuple(dict.fromkeys(("", *na_values)))
    more = _GAPS_OF_NUMBERS if tuple(na_values) == NA_VALUES else ()
    words = (*gaps, *more, *(f" {word}" for word in (*gaps, *more)))
    text_gaps = tuple(gap for gap in gaps if gap.lower() != "nan")
    described = []
    for number, name in enumerate(names):
        # What is neither given nor wanted is read over, never converted.
        column = Column(name, given.get(name, "string"))
        if name not in given and (name in wanted or name == label):
            column = infer(name, [row[number] for row in rows], gaps, words)
        described.append(column)
    form = Format(tuple(described), tuple(wanted), label, delimiter, text_gaps, words)
    asked = checked_number(num_examples)
    count = asked if isinstance(asked, int) else None
    if is_counted(found, asked):
        count = 0
        with progress("Counting rows", unit="rows") as update:
            for path in found:
                count += _count_rows(path, form)
                update(count)
    return CsvSource(found, count, form)


def infer(
    name: str,
    values: Sequence[str],
    na_values: Sequence[str],
    number_gaps: Sequence[str] = (),
) -> Column:
    """Returns a column whose type holds all of `values` exactly, or as float32.

    Integers are int64. With gaps they are float32, or float64 beyond 2**24, or text
    beyond 2**53. Other numbers are float32, or float64 where one is 2**24 or more,
    as timestamps are. Digits with leading zeros, such as postal codes, are text.
    A column of gaps alone is float32. Among numbers `number_gaps` are gaps too.

    Example:
        >>> infer("x", ["1", "2"], ("",)).dtype, infer("x", ["1", ""], ("",)).dtype
        ('int64', 'float32')
        >>> infer("x", ["1.5", "1700000000.25"], ("",)).dtype
        'float64'
    """
    present = [v.strip() for v in values if v not in na_values]
    numbers_alone = [v.strip() for v in values if v not in (*na_values, *number_gaps)]
    present = numbers_alone or present
    if any(re.fullmatch(r"[+-]?0\d+", value) for value in present):
        return Column(name, "string")
    if present and all(_is_number(value, "int64") for value in present):
        largest = max(abs(int(value)) for value in present)
        if len(present) == len(values):
            return Column(name, "int64")
        if largest > _MAX_FLOAT32_INTEGER:
            fits = largest <= _MAX_FLOAT64_INTEGER
            return Column(name, "float64" if fits else "string")
        return Column(name, "float32", holds_integers=True)
    if not all(_is_number(value, "float64") for value in present):
        return Column(name, "string")
    numbers = [abs(float(value)) for value in present]
    is_large = any(_MAX_FLOAT32_INTEGER <= n < float("inf") for n in numbers)
    return Column(name, "float64" if is_large else "float32")


def read_columns(
    path: str, form: Format, report: Callable[[int, str], None]
) -> Iterator[dict[str, Any]]:
    """Yields the selected columns of a file's rows, some thousand rows at a time.

    A row that does not fit is left out; its line and the reason go to `report`.
    """
    num_done = 0
    try:
        for batch in _batches(path, form, form.columns):
            columns = {
                c.name: _values(batch.column(n), c, form) for n, c in form.selected
            }
            if any(found is None for found in columns.values()) or _has_lines(batch):
                break
            yield columns
            num_done += batch.num_rows
        else:
            return
    except _arrow().ArrowInvalid:
        pass
    records = itertools.islice(_records(path, form.delimiter), 1 + num_done, None)
    while rows := list(itertools.islice(records, _ROWS_AT_ONCE)):
        found = _fitting(rows, form, report)
        if found:
            yield found


def _fitting(
    records: Sequence[tuple[int, list[str], str]],
    form: Format,
    report: Callable[[int, str], None],
) -> dict[str, Any]:
    """Returns selected columns of the records that fit, and reports the others."""
    faults = {line: fault for line, _, fault in records if fault}
    for line, fields, fault in records:
        if not fault and len(fields) != len(form.columns):
            faults[line] = f"{len(fields)} fields, expected {len(form.columns)}"
    rows = [(line, fields) for line, fields, _ in records if line not in faults]
    columns = list(zip(*(fields for _, fields in rows), strict=True))
    found = {}
    for number, column in enumerate(form.columns if rows else ()):
        values = _column_of(columns[number], column, form)
        found[column.name] = values
        if values is None:
            for (line, _), text in zip(rows, columns[number], strict=True):
                if fault := _fault_of(text, column, form):
                    faults.setdefault(line, fault)
    for line in sorted(faults):
        report(line, faults[line])
    kept = [fields for line, fields in rows if line not in faults]
    if kept and len(kept) < len(rows):
        columns = list(zip(*kept, strict=True))
        found = {c.name: _column_of(columns[n], c, form) for n, c in form.selected}
    return {c.name: found[c.name] for _, c in form.selected} if kept else {}


def _column_of(texts: Sequence[str], column: Column, form: Format) -> Any:
    """Returns texts as an array of a column's dtype, None where one does not fit."""
    if column.dtype == "string":
        present = ("" if text in form.text_gaps else text for text in texts)
        return [text.encode("utf-8", "surrogateescape") for text in present]
    arrow, compute = _arrow(), _arrow("compute")
    try:
        values = arrow.array(texts, arrow.string())
        is_gap = compute.is_in(values, arrow.array(form.number_gaps))
        none = arrow.scalar(None, arrow.string())
        values = compute.if_else(is_gap, none, compute.utf8_trim_whitespace(values))
        return _values(values.cast(column.arrow_type), column, form)
    except (arrow.ArrowInvalid, UnicodeEncodeError):
        return None


def _fault_of(text: str, column: Column, form: Format) -> str:
    """Returns what is wrong with the text of a number, "" for nothing."""
    remedy = f"pass `dtypes={{{column.name!r}: 'float64'}}`"
    if text in form.number_gaps:
        if column.dtype.startswith("int"):
            missing = f"is missing, which {column.dtype} cannot say"
            return f"column {column.name!r} {missing}; {remedy}"
        return ""
    shown = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not _is_number(text.strip(), column.dtype):
        return (
            f"column {column.name!r} holds {shown!r}, expected {column.dtype} (see "
            "`dtypes`) or one of `na_values`"
        )
    if column.holds_integers and _is_rounded(float(text)):
        rounded = f"holds {shown!r}, which float32 would round"
        return f"column {column.name!r} {rounded}; {remedy}"
    return ""


def _values(values: Any, column: Column, form: Format) -> Any:
    """Returns a column that Arrow has read, in its own dtype; None if unfit."""
    if column.dtype == "string":
        arrow, compute = _arrow(), _arrow("compute")
        gaps = arrow.array([gap.encode() for gap in form.text_gaps], values.type)
        none = arrow.scalar(b"", values.type)
        kept = compute.if_else(compute.is_in(values, gaps), none, values)
        return kept.to_numpy(zero_copy_only=False)
    if values.null_count and column.dtype.startswith("int"):
        return None
    numbers = values.to_numpy(zero_copy_only=False)
    if column.holds_integers and _is_rounded(numbers).any():
        return None
    return numbers.astype(column.dtype, copy=False)


def _is_rounded(value: Any) -> Any:
    """Whether float32 would round an integer; True for some that it holds."""
    return (abs(value) > _MAX_FLOAT32_INTEGER) & (abs(value) < float("inf"))


def _is_number(text: str, dtype: str) -> bool:
    """Whether `text` is a number of a dtype."""
    if not dtype.startswith("int"):
        return _NUMBER.fullmatch(text) is not None
    limit = 2 ** (int(dtype[3:]) - 1)
    return _INTEGER.fullmatch(text) is not None and -limit <= int(text) < limit


def _arrow(module: str = "") -> Any:
    """Returns pyarrow, or one of its modules, or says how to install it."""
    name = f"pyarrow.{module}" if module else "pyarrow"
    return checks.require(name, extra="data", purpose="`Pipeline.from_csv`")


def _batches(path: str, form: Format, columns: Sequence[Column]) -> Iterator[Any]:
    """Yields Arrow's batches of some columns; ArrowInvalid where a row is unfit."""
    arrow, arrow_csv = _arrow(), _arrow("csv")
    names = next(_records(path, form.delimiter))[1]
    raw = dict(zip((one.name for one in form.columns), names, strict=True))
    types = {raw[column.name]: column.arrow_type for column in columns}
    nulls = [gap for gap in form.number_gaps if gap.strip().lower() != "nan"]
    with (
        open_bytes(path) as file,
        arrow_csv.open_csv(
            arrow.PythonFile(file, mode="r"),
            arrow_csv.ReadOptions(block_size=_BLOCK_BYTES),
            arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=types, include_columns=list(types), null_values=nulls
            ),
        ) as reader,
    ):
        yield from reader


def _has_lines(batch: Any) -> bool:
    """Whether a text of a batch holds a line end, as a quote that stays open makes."""
    compute = _arrow("compute")
    texts = [values for values in batch.columns if str(values.type) == "binary"]
    return any(compute.any(compute.match_substring(t, "\n")).as_py() for t in texts)


def _count_rows(path: str, form: Format) -> int:
    """Returns how many rows a file has, those that do not fit included."""
    first = Column(form.columns[0].name, "string")
    try:
        return sum(batch.num_rows for batch in _batches(path, form, [first]))
    except _arrow().ArrowInvalid:
        return sum(1 for _ in _records(path, form.delimiter)) - 1


def _records(path: str, delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    """Yields line, fields and fault of each record of a file that is not empty.

    Undecodable bytes are surrogates. A record with a fault is one line: a quote that is
    never closed costs its own line, and what it swallowed is read again.
    """
    with open_bytes(path) as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        again: collections.deque[bytes] = collections.deque()
        taken: list[bytes] = []

        def lines() -> Iterator[str]:
            while line := again.popleft() if again else file.readline():
                taken.append(line)
                yield line.decode("utf-8", "surrogateescape")

        reader, number = csv.reader(lines(), delimiter=delimiter, strict=True), 1
        while True:
            taken.clear()
            fault = ""
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                fields, fault = _reread(taken, delimiter, error)
                if fault:
                    again.extendleft(reversed(taken[1:]))
                    del taken[1:]
                reader = csv.reader(lines(), delimiter=delimiter, strict=True)
            if fields or fault:
                yield number, fields, fault
            number += len(taken)


def _reread(
    lines: Sequence[bytes], delimiter: str, error: csv.Error
) -> tuple[list[str], str]:
    """Returns the fields of a record that strict reading refused, or its fault."""
    if not any(b'"' in line for line in lines):
        return [], str(error)
    if len(lines) > 1 or lines[0].count(b'"') % 2:
        return [], _OPEN_QUOTE
    # Text behind a closing quote is part of the field, as Arrow has it.
    text = lines[0].decode("utf-8", "surrogateescape")
    return next(csv.reader([text], delimiter=delimiter)), ""


def _names_and_rows(
    paths: Sequence[str], delimiter: str, limit: int
) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, the same in all files, and rows of the first."""
    rows: list[list[str]] = []
    names: list[str] = []
    for path in paths:
        check_text(path)
        head = list(
            itertools.islice(_records(path, delimiter), 2 if names else limit + 1)
        )
        if head and head[0][2]:
            raise ValueError(
                f"{path}, line {head[0][0]}: {head[0][2]}. Expected a row of text, "
                "with quotes doubled inside of fields: repair it."
            )
        found = _names(path, head[0][1] if head else [], delimiter)
        if names and found != names:
            others = sorted(set(names) ^ set(found)) or found
            raise ValueError(
                f"File {path!r} has other columns than {paths[0]!r}, or in another "
                f"order: {listed(others)}. Expected the same in all files. Read them "
                "as two sources, or make the headers equal."
            )
        if len(head) == 1:
            raise ValueError(
                f"File {path!r} has a header and no rows; expected at least one. "
                "Leave it out, or write a line with the names before its row."
            )
        if not names:
            names, rows = found, [fields for _, fields, _ in head[1:]]
    # Rows of another length are reported, with their line, when they are read.
    return names, [row for row in rows if len(row) == len(names)]


def _names(path: str, first: list[str], delimiter: str) -> list[str]:
    """Returns the names of a file's columns, given its first record."""
    if not first:
        raise ValueError(
            f"File {path!r} holds only empty lines; expected rows. Write it again, or "
            "leave it out."
        )
    others = [d for d in ",;\t|" if d != delimiter and d in first[0]]
    if len(first) == 1 and others:
        likely = max(others, key=first[0].count)
        raise ValueError(
            f"File {path!r} has 1 column, {first[0][:60]!r}, with `delimiter` "
            f"{delimiter!r}; expected more. Did you mean `delimiter={likely!r}`?"
        )
    names = [name.strip() or f"column_{i}" for i, name in enumerate(first)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"The header of {path!r} names {listed(repeated)} more than once; expected "
            "each column once. Rename one."
        )
    counted = [str(n) for n in range(len(names) + 1)]
    is_counted = names in (counted[:-1], counted[1:])
    if not is_counted and all(_is_number(name, "float64") for name in names):
        raise ValueError(
            f"The first line of {path!r} holds numbers, {listed(names)}; expected the "
            "names of the columns. Write a first line with them."
        )
    return names


def _given_dtypes(dtypes: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    """Returns the names of the dtypes that columns were given."""
    given = {}
    for name, dtype in dtypes.items():
        _check_known("dtypes", name, names)
        text = getattr(dtype, "name", dtype)
        text = "string" if text in ("str", str) else getattr(text, "__name__", text)
        given[name] = checks.choice(f"dtypes[{name!r}]", text, DTYPES)
    return given


def _wanted(
    names: list[str], columns: Sequence[str] | None, label: str | None
) -> list[str]:
    """Returns the names of the features to give, in the order asked for."""
    for name in columns or ():
        _check_known("columns", name, names)
    if label is not None:
        _check_known("label", label, names)
    asked = names if columns is None else dict.fromkeys(columns)
    wanted = [name for name in asked if name != label]
    if not wanted:
        raise ValueError(
            f"`columns` is {columns!r} and the label {label!r}; expected a feature "
            f"among {listed(names)}. Name more `columns`."
        )
    return wanted


def _check_known(argument: str, name: Any, names: list[str]) -> None:
    if name in names:
        return
    close = checks.did_you_mean(str(name), names)
    advice = f"Did you mean {close!r}?" if close else "Pass one of these names."
    raise ValueError(
        f"`{argument}` names the column {name!r}, which the files lack; expected one "
        f"of their {len(names)}, {listed(names)}. {advice}"
    )
