"""What all commands share: flags, the runner, warnings and errors in one wording."""

import dataclasses
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import flags

from tfamp.records import checks
from tfamp.records.units import parse_bytes

# 2 is the shell's convention for a command that was called wrongly, 130 for Ctrl-C.
FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
_NOTHING: Mapping[str, Any] = {}


class Flag(NamedTuple):
    """A flag of a command.

    Args:
        name: As it is typed, with underscores.
        kind: The end of absl's `DEFINE_...`, or a function that reads the value, given
            the flag's name for messages and the text.
        default: The value where the flag is not given.
        help: A line for `--help`.
        options: What absl's function takes besides.
        again: Whether it may be given several times; `kind` gets the list of texts.
    """

    name: str
    kind: str | Callable[[str, Any], Any]
    default: Any
    help: str
    options: Mapping[str, Any] = _NOTHING
    again: bool = False

    def define(self, values: flags.FlagValues) -> None:
        """Adds the flag to those of a command."""
        what: Any = (self.name, self.default, self.help)
        how: dict[str, Any] = {**self.options, "flag_values": values}
        if self.again:
            flags.DEFINE_multi_string(*what, **how)
        elif isinstance(self.kind, str):
            getattr(flags, f"DEFINE_{self.kind}")(*what, **how)
        else:
            flags.DEFINE(_Reader(self.kind, self.name), *what, **how)

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


JSON = Flag(
    *("json", "string", None),
    "File that gets the result as JSON; - prints it, and nothing else.",
)
PLOT = Flag("plot", "string", None, "Image file that gets a plot of the result.")
MAX_MEMORY = Flag(
    *("max_memory", parse_bytes, None),
    "Memory there is, such as 16GB, 14.5GiB or a number of bytes.",
)
_HELP = Flag(
    *("help", "bool", False, "Show this help and exit.", {"short_name": "h"}),
)


class UsageError(ValueError):
    """The command was called wrongly."""


class Call(NamedTuple):
    """What a command was called with.

    Args:
        argument: What was typed without a flag, "" where there is no such argument; the
            first where there may be several.
        values: Flag -> its value.
        given: The flags that were typed.
        argv: All of it, as it was typed.
        arguments: All that was typed without a flag.
    """

    argument: str
    values: Mapping[str, Any]
    given: frozenset[str]
    argv: Sequence[str]
    arguments: Sequence[str] = ()


class Outcome(NamedTuple):
    """What a command came to.

    Args:
        record: The result, which `--json` writes and `--plot` draws.
        text: To be printed, of rich or plain; None prints the record.
        problems: To be printed as errors, below warnings.
        is_bad: Whether it ends with status 1.
    """

    record: Any
    text: Any = None
    problems: Sequence[str] = ()
    is_bad: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of `tfamp`, with `--help` and `--json` beside its own flags.

    Args:
        name: The word after "tfamp".
        purpose: For `--help`: what it does, and its exit status.
        work: Does it, given the call.
        flags: Its own flags.
        argument: What the one argument without a flag stands for, such as
            "module:build"; None where there is none. One that ends with "..." may be
            given several times.
        interrupted: What is said after Ctrl-C.
    """

    name: str
    purpose: str
    work: Callable[[Call], Outcome]
    flags: Sequence[Flag] = ()
    argument: str | None = None
    interrupted: str = "stopped"

    def main(self, argv: Sequence[str]) -> int:
        """Runs the command and returns its exit status.

        Args:
            argv: The arguments after the command's name.
        """
        call = self._parse(argv)
        if isinstance(call, int):
            return call
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                outcome = self.work(call)
                _write(call.values, outcome)
        except UsageError as error:
            return self._refuse(str(error))
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

    def _parse(self, argv: Sequence[str]) -> Call | int:
        """Returns the call, or the status to end with, all being printed.

        Flags may be typed with dashes, too. They are values of their own, so that two
        commands may share a name and a second call starts from the defaults.
        """
        values = flags.FlagValues()
        own = (_HELP, JSON, *self.flags)
        for flag in own:
            flag.define(values)
        try:
            rest = values([self.name, *map(_underscored, argv)])[1:]
        except flags.Error as error:
            return self._refuse(str(error).rstrip(" ?."))
        if values["help"].value:
            place = "" if self.argument is None else f" {self.argument}"
            print(f"usage: tfamp {self.name}{place} [flags]\n")
            print(f"{_wrapped(self.purpose)}\n\n{_describe(values)}")
            return 0
        expected = "flags only"
        if self.argument is not None:
            expected = f"one {self.argument!r} and flags"
        is_several = self.argument is not None and self.argument.endswith("...")
        if is_several:
            expected = f"{self.argument!r} and flags"
        if len(rest) > (self.argument is not None) and not is_several:
            found = f"Unexpected argument {rest[-1]!r}"
            return self._refuse(f"{found}; expected {expected}")
        if self.argument is not None and not rest:
            return self._refuse(f"Nothing is named; expected {expected}")
        try:
            read = {flag.name: flag.value(values) for flag in own}
        except ValueError as error:
            return self._refuse(str(error))
        given = frozenset(name for name in read if values[name].present)
        return Call(rest[0] if rest else "", read, given, argv, tuple(rest))

    def _complain(self, text: object) -> None:
        print(f"tfamp {self.name}: {text}", file=sys.stderr)

    def _refuse(self, message: str) -> int:
        """Prints what is wrong with the call and returns the status for it."""
        self._complain(f"{message.rstrip('.')}. See `tfamp {self.name} --help`.")
        return WRONG_CALL


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


def _wrapped(text: str) -> str:
    """Returns a text in lines of a terminal's width; an empty line ends a paragraph."""
    return "\n\n".join(textwrap.fill(part, 80) for part in text.split("\n\n"))


def _describe(values: flags.FlagValues) -> str:
    """Returns a line for each flag, negations left out."""
    lines = []
    width = max(14, 2 + max(map(len, values)))
    for name in sorted(values):
        flag = values[name]
        if name == flag.name:
            short = f"-{flag.short_name}, " if flag.short_name else ""
            lines.append(f"  {short + '--' + name:<{width}} {flag.help}")
    return "\n".join(lines)
