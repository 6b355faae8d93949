"""Tests of what is refused, each made of a table of calls and the errors they raise."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

Kinds = type[Exception] | tuple[type[Exception], ...]


def refusals(
    table: Mapping[str, tuple[Any, ...]],
    call: Callable[[Any], Any] = lambda make: make(),
    *,
    kind: Kinds = ValueError,
) -> Callable[..., None]:
    """Returns a test of rows of what `call` takes, a message and maybe another kind."""

    @pytest.mark.parametrize("row", table.values(), ids=table)
    def test(row: tuple[Any, ...]) -> None:
        given, message, error = (*row, kind)[:3]
        with pytest.raises(error, match=re.escape(message)):
            call(given)

    return test


def refused_arguments(
    call: Callable[..., Any], *rows: tuple[Any, ...]
) -> Callable[..., None]:
    """Returns a test of rows of name, value, rest of the message, maybe another kind.

    What comes before the rest is "`name` is value".
    """

    @pytest.mark.parametrize("row", rows, ids=lambda row: f"{row[0]} is {row[1]!r}")
    def test(row: tuple[Any, ...]) -> None:
        name, value, rest, error = (*row, ValueError)[:4]
        with pytest.raises(error, match=re.escape(f"`{name}` is {value!r}{rest}")):
            call(**{name: value})

    return test
