"""What the columns of CSV files are: names, types, and which are wanted."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfamp.data.sources._csv_records import read_records
from tfamp.data.sources._files import shown
from tfamp.records import checks

DTYPES = ("float32", "float64", "int32", "int64", "string")
NA_VALUES = ("", "NA", "nan", "NaN")
# float32 and float64 hold all integers up to here.
MAX_FLOAT32_INTEGER = 2**24
MAX_FLOAT64_INTEGER = 2**53
_DELIMITERS = (",", ";", "\t", "|")
_INTEGER = re.compile(r"[+-]?\d+")
_NUMBER = re.compile(
    r"[+-]?(\d+\.?\d*([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?|inf|infinity|nan)", re.I
)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the files.

    Attributes:
        name: From the header, or "column_3" where that has none.
        dtype: One of `DTYPES`.
        holds_integers: Whether float32 was inferred for integers with gaps, so that
            a larger integer must not be rounded.
    """

    name: str
    dtype: str
    holds_integers: bool = False


@dataclasses.dataclass(frozen=True)
class Format:
    """How to read rows.

    Attributes:
        columns: All columns, in the order of the files.
        features: Names of those that are wanted, without the label.
        label: Name of the label's column, None for none.
        delimiter: What stands between fields.
        na_values: What stands for a missing value; the empty field is among them.
        has_header: Whether each file begins with the names.
        num_inferred_rows: Rows that the types were inferred from.
    """

    columns: tuple[Column, ...]
    features: tuple[str, ...]
    label: str | None
    delimiter: str
    na_values: tuple[str, ...]
    has_header: bool
    num_inferred_rows: int

    @property
    def selected(self) -> tuple[str, ...]:
        """Names of the features, then the label."""
        return self.features if self.label is None else (*self.features, self.label)


def is_number(text: str, dtype: str = "float32") -> bool:
    """Whether `text` is a number of a dtype.

    Example:
        >>> is_number(" 1e5"), is_number("1e5", "int64"), is_number("five")
        (True, False, False)
    """
    text = text.strip()
    if not dtype.startswith("int"):
        return _NUMBER.fullmatch(text) is not None
    if not _INTEGER.fullmatch(text):
        return False
    limit = 2 ** (int(dtype[3:]) - 1)
    return -limit <= int(text) < limit


def infer(name: str, values: Sequence[str], na_values: Sequence[str]) -> Column:
    """Returns a column whose type holds all of `values` exactly, or as float32.

    Integers are int64. With gaps they are float32, or float64 beyond 2**24, or text
    beyond 2**53. Other numbers are float32, or float64 where one is 2**24 or more,
    as timestamps are. Digits with leading zeros, such as postal codes, are text.
    A column of gaps alone is float32.

    Example:
        >>> infer("x", ["1", "2"], ("",)).dtype, infer("x", ["1", ""], ("",)).dtype
        ('int64', 'float32')
        >>> infer("x", ["1.5", "1700000000.25"], ("",)).dtype
        'float64'
    """
    present = [v.strip() for v in values if v not in na_values]
    has_gaps = len(present) < len(values)
    if any(re.fullmatch(r"[+-]?0\d+", value) for value in present):
        return Column(name, "string")
    if present and all(is_number(value, "int64") for value in present):
        largest = max(abs(int(value)) for value in present)
        if not has_gaps:
            return Column(name, "int64")
        if largest > MAX_FLOAT64_INTEGER:
            return Column(name, "string")
        if largest > MAX_FLOAT32_INTEGER:
            return Column(name, "float64")
        return Column(name, "float32", holds_integers=True)
    if not all(is_number(value) for value in present):
        return Column(name, "string")
    numbers = [abs(float(value)) for value in present]
    is_large = any(MAX_FLOAT32_INTEGER <= n < float("inf") for n in numbers)
    return Column(name, "float64" if is_large else "float32")


def find_format(
    paths: Sequence[str],
    *,
    label: str | None,
    columns: Sequence[str] | None,
    dtypes: Mapping[str, Any] | None,
    header: bool,
    column_names: Sequence[str] | None,
    delimiter: str,
    na_values: Sequence[str],
    num_infer_rows: int,
) -> Format:
    """Returns the format of files after a look at the head of each.

    Raises:
        ValueError: A file has no rows or another header than the first, or a column
            that is asked for does not exist.
    """
    rows: list[list[str]] = []
    names: list[str] = []
    for path in paths:
        limit = num_infer_rows + 1 if path == paths[0] else 2
        head = _head(path, delimiter, limit)
        _check_delimiter(path, head[0], delimiter)
        found = _names(path, head, header, column_names)
        names = names or found
        if found != names:
            raise ValueError(_differing(paths[0], names, path, found))
        if len(head) == int(header):
            raise ValueError(
                f"File {path!r} has a header and no rows; expected at least one. "
                "Leave it out, or pass `header=False` if its first line is a row."
            )
        if path == paths[0]:
            rows = head[int(header) :]
    dtypes = _checked_dtypes(dtypes or {}, names)
    # Rows of another length are reported, with their line, when they are read.
    whole = [row for row in rows if len(row) == len(names)]
    wanted = _wanted(names, columns, label)
    if label is not None:
        wanted = [name for name in wanted if name != label]
        if not wanted:
            raise ValueError(
                f"Only the label {label!r} is selected; expected a feature beside it. "
                "Name more `columns`."
            )
    described = []
    for number, name in enumerate(names):
        if name in dtypes:
            described.append(Column(name, dtypes[name]))
        elif name in wanted or name == label:
            described.append(infer(name, [row[number] for row in whole], na_values))
        else:  # Read over, never converted.
            described.append(Column(name, "string"))
    return Format(
        columns=tuple(described),
        features=tuple(wanted),
        label=label,
        delimiter=delimiter,
        na_values=tuple(na_values),
        has_header=header,
        num_inferred_rows=len(whole),
    )


def _head(path: str, delimiter: str, limit: int) -> list[list[str]]:
    """Returns the fields of the first records of a file; at least one."""
    head: list[list[str]] = []
    records = read_records(path, delimiter)
    for record in itertools.islice(records, limit):
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
    return head


def _check_delimiter(path: str, first: list[str], delimiter: str) -> None:
    if len(first) != 1:
        return
    others = [d for d in _DELIMITERS if d != delimiter and d in first[0]]
    if others:
        likely = max(others, key=first[0].count)
        raise ValueError(
            f"File {path!r} has 1 column, {first[0][:60]!r}, with `delimiter` "
            f"{delimiter!r}; expected more. Did you mean `delimiter={likely!r}`?"
        )


def _names(
    path: str,
    head: list[list[str]],
    header: bool,
    column_names: Sequence[str] | None,
) -> list[str]:
    """Returns the names of a file's columns."""
    first = head[0]
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
            f"The header of {path!r} names {shown(repeated)} more than once; expected "
            "each column once. Rename one, or pass `header=False` if it is a row."
        )
    counted = [str(n) for n in range(len(names) + 1)]
    is_counted = names in (counted[:-1], counted[1:])
    if not is_counted and all(is_number(name) for name in names):
        raise ValueError(
            f"The first line of {path!r} holds numbers, {shown(names)}; expected the "
            "names of the columns. Pass `header=False`."
        )
    return names


def _differing(first: str, names: list[str], path: str, found: list[str]) -> str:
    lacking = [name for name in names if name not in found]
    added = [name for name in found if name not in names]
    told = [f"lacks {shown(lacking)}"] if lacking else []
    told += [f"has {shown(added)} in addition"] if added else []
    return (
        f"File {path!r} has other columns than {first!r}: it "
        f"{' and '.join(told) or 'has them in another order'}. Expected the same in "
        "all files. Read them as two sources, or make the headers equal."
    )


def _wanted(
    names: list[str], columns: Sequence[str] | None, label: str | None
) -> list[str]:
    """Returns the names of the columns to give, in the order asked for."""
    if isinstance(columns, str):
        raise TypeError(
            f"`columns` is {columns!r}; expected a sequence of names. Pass "
            f"`columns=[{columns!r}]`."
        )
    for argument, name in [
        *(("columns", name) for name in columns or ()),
        *((("label", label),) if label is not None else ()),
    ]:
        if name not in names:
            _unknown(argument, name, names)
    if columns is not None and not columns:
        raise ValueError(
            f"`columns` is {columns!r}; expected at least one name, or None for all. "
            f"The files have {shown(names)}."
        )
    return list(dict.fromkeys(columns)) if columns is not None else list(names)


def _unknown(argument: str, name: Any, names: list[str]) -> None:
    close = checks.did_you_mean(str(name), names)
    advice = f"Did you mean {close!r}?" if close else "Pass one of these names."
    raise ValueError(
        f"`{argument}` names the column {name!r}, which the files lack; expected one "
        f"of their {len(names)}, {shown(names)}. {advice}"
    )


def _checked_dtypes(dtypes: Mapping[str, Any], names: list[str]) -> dict[str, str]:
    checked = {}
    for name, dtype in dtypes.items():
        if name not in names:
            _unknown("dtypes", name, names)
        text = getattr(dtype, "name", dtype)
        text = "string" if text in ("str", str) else text
        text = getattr(text, "__name__", text)
        checked[name] = checks.choice(f"dtypes[{name!r}]", text, DTYPES)
    return checked
