"""Flags of one command: declared anew in each call, errors in one wording."""

import sys
from collections.abc import Sequence

from absl import flags

# The shell's convention for a command that was called wrongly.
EXIT_USAGE = 2


def new_flags() -> flags.FlagValues:
    """Returns flags of their own, so that two commands may share a name."""
    values = flags.FlagValues()
    flags.DEFINE_bool(
        "help", False, "Show this help and exit.", short_name="h", flag_values=values
    )
    return values


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


def _underscored(argument: str) -> str:
    """Returns `--fail-if=worse` as `--fail_if=worse`; values stay as they are."""
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
