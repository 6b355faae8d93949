"""Frozen records of facts that go to JSON, in files that appear whole or not at all.

They are of numbers, text, None, records, tuples, and dicts with text as keys.
"""

import abc
import contextlib
import dataclasses
import html
import json
import math
import numbers
import os
import reprlib
import secrets
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

RecordType = TypeVar("RecordType", bound="Record")

# No field can be called "class"; none of ours is called "schema".
_CLASS, _SCHEMA = "class", "schema"
# Characters of a record's `repr`; of a field there are the first few items.
_MAX_REPR = 800
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
# Lines of a table that a notebook shows; `print` shows all of them.
_MAX_SHOWN = 30
# What ends the name of a file that is being written.
BESIDE = ".writing"


class Record:
    """Base of frozen dataclasses that can be written and read again.

    `SCHEMA` is the version of the fields; files of a later one are refused.
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
            parts.append(f"{name}={_SHORT.repr(getattr(self, name))}")
            if sum(map(len, parts)) > _MAX_REPR:
                parts[-1] = "..."
                break
        return f"{type(self).__qualname__}({', '.join(parts)})"

    def _repr_html_(self) -> str | None:
        """Returns what a notebook shows: what `print` does, as far as a screen goes."""
        if type(self).__str__ is object.__str__:
            return None
        lines = str(self).splitlines()
        if len(lines) > _MAX_SHOWN:
            rest = f"... {len(lines) - _MAX_SHOWN} more lines: `print` shows them."
            lines = [*lines[:_MAX_SHOWN], rest]
        shown = html.escape("\n".join(lines))
        return f'<pre style="white-space: pre; line-height: 1.2">{shown}</pre>'

    def to_dict(self) -> dict[str, Any]:
        """Returns class, schema and fields as plain JSON values; NaN becomes text."""
        result: dict[str, Any] = {_CLASS: type(self).__name__, _SCHEMA: self.SCHEMA}
        for name in _hints(type(self)):
            where = f"`{name}` of {type(self).__name__}"
            result[name] = _encode(getattr(self, name), where)
        return result

    @classmethod
    def from_dict(cls: type[RecordType], values: Mapping[str, Any]) -> RecordType:
        """Returns the record that `to_dict` wrote, or raises ValueError."""
        name, hints = cls.__name__, _hints(cls)
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
            write_whole(path, f"{text}\n")
        return text

    @classmethod
    def from_json(
        cls: type[RecordType], path_or_text: str | os.PathLike[str]
    ) -> RecordType:
        """Returns the record in a file, or in a text, which starts with a brace."""
        text, where = str(path_or_text), "The text"
        if not (isinstance(path_or_text, str) and text.lstrip().startswith("{")):
            where = f"The file {text!r}"
            text = Path(path_or_text).read_text(encoding="utf-8")
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
        return number if math.isfinite(number) else json.dumps(number)
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
    elif hint is float and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    elif hint is float and type(value) in (int, float):
        return float(value)
    elif hint in (int, str, bool, type(None)) and type(value) is hint:
        return value
    expected = hint.__name__ if isinstance(hint, type) else str(hint)
    raise ValueError(
        f"{where} is {value!r}; expected {expected.removeprefix('typing.')}. "
        f"Correct it, or write the record again."
    )


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text beside a file, whose place it takes when it is whole.

    What was there before stays until then, also where the process is killed.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}{BESIDE}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
