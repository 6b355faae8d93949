"""CSV files as a source: Arrow reads columns by the thousand rows.

Arrow stops at the first row that does not fit and swallows what follows a quote that
stays open. So a file with such a row, or with a line end inside a value, is read on row
by row: each row that does not fit is left out and named by its line.
"""

import collections
import csv
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.sources import _files, files_identity
from tfamp.data.stages import Settings
from tfamp.records import checks

DTYPES = ("float32", "float64", "int32", "int64", "string")
# What pandas takes for missing, and signs that files of statistics have.
NA_VALUES = (
    *("", "NA", "nan", "NaN", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN"),
    *("-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NULL", "None", "n/a", "null", "na"),
    *("none", "?", "-", "."),
)
_NO_WORDS = {"", "NA", "nan", "NaN"}
_MAX_FLOAT32_INTEGER, _MAX_FLOAT64_INTEGER = 2**24, 2**53
_BLOCK_BYTES = 2**20
_ROWS_AT_ONCE = 4096
_NUM_INFERRED = 1000
_ARROW_TYPES = {"string": "binary", "float32": "float", "float64": "double"}
_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity|nan)", re.I
)
Report = Callable[[int, str], None]


@dataclasses.dataclass(frozen=True)
class CsvSource(_files.ChunkedSource):
    """Rows of CSV files, one file after another."""

    dtypes: Mapping[str, str]  # of all columns, in order
    features: tuple[str, ...]
    label: str | None
    delimiter: str

    @property
    def selected(self) -> dict[str, str]:
        """The dtypes of the features and the label."""
        names = (*self.features, self.label)
        return {name: dtype for name, dtype in self.dtypes.items() if name in names}

    def arranged(self, columns: Mapping[str, Any]) -> Any:
        """Returns columns as elements hold them, the label apart."""
        features = {name: columns[name] for name in self.features}
        return features if self.label is None else (features, columns[self.label])

    def chunks(self, settings: Settings) -> tf.data.Dataset:
        """Returns the rows as columns of some thousand of them."""
        pairs = self.selected.items()
        specs = {name: tf.TensorSpec((None,), dtype) for name, dtype in pairs}
        read, spec = functools.partial(self._read, settings), self.arranged(specs)
        return tf.data.Dataset.from_generator(read, output_signature=spec)

    def _read(self, settings: Settings) -> Iterator[Any]:
        for path in self.paths:

            def report(line: int, reason: str, path: str = path) -> None:
                self.report(settings, f"{path}, line {line}", reason)

            yield from map(self.arranged, _read_columns(path, self, report))

    def explain(self) -> tuple[str, str]:
        """Returns what the source is, and the reason for the way it is read."""
        counts = collections.Counter(self.selected.values())
        types = [f"{counts[dtype]} {dtype}" for dtype in DTYPES if counts[dtype]]
        return f"CSV, {self.length('rows')}", f"{', '.join(types)}; gaps are NaN"

    def identity(self) -> Any:
        """Returns the files with size and time of change, and how they are read."""
        kept = dataclasses.replace(self, paths=(), num_examples=None)
        return ("csv", repr(kept), files_identity(self.paths))


def csv_source(
    paths: Any,
    label: str | None,
    columns: Sequence[str] | None,
    dtypes: Mapping[str, Any] | None,
) -> CsvSource:
    """Returns the rows of CSV files as a source, after a look at the head of each."""
    _arrow()
    found = _files.find_files(paths, (".csv", ".tsv", ".txt", ".gz"))
    delimiter, names, rows = _heads(found)
    asked = {"columns": columns, "dtypes": dtypes, "label": label and [label]}
    for argument, given in asked.items():
        for name in given or ():
            checks.choice(argument, name, names)
    features = tuple(name for name in columns or names if name != label)
    if not features:
        raise ValueError(
            f"`columns` is {columns!r} and the label {label!r}; expected a feature "
            f"among {_files.listed(names)}. Name more `columns`."
        )
    types = dict.fromkeys(names, "string")  # what is not wanted is never converted
    for number, name in enumerate(names):
        if name in (*features, label):
            types[name] = infer([row[number].strip() for row in rows])
    for name, dtype in (dtypes or {}).items():
        text = "string" if dtype is str else getattr(dtype, "name", dtype)
        text = getattr(text, "__name__", text)
        types[name] = checks.choice(f"dtypes[{name!r}]", text, DTYPES)
    source = CsvSource(found, None, types, features, label, delimiter)

    def count(path: str) -> int:
        chunks = _read_columns(path, source, lambda line, reason: None)
        return sum(len(next(iter(columns.values()))) for columns in chunks)

    num_rows = _files.counted(found, count, "rows")
    return dataclasses.replace(source, num_examples=num_rows)


def infer(values: Sequence[str]) -> str:
    """Returns the dtype that holds all of `values` exactly, or as float32."""
    present = [value for value in values if value not in NA_VALUES]
    if not present and not set(values) <= _NO_WORDS:
        return "string"  # of signs alone
    is_padded = any(re.fullmatch(r"[+-]?0\d+", value) for value in present)
    if is_padded or not all(map(_NUMBER.fullmatch, present)):
        return "string"
    sizes = [abs(float(value)) for value in present]
    if present and all(_is_number(value, "int64") for value in present):
        if len(present) == len(values):
            return "int64"
        largest = max(abs(int(value)) for value in present)
        return "float64" if largest <= _MAX_FLOAT64_INTEGER else "string"
    is_large = any(_MAX_FLOAT32_INTEGER <= size < float("inf") for size in sizes)
    return "float64" if is_large else "float32"


def _read_columns(
    path: str, form: CsvSource, report: Report
) -> Iterator[dict[str, Any]]:
    """Yields the selected columns of a file's rows, and reports those left out."""
    selected, num_done = form.selected, 0
    try:
        for batch in _batches(path, form):
            columns = dict(zip(form.dtypes, batch.columns, strict=True))
            if any(_is_unfit(columns[name], form.dtypes[name]) for name in columns):
                break
            yield {n: columns[n].to_numpy(zero_copy_only=False) for n in selected}
            num_done += batch.num_rows
        else:
            return
    except _arrow().ArrowInvalid:
        pass
    rows: list[list[Any]] = []
    records = _records(path, form.delimiter)
    for line, fields, fault in itertools.islice(records, 1 + num_done, None):
        values = []
        if not fault and len(fields) != len(form.dtypes):
            fault = f"{len(fields)} fields, expected {len(form.dtypes)}"
        for text, (name, dtype) in zip(fields, form.dtypes.items(), strict=False):
            if not fault and name in selected:
                value, fault = _value(text, name, dtype)
                values.append(value)
        if fault:
            report(line, fault)
        else:
            rows.append(values)
        if len(rows) == _ROWS_AT_ONCE:
            yield _arrays(rows, selected)
            rows = []
    if rows:
        yield _arrays(rows, selected)


def _batches(path: str, form: CsvSource) -> Iterator[Any]:
    """Yields Arrow's batches of all columns; ArrowInvalid where a row is unfit."""
    arrow, arrow_csv = _arrow(), _arrow("csv")
    header = next(_records(path, form.delimiter))[1]
    kinds = [_ARROW_TYPES.get(dtype, dtype) for dtype in form.dtypes.values()]
    nulls = [gap for gap in NA_VALUES if gap.lower() != "nan"]
    nulls += [f" {gap}" for gap in nulls]
    with (
        _files.open_text(path) as file,
        arrow_csv.open_csv(
            arrow.PythonFile(file, mode="r"),
            arrow_csv.ReadOptions(block_size=_BLOCK_BYTES),
            arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=dict(zip(header, kinds, strict=True)), null_values=nulls
            ),
        ) as reader,
    ):
        yield from reader


def _is_unfit(values: Any, dtype: str) -> bool:
    """Whether integers lack one, or a text goes on in the next line."""
    if dtype == "string":  # as a quote that stays open makes it do
        compute = _arrow("compute")
        return bool(compute.any(compute.match_substring(values, "\n")).as_py())
    return bool(values.null_count) and dtype.startswith("int")


def _value(text: str, name: str, dtype: str) -> tuple[Any, str]:
    """Returns a text in its dtype, and what is wrong with it, "" for nothing."""
    raw, plain = text.encode("utf-8", "surrogateescape"), text.strip()
    is_integer = dtype.startswith("int")
    if dtype == "string":
        return raw, ""
    if plain in NA_VALUES:
        missing = f"column {name!r} is missing, which {dtype} cannot say"
        remedy = f"pass `dtypes={{{name!r}: 'float64'}}`"
        return float("nan"), f"{missing}; {remedy}" if is_integer else ""
    if not _is_number(plain, dtype):
        shown, expected = raw.decode("utf-8", "replace"), f"expected {dtype}"
        return None, f"column {name!r} holds {shown!r}, {expected} (see `dtypes`)"
    return int(plain) if is_integer else float(plain), ""


def _is_number(text: str, dtype: str) -> bool:
    if not dtype.startswith("int"):
        return _NUMBER.fullmatch(text) is not None
    limit = 2 ** (int(dtype[3:]) - 1)
    return bool(re.fullmatch(r"[+-]?\d+", text)) and -limit <= int(text) < limit


def _arrays(rows: list[list[Any]], selected: Mapping[str, str]) -> dict[str, Any]:
    kinds = {"string": object}
    pairs = zip(selected.items(), zip(*rows, strict=True), strict=True)
    return {name: np.array(v, kinds.get(dtype, dtype)) for (name, dtype), v in pairs}


def _arrow(module: str = "") -> Any:
    """Returns pyarrow, or one of its modules, or says how to install it."""
    name = f"pyarrow.{module}" if module else "pyarrow"
    return checks.require(name, extra="data", purpose="`Pipeline.from_csv`")


def _records(path: str, delimiter: str) -> Iterator[tuple[int, list[str], str]]:
    """Yields line, fields and fault of each record of a file that is not empty."""
    with _files.open_text(path) as file:
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
            except csv.Error:
                if len(taken) == 1 and taken[0].count(b'"') % 2 == 0:
                    # Text behind a closing quote is part of the field, as in Arrow.
                    text = taken[0].decode("utf-8", "surrogateescape")
                    fields = next(csv.reader([text], delimiter=delimiter))
                else:
                    fields, fault = [], "a quote that is not closed, or out of place"
                again.extendleft(reversed(taken[1:]))
                del taken[1:]
                reader = csv.reader(lines(), delimiter=delimiter, strict=True)
            if fields or fault:
                yield number, fields, fault
            number += len(taken)


def _heads(paths: Sequence[str]) -> tuple[str, list[str], list[list[str]]]:
    """Returns delimiter and columns, the same in all files, and rows of the first."""
    first: tuple[str, list[str], list[list[str]]] = ("", [], [])
    for path in paths:
        _files.check_text(path)
        options = first[0] or ",;\t|"  # the one that makes most columns
        delimiter = max(options, key=lambda one: len(_head(path, one, 0)[0]))
        header, *rows = _head(path, delimiter, 1 if first[0] else _NUM_INFERRED)
        names = [name.strip() or f"column_{i}" for i, name in enumerate(header)]
        numbers = [str(number) for number in range(len(names) + 1)]
        are_numbers = all(map(_NUMBER.fullmatch, names))
        if names in (numbers[:-1], numbers[1:]):  # which are names in order
            are_numbers = False
        if are_numbers or len(set(names)) < len(names) or not rows:
            raise ValueError(
                f"File {path!r} begins with {_files.listed(names) or 'no line'} and "
                f"has {'more' if rows else 'no'} rows; expected the names of the "
                "columns, each once, and a row. Write such a line, or leave it out."
            )
        if first[1] and names != first[1]:
            others = sorted(set(names) ^ set(first[1])) or names
            raise ValueError(
                f"File {path!r} has other columns than {paths[0]!r}, or in another "
                f"order: {_files.listed(others)}. Expected the same. Make them equal."
            )
        kept = [row for row in rows if len(row) == len(names)]
        first = first if first[1] else (delimiter, names, kept)
    return first


def _head(path: str, delimiter: str, num_rows: int) -> list[list[str]]:
    """Returns the header of a file, empty if there is none, and its first rows."""
    found = itertools.islice(_records(path, delimiter), 1 + num_rows)
    return [fields for _, fields, _ in found] or [[]]
