"""A command: a function of tfamp, whose arguments by name are its flags."""

import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
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

    def described(self) -> str:
        """Returns the help, with the default and how several are written."""
        default = self.default
        if self.kind == "bool":
            other = "" if default is False else f" (or --no{self.name})"
            return f"{self.help}{other}"
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

# 2 is the shell's convention for a command that was called wrongly, 130 for Ctrl-C.
FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
STATUS = "Ends with status 0, 1 if it cannot be told, 2 if called wrongly."
_WIDTH = 80


class UsageError(ValueError):
    """The command was called wrongly."""


class Call(NamedTuple):
    """What a command was called with."""

    # What was typed without a flag, "" where there is no such argument; the first where
    # there may be several.
    argument: str
    values: Mapping[str, Any]  # flag -> its value
    given: Mapping[str, Any]  # the arguments of the function that flags tell, by name
    argv: Sequence[str]  # all of it, as it was typed
    arguments: Sequence[str]  # all that was typed without a flag


class Outcome(NamedTuple):
    """What a command came to."""

    record: Any  # the result, which `--json` writes and `--plot` draws
    text: Any = None  # to be printed, of rich or plain; None prints the record
    problems: Sequence[str] = ()  # to be printed as errors, below warnings
    is_bad: bool = False  # whether it ends with status 1


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `tfamp`: a function, with `--help` and `--json` beside its flags."""

    name: str  # the word after "tfamp"
    # The function, such as "tfamp.prove": its arguments by name are flags, and what its
    # docstring says ahead of them is what `--help` does.
    function: str
    work: Callable[[Call], Outcome]  # does it, given the call
    own: Sequence[Flag] = ()  # flags that the function does not have, or not so
    # Arguments that `work` gives, or nobody; no flag is made of them.
    without: Sequence[str] = ()
    purpose: str = ""  # for `--help`, in the place of the docstring
    more: str = STATUS  # for `--help`, too: what the argument is, the exit status
    # What the one argument without a flag stands for, such as "module:build"; None
    # where there is none. One that ends with "..." may be given several times.
    argument: str | None = None
    interrupted: str = "stopped"  # what is said after Ctrl-C

    @property
    def flags(self) -> list[Flag]:
        """All flags: those of the function, but for `without`, and its own."""
        given = (f for f in of_function(self._function()) if f.name not in self.without)
        return [*{f.name: f for f in (*given, *self.own, HELP, JSON)}.values()]

    def main(self, argv: Sequence[str]) -> int:
        """Runs the command and returns its exit status.

        Args:
            argv: The arguments after the command's name.
        """
        try:
            call = self._parse(argv)
            if call is None:
                return 0
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                outcome = self.work(call)
                _write(call.values, outcome)
        except UsageError as error:
            message = str(error).rstrip(" ?.")
            self._complain(f"{message}. See `tfamp {self.name} --help`.")
            return WRONG_CALL
        except KeyboardInterrupt:
            self._complain(self.interrupted)
            return INTERRUPTED
        except (
            *(ImportError, MemoryError, OSError),
            *(RuntimeError, TypeError, ValueError),
        ) as error:
            self._complain(error)
            return FAILED
        said = dict.fromkeys(str(warning.message) for warning in caught)
        for text in (*said, *outcome.problems):
            self._complain(text)
        return FAILED if outcome.is_bad else 0

    def _function(self) -> Callable[..., Any]:
        """Returns the function from where it is defined, whatever tfamp is set to."""
        package, _, name = self.function.rpartition(".")
        homes = getattr(importlib.import_module(package), "_HOMES", {})
        home = importlib.import_module(homes.get(name, package))
        found: Callable[..., Any] = getattr(home, name)
        return found

    def _parse(self, argv: Sequence[str]) -> Call | None:
        """Returns the call, None where it was for the help, which is printed.

        Flags may be typed with dashes, too. They are values of their own, so that two
        commands may share a name and a second call starts from the defaults.

        Raises:
            UsageError: It is none that can be understood.
        """
        values, known = flags.FlagValues(), self.flags
        for flag in known:
            flag.define(values)
        try:
            rest = values([self.name, *map(_underscored, argv)])[1:]
        except flags.Error as error:
            raise UsageError(str(error)) from error
        if values["help"].value:
            print(self._usage(known))
            return None
        expected = "flags only"
        is_several = self.argument is not None and self.argument.endswith("...")
        if self.argument is not None:
            expected = f"{'' if is_several else 'one '}{self.argument!r} and flags"
        if len(rest) > (self.argument is not None) and not is_several:
            found = f"Unexpected argument {rest[-1]!r}"
            raise UsageError(f"{found}; expected {expected}")
        if self.argument is not None and not rest:
            raise UsageError(f"Nothing is named; expected {expected}")
        try:
            read = {flag.name: flag.value(values) for flag in known}
        except ValueError as error:
            raise UsageError(str(error)) from error
        names = {*inspect.signature(self._function()).parameters} - {*self.without}
        given = {flag.argument: read[flag.name] for flag in known}
        given = {name: value for name, value in given.items() if name in names}
        return Call(rest[0] if rest else "", read, given, argv, tuple(rest))

    def _usage(self, known: Sequence[Flag]) -> str:
        """Returns the help."""
        doc = (inspect.getdoc(self._function()) or "").partition("\nArgs:")[0]
        place = "" if self.argument is None else f" {self.argument}"
        lines = [f"usage: tfamp {self.name}{place} [flags]", ""]
        for part in (self.purpose or doc.strip(), self.more):
            for paragraph in part.split("\n\n"):
                lines += [*textwrap.wrap(" ".join(paragraph.split()), _WIDTH), ""]
        for flag in sorted(known, key=lambda each: each.name):
            word = f"{'-h, ' if flag is HELP else ''}--{flag.name}"
            wrapped = textwrap.wrap(flag.described(), _WIDTH - 6)
            lines += [f"  {word}", *(f"      {line}" for line in wrapped)]
        if any("None" in flag.help for flag in known):
            lines += ["", "None stands for a flag that is not given."]
        return "\n".join(lines)

    def _complain(self, text: object) -> None:
        print(f"tfamp {self.name}: {text}", file=sys.stderr)


def _write(values: Mapping[str, Any], outcome: Outcome) -> None:
    """Prints the result, or writes it to where the flags say."""
    record, path = outcome.record, values["json"]
    if path == "-":
        print(record.to_json())
    elif path is not None:
        record.to_json(path)
    if values.get("plot") is not None:
        record.plot(values["plot"])
    if path != "-":
        text = str(record) if outcome.text is None else outcome.text
        if isinstance(text, str):
            print(text)
        else:
            from rich.console import Console

            Console().print(text)


def _underscored(argument: str) -> str:
    """Returns `--fail-on=worse` as `--fail_on=worse`; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"
