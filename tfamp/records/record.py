"""Frozen records of facts that go to JSON, in files that appear whole or not at all.

A record is a frozen dataclass derived from `Record`. Its fields may hold numbers,
text, None, other records, tuples, and dicts with text as keys, nested as one likes;
the annotations say what comes back, so a tuple of records is one again.
"""

import abc
import contextlib
import dataclasses
import html
import json
import math
import numbers
import os
import secrets
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

RecordType = TypeVar("RecordType", bound="Record")

# No field can be called "class"; none of ours is called "schema".
_CLASS, _SCHEMA = "class", "schema"
# Characters of a record's `repr`, and of one field in it.
_MAX_REPR, _MAX_FIELD = 800, 80
# Lines of a table that a notebook shows; `print` shows all of them.
_MAX_SHOWN = 30
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
# What ends the name of a file that is being written.
BESIDE = ".writing"


class Record:
    """Base of frozen dataclasses that can be written and read again.

    Attributes:
        SCHEMA: Version of the record's fields, raised when their meaning changes.
            Files of a later version than this one are refused.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True)
        ... class Point(Record):
        ...     place: tuple[float, ...]
        >>> Point((1.0, 0.5)).to_dict()
        {'class': 'Point', 'schema': 1, 'place': [1.0, 0.5]}
        >>> Point.from_json(Point((1.0, 0.5)).to_json())
        Point(place=(1.0, 0.5))
    """

    SCHEMA: ClassVar[int] = 1

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `dataclass` writes none where the class has its own.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Record.__repr__  # type: ignore[method-assign]

    def __repr__(self) -> str:
        """Returns class and fields in a few lines: what is long by its number alone."""
        parts: list[str] = []
        for name in _hints(type(self)):
            parts.append(f"{name}={_brief(getattr(self, name))}")
            if sum(map(len, parts)) > _MAX_REPR:
                parts[-1] = "..."
                break
        return f"{type(self).__qualname__}({', '.join(parts)})"

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows: what `print` does, as far as a screen goes."""
        if type(self).__str__ is object.__str__:
            return None
        return as_html(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Returns the class, the schema version and the fields as plain JSON values.

        Non-finite floats become "NaN", "Infinity" and "-Infinity", which strict
        JSON has no numbers for. A TypeError says that a field holds something else.
        """
        result: dict[str, Any] = {_CLASS: type(self).__name__, _SCHEMA: self.SCHEMA}
        for name in _hints(type(self)):
            where = f"`{name}` of {type(self).__name__}"
            result[name] = _encode(getattr(self, name), where)
        return result

    @classmethod
    def from_dict(cls: type[RecordType], values: Mapping[str, Any]) -> RecordType:
        """Returns the record that `to_dict` wrote; a field with a default may be left.

        A ValueError says that it is of another class or a later schema, or that a field
        is unknown, missing, or of another type than the record's.
        """
        name, hints = cls.__name__, _hints(cls)
        if not isinstance(values, Mapping):
            raise TypeError(
                f"`values` is {values!r}; expected a dict of the fields of {name}. "
                f"Pass what `to_dict` returned."
            )
        given = dict(values)
        written, schema = given.pop(_CLASS, name), given.pop(_SCHEMA, cls.SCHEMA)
        if written != name or not isinstance(schema, int) or schema > cls.SCHEMA:
            raise ValueError(
                f"Found a record of {written!r}, schema {schema!r}; expected {name!r}, "
                f"at most {cls.SCHEMA}. Read it by its class, or update tfamp."
            )
        needed = {
            field.name
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]
            if field.default is field.default_factory is dataclasses.MISSING
        }
        if odd := sorted((given.keys() - hints.keys()) | (needed - given.keys())):
            raise ValueError(
                f"Fields {tuple(odd)!r} of {name} are unknown, or missing; expected "
                f"{tuple(hints)!r}. Correct them, or update tfamp if a later version "
                "wrote them."
            )
        decoded = {
            key: _decode(value, hints[key], f"`{key}` of {name}")
            for key, value in given.items()
        }
        return cls(**decoded)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Returns the record as strict JSON and writes it whole to `path`, if given."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if path is not None:
            with whole(path) as beside:
                beside.write_text(f"{text}\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(
        cls: type[RecordType], path_or_text: str | os.PathLike[str]
    ) -> RecordType:
        """Returns the record in a file, or in a text, which starts with a brace.

        A ValueError says that it is not JSON, or what `from_dict` does.
        """
        text, where = str(path_or_text), "The text"
        if not (isinstance(path_or_text, str) and text.lstrip().startswith("{")):
            path = Path(path_or_text)
            if not path.is_file():
                raise FileNotFoundError(
                    f"`path_or_text` is {text!r}; expected a file, or JSON that starts "
                    f"with a brace. Write one with `{cls.__name__}.to_json`."
                )
            text, where = path.read_text(encoding="utf-8"), f"The file {text!r}"
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{where} is not JSON ({error}); expected a record of {cls.__name__}. "
                f"Write it again with `to_json`."
            ) from error
        return cls.from_dict(values)


class TableRecord(Record, abc.ABC):
    """A record that `print` shows as its table."""

    @abc.abstractmethod
    def table(self) -> str:
        """Returns what there is to see, as text."""

    def __str__(self) -> str:
        """Returns the table."""
        return self.table()


def as_html(text: str) -> str:
    """Returns a text as a notebook shows it, its lines unbroken, on one screen."""
    lines = text.splitlines()
    if len(lines) > _MAX_SHOWN:
        rest = f"... {len(lines) - _MAX_SHOWN} more lines: `print` shows them."
        lines = [*lines[:_MAX_SHOWN], rest]
    shown = html.escape("\n".join(lines))
    return f'<pre style="white-space: pre; line-height: 1.2">{shown}</pre>'


def _brief(value: Any) -> str:
    """Returns a value as code, or what it is where that is long."""
    whole = repr(value)
    if len(whole) <= _MAX_FIELD:
        return whole
    if isinstance(value, str):
        return f"{repr(value[: _MAX_FIELD - 5])[:-1]}...'"
    if isinstance(value, (tuple, list)):
        kinds = {type(item).__name__ for item in value}
        kind = kinds.pop() if len(kinds) == 1 else "several types"
        return f"<{len(value)} of {kind}>"
    if isinstance(value, Mapping):
        return f"<{len(value)} entries>"
    return f"<{type(value).__name__}>"


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Returns the type of each field of a record, in order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _encode(value: Any, where: str) -> Any:
    """Returns `value` as what `json` writes and `_decode` reads."""
    if isinstance(value, Record):
        return value.to_dict()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else f"{'-' if number < 0 else ''}Infinity"
    if isinstance(value, (tuple, list)):
        return [_encode(item, where) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encode(item, where) for key, item in value.items()}
    raise TypeError(
        f"{where} holds {value!r}, of type {type(value).__name__}; expected numbers, "
        f"text, records, tuples, or dicts with text as keys. Convert it first."
    )


def _decode(value: Any, hint: Any, where: str) -> Any:
    """Returns `value` as the type `hint` says, or raises ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            with contextlib.suppress(ValueError):
                return _decode(value, option, where)
    elif hint is Any or (origin is Literal and value in arguments):
        return value
    elif isinstance(hint, type) and issubclass(hint, Record):
        if isinstance(value, Mapping):
            return hint.from_dict(value)
    elif origin in (tuple, list) and isinstance(value, list):
        each = arguments[:1] * len(value)
        if origin is tuple and arguments[1:] != (...,):
            each = arguments
        if len(each) == len(value):
            pairs = zip(value, each, strict=True)
            return origin(_decode(item, kind, where) for item, kind in pairs)
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {k: _decode(v, arguments[1], where) for k, v in value.items()}
    elif hint is float and isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (int, str, bool, type(None)) and type(value) is hint:
        return value
    expected = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(
        f"{where} is {value!r}; expected {expected.removeprefix('typing.')}. "
        f"Correct it, or write the record again."
    )


@contextlib.contextmanager
def whole(path: str | os.PathLike[str], *, durable: bool = False) -> Iterator[Path]:
    """Yields a path beside another; the file written there takes the other's place.

    What was there before stays until then, also where the block raises or the process
    is killed, and no reader ever sees half of a file. The folder has to exist. With
    `durable` the file reaches the disk first, as a crash of the system may follow.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{BESIDE}")
    try:
        yield beside
        if durable:
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        sync_folder(target.parent)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text so that a reader or a crash never sees half of it.

    An OSError says that the folder is not there, the path a folder, or the disk full.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with whole(target) as beside:
            beside.write_text(text, encoding="utf-8")
    except OSError as error:
        raise type(error)(
            error.errno,
            f"`path` is {str(target)!r}, which could not be written "
            f"({error.strerror}); expected a file in a folder that is there and has "
            f"room for {len(text.encode()):,} bytes. Make the folder with `mkdir -p "
            f"{target.parent}`, free some space, or pass another path",
        ) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder reach the disk, where the system can do that."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
