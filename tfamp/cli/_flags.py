"""What all commands share: flags, usage, warnings and errors in one wording."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from absl import flags

from tfamp.records.units import parse_bytes

# The shell's convention for a command that was called wrongly.
EXIT_FAILED, EXIT_USAGE = 1, 2
# What the flag of this name means in every command.
JSON = "File that gets the result as JSON; - prints it, and nothing else."


class Outcome(NamedTuple):
    """What a command came to.

    Args:
        text: To be printed.
        problems: To be printed as errors, below warnings.
        is_bad: Whether it ends with status 1.
    """

    text: str
    problems: Sequence[str] = ()
    is_bad: bool = False


def new_flags() -> flags.FlagValues:
    """Returns flags of their own, so that two commands may share a name."""
    values = flags.FlagValues()
    define(values, "bool", "help", False, "Show this help and exit.", short_name="h")
    return values


def define(values: flags.FlagValues, kind: str, *what: Any, **how: Any) -> None:
    """Adds a flag.

    Args:
        values: Where to.
        kind: As in the name of absl's `flags.DEFINE_...`.
        *what: As it takes it: name, default and help, of an "enum" choices between.
        **how: What it takes besides.
    """
    getattr(flags, f"DEFINE_{kind}")(*what, flag_values=values, **how)


def parse(
    values: flags.FlagValues,
    argv: Sequence[str],
    *,
    command: str,
    purpose: str,
    argument: str | None = None,
) -> int | str | None:
    """Parses a command's arguments; a flag may be typed with dashes or underscores.

    Args:
        values: From `new_flags`, with the command's own flags added.
        argv: The arguments after the command's name.
        command: The command as it is typed, such as "tfamp doctor".
        purpose: One line for the help.
        argument: What the one argument without a flag stands for, such as
            "module:build"; None where there is none.

    Returns:
        The status to end with, everything being printed; or to go on, the argument
        without a flag, or None where there is none.
    """
    try:
        rest = values([command, *map(_underscored, argv)])[1:]
    except flags.Error as error:
        return refuse(str(error).rstrip(" ?."), command)
    if values["help"].value:
        place = "" if argument is None else f" {argument}"
        print(f"usage: {command}{place} [flags]\n\n{purpose}\n")
        print(_describe(values))
        return 0
    expected = "flags only" if argument is None else f"one {argument!r} and flags"
    if len(rest) > (argument is not None):
        return refuse(f"Unexpected argument {rest[-1]!r}; expected {expected}", command)
    if argument is not None and not rest:
        return refuse(f"Nothing is named; expected {expected}", command)
    return rest[0] if rest else None


class UsageError(ValueError):
    """The command was called wrongly."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Takes a `ValueError` of the block for a call that was wrong."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error).rstrip(".")) from error


def run(
    argv: Sequence[str],
    values: flags.FlagValues,
    work: Callable[[str], Outcome],
    *,
    command: str,
    purpose: str,
    argument: str = "module:build",
) -> int:
    """Runs a command that takes one argument and says what it found.

    Args:
        argv: The arguments after the command's name.
        values: From `new_flags`, with the command's own flags added.
        work: Given the argument, does it.
        command: As for `parse`.
        purpose: Likewise.
        argument: Likewise.

    Returns:
        The exit status.
    """
    target = parse(values, argv, command=command, purpose=purpose, argument=argument)
    if not isinstance(target, str):
        return int(target or 0)
    # TensorFlow reads it when it is imported; its notices are of no help here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            outcome = work(target)
    except UsageError as error:
        return refuse(str(error), command)
    except (
        *(ImportError, MemoryError, OSError),
        *(RuntimeError, TypeError, ValueError),
    ) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    if "json" not in values or values.json != "-":
        print(outcome.text)
    said = dict.fromkeys(str(warning.message) for warning in caught)
    for text in (*said, *outcome.problems):
        print(f"{command}: {text}", file=sys.stderr)
    return EXIT_FAILED if outcome.is_bad else 0


def write(values: flags.FlagValues, found: Any) -> None:
    """Writes a result to the file of --json, where one is given; prints it for "-"."""
    if values.json == "-":
        print(found.to_json())
    elif values.json is not None:
        found.to_json(values.json)


def max_memory(values: flags.FlagValues) -> int | None:
    """Returns the bytes of --max_memory, None where it is not given.

    Raises:
        ValueError: It is no size.
    """
    if values.max_memory is None:
        return None
    return parse_bytes("--max_memory", values.max_memory)


def _underscored(argument: str) -> str:
    """Returns `--fail-on=worse` as `--fail_on=worse`; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}"


def refuse(message: str, command: str) -> int:
    """Prints what is wrong with the call and returns the status for it."""
    print(f"{command}: {message}. See `{command} --help`.", file=sys.stderr)
    return EXIT_USAGE


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
