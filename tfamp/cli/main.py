"""The `tfamp` command: finds the subcommand, imports it and hands over.

`tfamp --help`, `tfamp --version` and a misspelt command load nothing heavy.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import tfamp
from tfamp.records import checks

_WRONG_CALL = 2
# When one asks -> command -> the module of this folder that has it, and its purpose.
_GROUPS = {
    "check a machine": {
        "doctor": (
            *("doctor", "devices, versions, settings, the policy that suits, problems"),
        ),
    },
    "before training": {
        "check": ("tools", "what would go wrong with the data in a compute dtype"),
        "lint": ("tools", "what half precision would spoil in a model, and the remedy"),
        "assignment": ("tools", "the dtype of each layer, and the rule behind it"),
        "prove": ("tools", "which dtype a step computes in, and why it is not faster"),
        "ranges": ("tools", "magnitudes of weights, activations and gradients"),
        "sensitivity": ("tools", "which layers have to stay in float32"),
        "measure": (
            "trainings",
            "the fastest policy here, by timing the model's own step",
        ),
        "tune": ("trainings", "the layers that need float32 for a metric to stay"),
        "memory": ("memory", "what a step will hold, and the largest batch that fits"),
        "find_batch_size": ("memory", "the batch that trains fastest, by trials"),
        "bottleneck": ("tools", "whether the input or the model holds training up"),
        "lr_find": ("tools", "a learning rate, by steps at rates that grow"),
    },
    "comparing": {
        "compare": ("trainings", "train under policies, and report what that changes"),
    },
    "after trouble": {
        "triage": ("tools", "why a step fails: data, model, rate or precision"),
    },
    "leaving": {
        "freeze": ("saved", "store a model's weights in half precision, to predict"),
        "export": ("saved", "write a model for a runtime that only predicts"),
    },
    "serving": {
        "serve": ("saved", "answer for exported models over HTTP"),
    },
}
# The names of the functions that `tfamp memory` and `measure` ask.
_MODULES = {
    "estimate_memory": "memory",
    "measure_policies": "trainings",
} | {name: module for group in _GROUPS.values() for name, (module, _) in group.items()}


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
        return _WRONG_CALL
    name, *rest = arguments
    if name in ("-h", "--help", "-help", "help"):
        print(_usage())
        return 0
    if name in ("-V", "--version", "-version"):
        print(f"tfamp {tfamp.__version__}")
        return 0
    known = name.replace("-", "_")
    if known not in _MODULES:
        print(f"tfamp: {_unknown(name)}", file=sys.stderr)
        return _WRONG_CALL
    # TensorFlow reads it when it is imported; its notices are of no help here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    module = importlib.import_module(f"tfamp.cli.{_MODULES[known]}")
    status: int = module.COMMANDS[known].main(rest)
    return status


def _usage() -> str:
    """Returns the help, with a line for each command."""
    lines = [
        "usage: tfamp [--help] [--version] <command> [flags]",
        "",
        "Mixed precision for Keras 3 on TensorFlow that is fast where it can be.",
    ]
    for group, commands in _GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<16} {what}" for name, (_, what) in commands.items()]
    lines += ["", "`tfamp <command> --help` lists the flags of a command."]
    return "\n".join(lines)


def _unknown(name: str) -> str:
    """Returns the message for a command or flag that doesn't exist."""
    what = "flag" if name.startswith("-") else "command"
    options = ("--help", "--version") if what == "flag" else tuple(_MODULES)
    guess = checks.did_you_mean(name, options)
    advice = f"Did you mean {guess!r}? " if guess else ""
    expected = ", ".join(repr(option) for option in options)
    return f"Unknown {what} {name!r}; expected {expected}. {advice}See `tfamp --help`."
