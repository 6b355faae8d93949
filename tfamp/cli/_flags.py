"""Flags of commands: the arguments of a function by name, and those of its own."""

import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

from tfamp.records import checks
from tfamp.records.units import parse_bytes


class Flag(NamedTuple):
    """A flag of a command."""

    name: str  # as it is typed, with underscores
    # The end of absl's `DEFINE_...`, or a function that reads the value, given the
    # flag's name for messages and the text.
    kind: str | Callable[[str, Any], Any]
    default: Any  # the value where the flag is not given
    help: str  # for `--help`
    least: float | None = None  # the smallest number, None for any
    # Whether it may be given several times; `kind` gets the list of texts.
    again: bool = False

    @property
    def argument(self) -> str:
        """The argument of the function that it stands for."""
        return "max_memory_bytes" if self.name == "max_memory" else self.name

    def define(self, values: flags.FlagValues) -> None:
        """Adds the flag to those of a command."""
        what: Any = (self.name, self.default, self.help)
        how: dict[str, Any] = {"flag_values": values}
        if self.name == "help":
            how["short_name"] = "h"
        if self.least is not None:
            how["lower_bound"] = self.least
        if self.again:
            flags.DEFINE_multi_string(*what, **how)
        elif isinstance(self.kind, str):
            getattr(flags, f"DEFINE_{self.kind}")(*what, **how)
        else:
            flags.DEFINE(_Reader(self.kind, self.name), *what, **how)

    def shown(self) -> str:
        """Returns the help, with the default and how several are written."""
        default = self.default
        if self.kind == "bool":
            return (
                f"{self.help} (or --no{self.name})"
                if default is not False
                else self.help
            )
        several = " Commas stand between several." if self.kind == "list" else ""
        if isinstance(default, list):
            default = ",".join(map(str, default))
        told = "" if default in (None, "") else f" (default: {default})"
        return f"{self.help}{several}{told}"

    def value(self, values: flags.FlagValues) -> Any:
        """Returns what was given, read."""
        found = values[self.name].value
        if self.again and callable(self.kind):
            return self.kind(f"--{self.name}", found)
        return found


class _Reader(flags.ArgumentParser):
    """Reads a flag's value by a function; its `ValueError` is what the user is told."""

    def __init__(self, read: Callable[[str, str], Any], name: str) -> None:
        self._read, self._name = read, name

    def parse(self, argument: Any) -> Any:
        """Returns the value that a text stands for; a default is one already."""
        if not isinstance(argument, str):
            return argument
        try:
            return self._read(f"--{self._name}", argument)
        except ValueError as error:
            raise flags.IllegalFlagValueError(str(error)) from error


def one_of(*options: str) -> Callable[[str, str], str]:
    """Returns a kind of flag that takes one of these words."""
    return lambda name, text: checks.choice(name, text, options)


def some_of(*options: str) -> Callable[[str, str], list[str]]:
    """Returns a kind of flag that takes some of these words, with commas between."""

    def read(name: str, text: str) -> list[str]:
        words = [word.replace("-", "_") for word in text.split(",") if word]
        return [checks.choice(name, word, options) for word in words]

    return read


def sizes(name: str, text: str) -> list[int]:
    """Reads whole numbers of at least 1, with commas between."""
    for word in text.split(","):
        if not word.isdigit() or int(word) < 1:
            raise ValueError(
                f"`{name}` has {word!r}; expected whole numbers of at least 1. Write "
                "for example 32,64"
            )
    return [int(word) for word in text.split(",")]


# Type of an argument -> kind of its flag; what is not here is text.
_KINDS: dict[Any, Any] = {
    bool: "bool",
    int: "integer",
    float: "float",
    Sequence[int]: sizes,
    Sequence[str]: "list",
}
_LEAST = {"integer": 1, "float": 0.0}
_UNIONS = (typing.Union, types.UnionType)


def of_function(function: Callable[..., Any]) -> list[Flag]:
    """Returns a flag for each argument by name, with default and help of the function.

    Counts are at least 1 and other numbers at least 0; memory may have a unit.
    """
    helps = dict(_arguments(inspect.getdoc(function) or ""))
    found = []
    for name, each in inspect.signature(function).parameters.items():
        if each.kind is not each.KEYWORD_ONLY:
            continue
        default: Any = None if each.default is each.empty else each.default
        help = helps.get(name, "")
        if name == "max_memory_bytes":
            size = f"{help} Such as 16GB, 14.5GiB or a number of bytes."
            found.append(Flag("max_memory", parse_bytes, default, size))
            continue
        is_union = typing.get_origin(each.annotation) in _UNIONS
        of = typing.get_args(each.annotation) if is_union else (each.annotation,)
        is_list = isinstance(default, tuple)
        kind = _KINDS.get(of[0], "list" if is_list else "string")
        if typing.get_origin(of[0]) is typing.Literal:
            kind = one_of(*typing.get_args(of[0]))
        default = list(default) if is_list else default
        found.append(Flag(name, kind, default, help, _LEAST.get(kind)))
    return found


def _arguments(doc: str) -> list[tuple[str, str]]:
    """Returns names and texts of the arguments that a docstring explains."""
    section = re.search(r"^Args:\n((?:(?:    .*)?\n)+)", f"{doc}\n", re.MULTILINE)
    text = section.group(1) if section else ""
    parts = re.split(r"^    (\w+): ", text, flags=re.MULTILINE)[1:]
    helps = (" ".join(part.split()) for part in parts[1::2])
    return list(zip(parts[::2], helps, strict=True))


HELP = Flag("help", "bool", False, "Show this help and exit.")
JSON = Flag(
    *("json", "string", None),
    "File that gets the result as JSON; - prints it, and nothing else.",
)
PLOT = Flag("plot", "string", None, "Image file that gets a plot of the result.")
