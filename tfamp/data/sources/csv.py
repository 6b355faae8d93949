"""CSV files as a source, read by the thousand rows: columns, types, what is wanted."""

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfamp.data.sources import files_identity
from tfamp.data.sources._csv_rows import (
    MAX_FLOAT32_INTEGER,
    Column,
    Format,
    count_rows,
    is_number,
    read_columns,
    read_records,
    require_arrow,
)
from tfamp.data.sources._files import (
    ChunkedSource,
    check_text,
    checked_number,
    find_files,
    is_counted,
    listed,
)
from tfamp.data.stages import Settings
from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.records.units import format_bytes

DTYPES = ("float32", "float64", "int32", "int64", "string")
NA_VALUES = ("", "NA", "nan", "NaN")
# Unless `na_values` are given, these are gaps among numbers; in text they are words.
# What pandas takes for missing, and signs that files of statistics have.
_GAPS_OF_NUMBERS = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND"),
    *("1.#QNAN", "<NA>", "N/A", "NULL", "None", "n/a", "null", "na", "none"),
    *("?", "-", "."),
)
# float64 holds all integers up to here.
_MAX_FLOAT64_INTEGER = 2**53
_DELIMITERS = (",", ";", "\t", "|")


@dataclasses.dataclass(frozen=True)
class CsvSource(ChunkedSource):
    """Rows of CSV files, one file after another; `format` says what they hold."""

    format: Format

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the rows as columns of some thousand of them."""
        selected = self.format.selected
        specs = {c.name: tf.TensorSpec((None,), c.dtype) for _, c in selected}
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
        dtypes = [column.dtype for _, column in self.format.selected]
        counts = {dtype: dtypes.count(dtype) for dtype in DTYPES}
        types = ", ".join(f"{n} {dtype}" for dtype, n in counts.items() if n)
        num_rows = f"{self.format.num_inferred_rows:,} rows"
        reason = f"{types}, by the first {num_rows}; gaps are NaN"
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

    `Pipeline.from_csv` explains the arguments and the errors.
    """
    if not isinstance(delimiter, str) or len(delimiter) != 1 or delimiter in '"\n\r':
        raise ValueError(
            f"`delimiter` is {delimiter!r}; expected one character, no quote. Pass "
            "',', ';', '|' or a tab."
        )
    _check_no_text("na_values", na_values, "strings")
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
    limit = checks.positive_int("num_infer_rows", num_infer_rows)
    names, rows = _names_and_rows(found, delimiter, bool(header), column_names, limit)
    given = _given_dtypes(dtypes or {}, names)
    wanted = _wanted(names, columns, label)
    gaps = tuple(dict.fromkeys(("", *na_values)))
    more = _GAPS_OF_NUMBERS if tuple(na_values) == NA_VALUES else ()
    words = (*gaps, *more)
    number_gaps = tuple(dict.fromkeys((*words, *(f" {word}" for word in words))))
    described = []
    for number, name in enumerate(names):
        # What is neither given nor wanted is read over, never converted.
        column = Column(name, given.get(name, "string"))
        if name not in given and (name in wanted or name == label):
            column = infer(name, [row[number] for row in rows], gaps, number_gaps)
        described.append(column)
    form = Format(
        columns=tuple(described),
        features=tuple(wanted),
        label=label,
        delimiter=delimiter,
        na_values=gaps,
        number_gaps=number_gaps,
        has_header=bool(header),
        num_inferred_rows=len(rows),
    )
    asked = checked_number(num_examples)
    if not is_counted(found, asked):
        return CsvSource(found, asked if isinstance(asked, int) else None, form)
    num_rows = 0
    size = format_bytes(sum(map(os.path.getsize, found)))
    with progress(f"Counting rows of {size}", unit="rows") as update:
        for path in found:
            num_rows += count_rows(path, form)
            update(num_rows)
    return CsvSource(found, num_rows, form)


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
    has_gaps = len(present) < len(values)
    if any(re.fullmatch(r"[+-]?0\d+", value) for value in present):
        return Column(name, "string")
    if present and all(is_number(value, "int64") for value in present):
        largest = max(abs(int(value)) for value in present)
        if not has_gaps:
            return Column(name, "int64")
        if largest > _MAX_FLOAT64_INTEGER:
            return Column(name, "string")
        if largest > MAX_FLOAT32_INTEGER:
            return Column(name, "float64")
        return Column(name, "float32", holds_integers=True)
    if not all(is_number(value) for value in present):
        return Column(name, "string")
    numbers = [abs(float(value)) for value in present]
    is_large = any(MAX_FLOAT32_INTEGER <= n < float("inf") for n in numbers)
    return Column(name, "float64" if is_large else "float32")


def _names_and_rows(
    paths: Sequence[str],
    delimiter: str,
    header: bool,
    column_names: Sequence[str] | None,
    limit: int,
) -> tuple[list[str], list[list[str]]]:
    """Returns the columns, the same in all files, and rows of the first."""
    rows: list[list[str]] = []
    names: list[str] = []
    for path in paths:
        head = _head(path, delimiter, 2 if names else limit + 1)
        found = _names(path, head[0], header, column_names)
        if names and found != names:
            raise ValueError(_differing(paths[0], names, path, found))
        if len(head) == int(header):
            raise ValueError(
                f"File {path!r} has a header and no rows; expected at least one. "
                "Leave it out, or pass `header=False` if its first line is a row."
            )
        if not names:
            names, rows = found, head[int(header) :]
    # Rows of another length are reported, with their line, when they are read.
    return names, [row for row in rows if len(row) == len(names)]


def _given_dtypes(dtypes: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    """Returns the names of the dtypes that columns were given."""
    given = {}
    for name, dtype in dtypes.items():
        _check_known("dtypes", name, names)
        text = getattr(dtype, "name", dtype)
        text = "string" if text in ("str", str) else getattr(text, "__name__", text)
        given[name] = checks.choice(f"dtypes[{name!r}]", text, DTYPES)
    return given


def _head(path: str, delimiter: str, limit: int) -> list[list[str]]:
    """Returns the fields of the first records of a file; at least one."""
    head: list[list[str]] = []
    for record in itertools.islice(read_records(path, delimiter), limit):
        if record.fault and not head:
            raise ValueError(
                f"{path}, line {record.line}: {record.fault}. Expected a row of text, "
                "with quotes doubled inside of fields: repair it."
            )
        head.append(record.fields)
    if not head:
        raise ValueError(
            f"File {path!r} holds only empty lines; expected rows. Write it again, or "
            "leave it out."
        )
    others = [d for d in _DELIMITERS if d != delimiter and d in head[0][0]]
    if len(head[0]) == 1 and others:
        likely = max(others, key=head[0][0].count)
        raise ValueError(
            f"File {path!r} has 1 column, {head[0][0][:60]!r}, with `delimiter` "
            f"{delimiter!r}; expected more. Did you mean `delimiter={likely!r}`?"
        )
    return head


def _names(
    path: str, first: list[str], header: bool, column_names: Sequence[str] | None
) -> list[str]:
    """Returns the names of a file's columns, given its first record."""
    if not header:
        names = list(column_names or (f"column_{i}" for i in range(len(first))))
        if len(names) != len(first):
            raise ValueError(
                f"`column_names` has {len(names)} names and file {path!r} "
                f"{len(first)} columns; expected as many. Name all columns, in order."
            )
        return names
    names = [name.strip() or f"column_{i}" for i, name in enumerate(first)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"The header of {path!r} names {listed(repeated)} more than once; expected "
            "each column once. Rename one, or pass `header=False` if it is a row."
        )
    counted = [str(n) for n in range(len(names) + 1)]
    is_counted = names in (counted[:-1], counted[1:])
    if not is_counted and all(is_number(name) for name in names):
        raise ValueError(
            f"The first line of {path!r} holds numbers, {listed(names)}; expected the "
            "names of the columns. Pass `header=False`."
        )
    return names


def _differing(first: str, names: list[str], path: str, found: list[str]) -> str:
    lacking = [name for name in names if name not in found]
    added = [name for name in found if name not in names]
    differences = [f"lacks {listed(lacking)}"] if lacking else []
    differences += [f"has {listed(added)} in addition"] if added else []
    return (
        f"File {path!r} has other columns than {first!r}: it "
        f"{' and '.join(differences) or 'has them in another order'}. Expected the "
        "same in all files. Read them as two sources, or make the headers equal."
    )


def _wanted(
    names: list[str], columns: Sequence[str] | None, label: str | None
) -> list[str]:
    """Returns the names of the features to give, in the order asked for."""
    _check_no_text("columns", columns, "names")
    for name in columns or ():
        _check_known("columns", name, names)
    if label is not None:
        _check_known("label", label, names)
    if columns is not None and not columns:
        raise ValueError(
            f"`columns` is {columns!r}; expected at least one name, or None for all. "
            f"The files have {listed(names)}."
        )
    asked = names if columns is None else dict.fromkeys(columns)
    wanted = [name for name in asked if name != label]
    if not wanted:
        raise ValueError(
            f"Only the label {label!r} is selected; expected a feature beside it. "
            "Name more `columns`."
        )
    return wanted


def _check_no_text(argument: str, value: Any, things: str) -> None:
    if isinstance(value, str):
        raise TypeError(
            f"`{argument}` is {value!r}; expected a sequence of {things}. Pass "
            f"`{argument}=[{value!r}]`."
        )


def _check_known(argument: str, name: Any, names: list[str]) -> None:
    if name in names:
        return
    close = checks.did_you_mean(str(name), names)
    advice = f"Did you mean {close!r}?" if close else "Pass one of these names."
    raise ValueError(
        f"`{argument}` names the column {name!r}, which the files lack; expected one "
        f"of their {len(names)}, {listed(names)}. {advice}"
    )
