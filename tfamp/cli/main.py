"""The `tfamp` command: finds the subcommand, imports it and hands over.

`tfamp --help`, `tfamp --version` and a misspelt command load nothing heavy.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import tfamp
from tfamp.records import checks

_EXIT_USAGE = 2


class _Command(NamedTuple):
    """A subcommand: the module whose `main(argv) -> int` runs it, and its purpose."""

    module: str
    purpose: str


_COMMANDS = {
    "compare": _Command(
        "tfamp.cli.compare",
        "train under float32 and under policies, and report what that changes",
    ),
    "prove": _Command(
        "tfamp.cli.prove",
        "show which dtype a step computes in, and why it is not faster",
    ),
    "lint": _Command(
        "tfamp.cli.lint",
        "show what half precision would spoil in a model, and the remedy",
    ),
    "memory": _Command(
        "tfamp.cli.memory",
        "tell what a step will hold in memory, and the largest batch that fits",
    ),
    "replay": _Command(
        "tfamp.cli.replay",
        "repeat the failed step of a bundle, and say why it failed",
    ),
    "doctor": _Command(
        "tfamp.cli.doctor",
        "show devices, versions, settings, the policy that suits, and problems",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments after the program's name, by default those of this
            process.

    Returns:
        The exit status: that of the subcommand, or 2 for a call that cannot be
        understood.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        tfamp ...
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_usage(), file=sys.stderr)
        return _EXIT_USAGE
    name, *rest = arguments
    if name in ("-h", "--help", "-help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version", "-version"):
        print(f"tfamp {tfamp.__version__}")
        return 0
    if name not in _COMMANDS:
        print(f"tfamp: {_unknown(name)}", file=sys.stderr)
        return _EXIT_USAGE
    module = importlib.import_module(_COMMANDS[name].module)
    status: int = module.main(rest)
    return status


def _usage() -> str:
    """Returns the help, with a line for each command."""
    lines = [
        "usage: tfamp [--help] [--version] <command> [flags]",
        "",
        "Mixed precision for Keras 3 on TensorFlow that is fast where it can be.",
        "",
        "commands:",
        *(f"  {name:<8} {command.purpose}" for name, command in _COMMANDS.items()),
        "",
        "`tfamp <command> --help` lists the flags of a command.",
    ]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    """Returns the message for a command or flag that doesn't exist."""
    what = "flag" if name.startswith("-") else "command"
    options = ("--help", "--version") if what == "flag" else tuple(_COMMANDS)
    guess = checks.did_you_mean(name, options)
    advice = f"Did you mean {guess!r}? " if guess else ""
    expected = ", ".join(repr(option) for option in options)
    return f"Unknown {what} {name!r}; expected {expected}. {advice}See `tfamp --help`."
