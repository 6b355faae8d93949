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
    values: flags.FlagValues, argv: Sequence[str], *, command: str, purpose: str
) -> int | None:
    """Parses a command's arguments, none of which stands without a flag.

    Args:
        values: From `new_flags`, with the command's own flags added.
        argv: The arguments after the command's name.
        command: The command as it is typed, such as "tfamp doctor".
        purpose: One line for the help.

    Returns:
        None to go on, or the status to end with, everything being printed.
    """
    try:
        rest = values([command, *argv])[1:]
    except flags.Error as error:
        return _refuse(str(error).rstrip(" ?."), command)
    if values["help"].value:
        print(f"usage: {command} [flags]\n\n{purpose}\n")
        print(_describe(values))
        return 0
    if rest:
        return _refuse(f"Unexpected argument {rest[0]!r}; expected flags only", command)
    return None


def _refuse(message: str, command: str) -> int:
    """Prints what is wrong with the call and returns the status for it."""
    print(f"{command}: {message}. See `{command} --help`.", file=sys.stderr)
    return EXIT_USAGE


def _describe(values: flags.FlagValues) -> str:
    """Returns a line for each flag, negations left out."""
    lines = []
    for name in sorted(values):
        flag = values[name]
        if name == flag.name:
            short = f"-{flag.short_name}, " if flag.short_name else ""
            lines.append(f"  {short + '--' + name:<14} {flag.help}")
    return "\n".join(lines)
