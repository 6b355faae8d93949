"""The `tfamp` command: nine subcommands, read before TensorFlow is imported.

Each entry of `COMMANDS` is a subcommand: what it is for, an example, its flags, and
the function that does it, given what was read.
"""

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tfamp
from tfamp.cli import shown
from tfamp.records import checks
from tfamp.records.formats import POLICIES
from tfamp.records.units import parse_bytes
from tfamp.trials import targets
from tfamp.trials.variant import Variant

# 2 is the shell's convention for a command that was called wrongly, 130 for Ctrl-C.
FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130
_FAIL_ON = ("worse", "slower", "not_faster", "undecided", "failed")
_NOTES = """TARGET is one of
  script.py      a program as it is, run up to its first `fit`
  module:build   a function that returns a compiled model with its data: (model,
                 train) or (model, train, validation)
  model.keras    a saved model, with --data where data are needed"""
_STATUS = "Ends with status 0, 1 if it fails{}, 2 if called wrongly."
_GATED = f"{_NOTES}\n\n{_STATUS.format(' or --fail_on applies')}"
_VARIANTS = (
    "float32, mixed_bfloat16+xla, keras:mixed_float16 for stock Keras, plan.json"
)
_TARGET = "TARGET target - what to look at, see below"
_DATA = "--data module:function - returns what `fit` takes, if the target lacks it"
_JSON = "--json file - file that gets the result as JSON; - prints it, nothing else"
_OWN_POLICY = f"--policy policy - what to build under, else what it sets: {_VARIANTS}"


_USAGE = """usage: tfamp [--help] [--version] <command> [flags]

Mixed precision for Keras 3 on TensorFlow that is fast where it can be.

{}

example:
  tfamp run train.py --policy=auto    # an unchanged program, faster

Policies: {}.
`tfamp <command> --help` lists the flags of a command."""


class Command(NamedTuple):
    """A subcommand; `work` is a module of this folder and its function.

    `flags` has a line each: name, kind of value (see `_KINDS`; "switch", or words with
    bars between), default (- for none), and what it is.
    """

    purpose: str
    example: str
    work: str
    flags: str
    notes: str = ""


COMMANDS = {
    "doctor": Command(
        "what is here: devices, versions, settings, the policy that suits, problems",
        *("tfamp doctor", "doctor:main"),
        "",
        _STATUS.format(" or something is broken"),
    ),
    "run": Command(
        "run an unchanged program under a policy",
        *("tfamp run train.py --policy=auto", "program:run"),
        f"""--policy policy_or_plan - {", ".join(POLICIES)}, measure, or plan.json \
(default: TFAMP_POLICY, else auto)
        -m text - a module, as `python -m` runs it""",
        "--policy may stand before the script or right behind it; all else behind it "
        "is the script's own. Its children find the policy in TFAMP_POLICY.",
    ),
    "check": Command(
        "what half precision would spoil in a model, and the remedy",
        *("tfamp check train.py", "commands:check"),
        f"""{_TARGET}
        {_OWN_POLICY}
        {_DATA}
        --fail_on error|warning error severity that ends the command with status 1""",
        _GATED,
    ),
    "compare": Command(
        "train under policies, and report what that changes",
        *("tfamp compare train.py --seeds=3 --epochs=2", "commands:compare"),
        f"""{_TARGET}
        --policies policies float32,auto what to compare, float32 among them
        --quick switch - only time a few steps of each policy, in this process
        --seeds count 3 runs of each policy
        --epochs count 1 passes over the data
        --tolerance number - loss of the metric that counts as none
        --metric text - what quality is judged by, else the first compiled one
        --better max|min - which way the metric is better, if its name leaves it open
        --out file - folder for report.html, report.json and the runs, else a new one
        --resume switch - go on with the runs in --out
        --fail_on words - end with status 1 if a policy is {", ".join(_FAIL_ON)}""",
        "`seed` and `epochs` are passed to functions that have arguments of these\n"
        f"names; seeds that a script sets are shifted.\n\n{_GATED}",
    ),
    "tune": Command(
        "find the layers that need float32 for a metric to stay",
        *("tfamp tune train.py --tolerance=0.005 --out=plan.json", "commands:tune"),
        f"""{_TARGET}
        --policy auto|mixed_float16|mixed_bfloat16 auto what the plan is for
        {_DATA}
        --metric text - a metric of Keras by name, else the loss
        --tolerance number 0.005 loss of the metric that counts as none: of accuracies \
as it is, of losses relative to float32
        --max_evaluations n>=2 12 plans to try at most
        --out file plan.json file that gets the plan""",
        f"{_NOTES}\n\nThe plan is for `tfamp run train.py --policy=plan.json`.",
    ),
    "memory": Command(
        "what a step will hold, and which batch fits",
        *("tfamp memory train.py --max_memory=16GB", "commands:memory"),
        f"""{_TARGET}
        --policy policy auto what to build under: {_VARIANTS}
        --batch_size count - examples of a step, else those of the data, or 32
        --max_memory size - memory there is, as 16GB; tells the largest batch that fits
        --measure switch - train two small sizes, and predict the whole process
        --find switch - search by trials for the batch that trains fastest
        --target_batch_size count - with --find: examples of one update
        --inference switch - of a step of `predict`""",
        _NOTES,
    ),
    "triage": Command(
        "why a step fails: data, model, rate or precision",
        *("tfamp triage train.py --batch=17", "commands:triage"),
        f"""{_TARGET}, or the folder of a failure's bundle
        {_OWN_POLICY}
        {_DATA}
        --bundle file - the folder of a failure's bundle; else a batch is taken
        --batch n>=0 0 which batch of the data, from 0""",
        _NOTES,
    ),
    "export": Command(
        "write a saved model for a runtime that only predicts",
        *("tfamp export model.keras --format=onnx --dtype=int8", "commands:export"),
        """TARGET target - a saved model, model.keras
        --out file - the new folder, else model/ beside model.keras
        --format auto|saved_model|litert|onnx|openvino auto what runs it
        --dtype float32|float16|bfloat16|int8|auto float32 what holds the weights
        --calibration module:function - returns inputs, for integers
        --validation module:function - returns (x, y) or a dataset to compare on
        --keep_float32 paths - paths of layers that stay in float32, commas between""",
    ),
    "serve": Command(
        "answer for exported models over HTTP, by the Open Inference Protocol",
        *("tfamp serve exported/ --port=8000", "serving:serve"),
        """PATH path - an exported folder, or several; name=path names the model
        --host text 127.0.0.1 address to listen at
        --port n>=0 8000 port to listen at; 0 takes a free one
        --token_file file - file with what requests have to bear as a token
        --threads count - threads of a run of a model, else all cores
        --max_batch_size count - examples in one run of a model
        --max_queue count 256 requests that may wait
        --max_body size 64MiB the largest request
        --max_json size 4MiB the largest JSON
        --max_connections count - connections at a time
        --timeout_seconds number 10 how long an answer may take""",
    ),
}


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise ValueError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return read


def _variant(text: str) -> str:
    return str(Variant.named(text, "--policy"))


def _enabled(text: str) -> str:
    if text.endswith(".json"):
        return os.path.abspath(_variant(text))
    return checks.choice("--policy", text, (*POLICIES, "measure"))


# Kind of a value, its name in the help -> what reads it, where that is not `str`.
_KINDS: dict[str, Callable[[str], Any]] = {
    "target": targets.checked,
    "number": float,
    "n>=0": _whole(0),
    "count": _whole(1),
    "n>=2": _whole(2),
    "size": lambda text: parse_bytes("SIZE", text),
    "policy": _variant,
    "policies": lambda text: [_variant(each) for each in text.split(",")],
    "policy_or_plan": _enabled,
    "words": lambda text: [
        checks.choice("--fail_on", word.replace("-", "_"), _FAIL_ON)
        for word in text.split(",")
    ],
    "paths": lambda text: text.split(","),
}


def _argument_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a reader of values whose errors argparse tells as they are."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


class _Parser(argparse.ArgumentParser):
    """Reads the flags of a command; what is wrong with them is one line."""

    def __init__(self, name: str) -> None:
        command = COMMANDS[name]
        super().__init__(
            prog=f"tfamp {name}",
            description=f"{command.purpose[:1].upper()}{command.purpose[1:]}.",
            epilog=f"example:\n  {command.example}\n\n{command.notes}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == "run":
            words = "tfamp run [--policy=POLICY]"
            self.usage = f"{words} script.py ...\n       {words} -m module ..."
        has_json = name not in ("run", "serve")
        for line in [*command.flags.splitlines(), *[_JSON] * has_json]:
            self._add(*line.split(None, 3))

    def _add(self, flag: str, kind: str, default: str, help: str) -> None:
        how: dict[str, Any] = {"help": help}
        if kind == "switch":
            how["action"] = "store_true"
        elif "|" in kind:
            how["choices"] = kind.split("|")
        else:
            read = _argument_type(_KINDS.get(kind, str))
            how |= {"metavar": kind.upper(), "type": read}
            how |= {"nargs": "+"} if flag == "PATH" else {}
        if default != "-":
            how |= {"default": default, "help": f"{help} (default: {default})"}
        if kind in ("words", "paths"):
            how["default"] = []
        flag = {"TARGET": "target", "PATH": "paths"}.get(flag, flag)
        self.add_argument(flag, **how)

    def error(self, message: str) -> Any:
        """Ends the command."""
        end = "" if message.endswith((".", "?")) else "."
        text = f"{self.prog}: {message}{end} See `{self.prog} --help`.\n"
        self.exit(WRONG_CALL, text)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns what was read; flags may have dashes for underscores, too."""
        argv = [
            re.sub(
                r"^--[\w-]+", lambda word: "--" + word[0][2:].replace("-", "_"), each
            )
            for each in argv
        ]
        read, unknown = self.parse_known_args(argv)
        if unknown:
            known = [flag for each in self._actions for flag in each.option_strings]
            self.error(_unknown(unknown[0].partition("=")[0], known))
        return read

    def read_run(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns what was read of `run`: what stands behind the program is its own."""
        own: list[str] = []
        rest = list(argv)
        while rest and rest[0].startswith("-") and "-m" not in own:
            end = 2 if rest[0] in ("--policy", "-m") else 1
            own += rest[:end]
            del rest[:end]
        is_module = "-m" in own
        # People look for it behind the program, too.
        behind = "" if is_module else " ".join(rest[1:2])
        if behind.startswith("--policy") and not "".join(own).startswith("--policy"):
            end = 2 if "=" in behind else 3
            own += rest[1:end]
            del rest[1:end]
        read = self.parse_args(own)
        if not (rest or is_module):
            self.error("no program is named; expected script.py, or -m module")
        if not (is_module or os.path.exists(rest[0])):
            self.error(f"there is no file {rest[0]!r}; expected a script")
        read.program = rest
        return read


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line, by default that of this process; returns its exit status.

    It is that of the subcommand, 1 if that fails, 2 for a call that makes no sense.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, *rest = arguments or ("",)
    if name in ("-h", "--help", "help", ""):
        lines = [f"  {name:<9}{each.purpose}" for name, each in COMMANDS.items()]
        usage = _USAGE.format("\n".join(lines), ", ".join(POLICIES))
        print(usage, file=sys.stdout if name else sys.stderr)
        return 0 if name else WRONG_CALL
    if name in ("-V", "--version"):
        print(f"tfamp {tfamp.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"tfamp: {_unknown(name, COMMANDS)} See `tfamp --help`.", file=sys.stderr)
        return WRONG_CALL
    parser = _Parser(name)
    try:
        read = parser.read_run(rest) if name == "run" else parser.read(rest)
    except SystemExit as stop:
        return int(stop.code or 0)
    # A program's own errors of TensorFlow are its own; all else is told by exceptions.
    level = "2" if name in ("run", "serve") else "3"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)

    def work() -> int:
        if name not in ("doctor", "serve"):
            _start_tensorflow()
        module, _, function = COMMANDS[name].work.partition(":")
        home = importlib.import_module(f"tfamp.cli.{module}")
        return int(getattr(home, function)(read))

    return work() if name == "run" else _done(name, read, rest, work)


def _start_tensorflow() -> None:
    """Imports TensorFlow without its notices, unless it fails."""
    log: list[str] = []
    try:
        with shown.held_back() as log:
            import tensorflow as tf

            tf.config.list_physical_devices()
    except BaseException:
        print("".join(log), file=sys.stderr)
        raise


def _done(
    name: str, read: argparse.Namespace, argv: Sequence[str], work: Callable[[], int]
) -> int:
    """Does a command; what it warns of comes after what it prints, each once."""

    def complain(text: object) -> None:
        print(f"tfamp {name}: {text}", file=sys.stderr)

    read.argv, read.complain = argv, complain
    known = (ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
    status = FAILED
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            status = work()
        except KeyboardInterrupt:
            complain("stopped")
            return INTERRUPTED
        except known as error:
            complain(error)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        complain(text)
    return status


def _unknown(name: str, options: Any) -> str:
    """Returns the message for a command or flag that there is none of."""
    what = "flag" if name.startswith("-") else "command or argument"
    guess = checks.did_you_mean(name, options)
    advice = f"; did you mean {guess!r}?" if guess else "."
    return f"Unknown {what} {name!r}{advice}"
