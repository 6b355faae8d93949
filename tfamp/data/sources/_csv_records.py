"""Reads CSV files record by record, with the place of each."""

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from typing import IO

from tfamp.data.sources._files import BYTE_ORDER_MARK, open_bytes

# Longest field, in characters. Beyond, its quote is taken for one that stays open.
_MAX_FIELD = 4 * 2**20
_OPEN_QUOTE = "a quote that is not closed, or stands inside an unquoted field"


@dataclasses.dataclass(frozen=True)
class Place:
    """The beginning of a line in a file.

    Attributes:
        offset: Bytes before it, in the file as unpacked.
        line: Its number, from 1.
    """

    offset: int = 0
    line: int = 1

    def behind(self, lines: Sequence[bytes]) -> "Place":
        """Returns the place behind some lines that begin here."""
        return Place(self.offset + sum(map(len, lines)), self.line + len(lines))


@dataclasses.dataclass(frozen=True)
class Record:
    """A record of a file, as text.

    Attributes:
        line: Its first line, from 1.
        fields: What it holds; undecodable bytes are surrogates.
        end: The place behind it.
        fault: Why it is none, "" for nothing; it is its first line then.
    """

    line: int
    fields: list[str]
    end: Place
    fault: str = ""


def read_records(path: str, delimiter: str, place: Place = Place()) -> Iterator[Record]:
    """Yields the records of a file that are not empty, from a place on.

    A quote that is never closed costs its own line.
    """
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
                end = place.behind(lines[:1] if fault else lines)
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
