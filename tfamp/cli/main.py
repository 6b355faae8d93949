"""The `tfamp` command: nine subcommands, read before TensorFlow is imported.

Each line of `COMMANDS` is a subcommand: what it is for, an example, its flags, and
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
_HALF = ("mixed_float16", "mixed_bfloat16")
_FORMATS = ("auto", "saved_model", "litert", "onnx", "openvino")
_DTYPES = ("float32", "float16", "bfloat16", "int8", "auto")
_TARGET = """TARGET is one of
  script.py      a program as it is, run up to its first `fit`
  module:build   a function that returns a compiled model with its data: (model,
                 train) or (model, train, validation)
  model.keras    a saved model, with --data where data are needed"""
_STATUS = "Ends with status 0, 1 if it fails{}, 2 if called wrongly."


class Parser(argparse.ArgumentParser):
    """Reads the flags of a command; what is wrong with them is one line."""

    def error(self, message: str) -> Any:
        """Ends the command."""
        end = "" if message.endswith((".", "?")) else "."
        self.exit(
            WRONG_CALL, f"{self.prog}: {message}{end} See `{self.prog} --help`.\n"
        )

    def flag(self, name: str, help: str, **how: Any) -> None:
        """Adds a flag; its default is told in the help."""
        default = how.get("default")
        if default is not None and default is not False:
            shown = ",".join(default) if isinstance(default, list) else default
            help = f"{help} (default: {shown})"
        if "action" not in how and "choices" not in how:
            how.setdefault("metavar", name.strip("-").rpartition("_")[2].upper())
        self.add_argument(name, help=help, **how)

    def target(self, help: str = "what to look at, see below", **how: Any) -> None:
        """Adds the argument that names what a command is about."""
        self.add_argument(
            "target",
            metavar="TARGET",
            help=help,
            type=_argument_type(targets.checked),
            **how,
        )

    def policy(self, default: str | None = "auto", more: str = "") -> None:
        """Adds the flag of what is built under."""
        help = "what to build under: float32, mixed_bfloat16+xla, keras:mixed_float16 "
        help += f"for stock Keras, plan.json{more}"
        self.flag("--policy", help, type=_argument_type(_variant), default=default)

    def data(self) -> None:
        """Adds the flag that names data."""
        help = "function that returns what `fit` takes, where the target has no data"
        self.flag("--data", help, metavar="MODULE:FUNCTION")

    def size(self, name: str, help: str, **how: Any) -> None:
        """Adds a flag in bytes, or in units of them."""
        read = _argument_type(lambda text: parse_bytes(name, text))
        self.flag(name, f"{help}, such as 16GB", type=read, metavar="SIZE", **how)

    def count(self, name: str, help: str, least: int = 1, **how: Any) -> None:
        """Adds a flag that is a whole number."""

        def read(text: str) -> int:
            if not text.isdigit() or int(text) < least:
                raise ValueError(f"{text!r} is no whole number of at least {least}")
            return int(text)

        self.flag(name, help, type=_argument_type(read), metavar="N", **how)


def _argument_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a reader of values whose errors argparse tells as they are."""

    def reading(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reading


def _variant(text: str) -> str:
    return str(Variant.named(text, "--policy"))


def _variants(text: str) -> list[str]:
    return [_variant(word) for word in text.split(",")]


def _some_of(*options: str) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        words = text.replace("-", "_").split(",")
        return [checks.choice("--fail_on", word, options) for word in words]

    return _argument_type(read)


def _doctor(parser: Parser) -> None:
    parser.flag("--all", "show settings that are not set, too", action="store_true")


def _check(parser: Parser) -> None:
    parser.target()
    parser.policy(None, " (default: what the program sets)")
    parser.data()
    help = "severity that ends the command with status 1: error or warning"
    parser.flag("--fail_on", help, choices=("error", "warning"), default="error")


def _compare(parser: Parser) -> None:
    parser.target()
    help = "what to compare, float32 among them; as plan.json, mixed_bfloat16+xla"
    both = ["float32", "auto"]
    parser.flag("--policies", help, type=_argument_type(_variants), default=both)
    parser.flag(
        *("--quick", "only time a few steps of each policy, in this process"),
        action="store_true",
    )
    parser.count("--seeds", "runs of each policy", default=3)
    parser.count("--epochs", "passes over the data", default=1)
    parser.flag("--tolerance", "loss of the metric that counts as none", type=float)
    parser.flag("--metric", "what quality is judged by (default: the first compiled)")
    help = "which way the metric is better, where its name does not say"
    parser.flag("--better", help, choices=("max", "min"))
    parser.flag(
        "--out", "folder for report.html, report.json and the runs (default: a new one)"
    )
    parser.flag("--resume", "go on with the runs in --out", action="store_true")
    parser.flag("--timeout_seconds", "the most that a run may take", type=float)
    words = ("worse", "slower", "not_faster", "undecided", "failed")
    help = f"end with status 1 if a policy is one of {', '.join(words)}"
    parser.flag("--fail_on", help, type=_some_of(*words), default=[])


def _tune(parser: Parser) -> None:
    parser.target()
    parser.flag(
        *("--policy", "what the plan is for"),
        choices=("auto", *_HALF),
        default="auto",
    )
    parser.data()
    parser.flag("--metric", "a metric of Keras by name (default: the loss)")
    help = "loss of the metric that counts as none: of accuracies as it is, of losses "
    help += "relative to float32"
    parser.flag("--tolerance", help, type=float, default=0.005)
    parser.count("--max_evaluations", "plans to try at most", 2, default=12)
    parser.flag("--out", "file that gets the plan", default="plan.json")


def _memory(parser: Parser) -> None:
    parser.target()
    parser.policy()
    parser.count("--batch_size", "examples of a step (default: of the data, else 32)")
    parser.size("--max_memory", "memory there is; tells the largest batch that fits")
    help = "train two small sizes in fresh processes, and predict the whole process"
    parser.flag("--measure", help, action="store_true")
    help = "search for the batch that trains fastest, by trials in fresh processes"
    parser.flag("--find", help, action="store_true")
    help = "with --find: examples of one update, in as many steps as it takes"
    parser.count("--target_batch_size", help)
    parser.flag("--inference", "of a step of `predict`", action="store_true")
    parser.count(
        "--sequence_length", "what stands for sizes that the model leaves open"
    )


def _triage(parser: Parser) -> None:
    parser.target("what to look at, see below, or the folder of a failure's bundle")
    parser.policy(None, " (default: what the program sets)")
    parser.data()
    parser.flag("--bundle", "the folder of a failure's bundle; else a batch is taken")
    parser.count("--batch", "which batch of the data, from 0", 0, default=0)


def _export(parser: Parser) -> None:
    parser.target("a saved model, model.keras")
    parser.flag("--out", "the new folder (default: model/ beside model.keras)")
    parser.flag("--format", "what runs it", choices=_FORMATS, default="auto")
    help = "what holds the weights"
    parser.flag("--dtype", help, choices=_DTYPES, default="float32")
    where = {"metavar": "MODULE:FUNCTION"}
    parser.flag("--calibration", "function that returns inputs, for integers", **where)
    help = "function that returns (x, y) or a dataset to compare on"
    parser.flag("--validation", help, **where)
    help = "paths of layers that stay in float32, with commas between"
    parser.flag("--keep_float32", help, type=lambda text: text.split(","), default=[])


def _serve(parser: Parser) -> None:
    help = "an exported folder, or one of several; name=path names the model"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=help)
    parser.flag("--host", "address to listen at", default="127.0.0.1")
    parser.count("--port", "port to listen at; 0 takes a free one", 0, default=8000)
    parser.flag("--token_file", "file with what requests have to bear as a token")
    parser.count("--threads", "threads of a run of a model (default: all cores)")
    parser.count("--max_batch_size", "examples in one run of a model")
    parser.count("--max_queue", "requests that may wait", default=256)
    parser.size("--max_body", "the largest request", default=64 * 2**20)
    parser.size("--max_json", "the largest JSON", default=4 * 2**20)
    parser.count("--max_connections", "connections at a time")
    help = "how long an answer may take"
    parser.flag("--timeout_seconds", help, type=float, default=10.0)


def _run(parser: Parser) -> None:
    parser.usage = (
        "tfamp run [--policy=POLICY] script.py ...\n"
        "       tfamp run [--policy=POLICY] -m module ..."
    )
    help = f"{', '.join(POLICIES)}, measure, or the file of a plan, plan.json "
    help += "(default: TFAMP_POLICY, else auto)"
    parser.flag("--policy", help, type=_argument_type(_enabled))
    help = "a module, as `python -m` runs it"
    parser.add_argument("-m", dest="module", metavar="module", help=help)


def _enabled(text: str) -> str:
    if text.endswith(".json"):
        return os.path.abspath(_variant(text))
    return checks.choice("--policy", text, (*POLICIES, "measure"))


class _Command(NamedTuple):
    """A subcommand; `work` is a module of this folder and its function."""

    purpose: str
    example: str
    add: Callable[[Parser], None]
    work: str
    notes: str = ""


_GATED = _STATUS.format(" or --fail_on applies")
COMMANDS = {
    "doctor": _Command(
        "what is here: devices, versions, settings, the policy that suits, problems",
        "tfamp doctor",
        _doctor,
        "doctor:main",
        _STATUS.format(" or something is broken"),
    ),
    "run": _Command(
        "run an unchanged program under a policy",
        "tfamp run train.py --policy=auto",
        _run,
        "program:run",
        "--policy may stand before the script or right behind it; all else behind it "
        "is the script's own. Its children find the policy in TFAMP_POLICY.",
    ),
    "check": _Command(
        "what half precision would spoil in a model, and the remedy",
        "tfamp check train.py",
        _check,
        "commands:check",
        f"{_TARGET}\n\n{_GATED}",
    ),
    "compare": _Command(
        "train under policies, and report what that changes",
        "tfamp compare train.py --seeds=3 --epochs=2",
        _compare,
        "commands:compare",
        f"{_TARGET}\n\n`seed` and `epochs` are passed to functions that have arguments "
        f"of these\nnames; seeds that a script sets are shifted.\n\n{_GATED}",
    ),
    "tune": _Command(
        "find the layers that need float32 for a metric to stay",
        "tfamp tune train.py --tolerance=0.005 --out=plan.json",
        _tune,
        "commands:tune",
        f"{_TARGET}\n\nThe plan is for `tfamp run train.py --policy=plan.json`.",
    ),
    "memory": _Command(
        "what a step will hold, and which batch fits",
        "tfamp memory train.py --max_memory=16GB",
        _memory,
        "commands:memory",
        _TARGET,
    ),
    "triage": _Command(
        "why a step fails: data, model, rate or precision",
        "tfamp triage train.py --batch=17",
        _triage,
        "commands:triage",
        _TARGET,
    ),
    "export": _Command(
        "write a saved model for a runtime that only predicts",
        "tfamp export model.keras --format=onnx --dtype=int8",
        _export,
        "commands:export",
    ),
    "serve": _Command(
        "answer for exported models over HTTP, by the Open Inference Protocol",
        "tfamp serve exported/ --port=8000",
        _serve,
        "commands:serve",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: The arguments after the program's name, by default those of this
            process.

    Returns:
        The exit status: that of the subcommand, 1 if it fails, 2 for a call that
        cannot be understood.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        tfamp ...
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    name, *rest = arguments or ("",)
    if name in ("-h", "--help", "help", ""):
        print(_usage(), file=sys.stdout if name else sys.stderr)
        return 0 if name else WRONG_CALL
    if name in ("-V", "--version"):
        print(f"tfamp {tfamp.__version__}")
        return 0
    if name not in COMMANDS:
        print(f"tfamp: {_unknown(name, COMMANDS)} See `tfamp --help`.", file=sys.stderr)
        return WRONG_CALL
    try:
        read = (_read_run if name == "run" else _read)(_parser(name), rest)
    except SystemExit as stop:
        return int(stop.code or 0)
    if name == "run":  # a program's errors are its own
        _start_tensorflow()
        return int(_work(name)(read))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return _done(name, read, rest)


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


def _parser(name: str) -> Parser:
    command = COMMANDS[name]
    parser = Parser(
        prog=f"tfamp {name}",
        description=f"{command.purpose[:1].upper()}{command.purpose[1:]}.",
        epilog=f"example:\n  {command.example}\n\n{command.notes}".rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add(parser)
    if name not in ("run", "serve"):
        help = "file that gets the result as JSON; - prints it, and nothing else"
        parser.flag("--json", help, metavar="FILE")
    return parser


def _read_run(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns what was read of `run`: what stands behind the program is its own."""
    own: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and "-m" not in own:
        is_pair = rest[0] in ("--policy", "-m")
        own += rest[: 1 + is_pair]
        del rest[: 1 + is_pair]
    read = parser.parse_args(own)
    if read.module is None:
        # People look for it behind the program, too.
        if read.policy is None and rest[1:] and rest[1].startswith("--policy"):
            end = 2 if "=" in rest[1] else 3
            read = parser.parse_args(rest[1:end])
            del rest[1:end]
        if not rest:
            parser.error("no program is named; expected script.py, or -m module")
        if not os.path.exists(rest[0]):
            parser.error(f"there is no file {rest[0]!r}; expected a script")
    read.program = rest
    return read


def _read(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns what was read; flags may be typed with dashes for underscores, too."""
    argv = [
        re.sub(r"^--[\w-]+", lambda word: "--" + word[0][2:].replace("-", "_"), each)
        for each in argv
    ]
    read, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        parser.error(_unknown(unknown[0].partition("=")[0], known))
    return read


def _work(name: str) -> Callable[[Any], int]:
    module, _, function = COMMANDS[name].work.partition(":")
    found: Callable[[Any], int] = getattr(
        importlib.import_module(f"tfamp.cli.{module}"), function
    )
    return found


def _done(name: str, read: argparse.Namespace, argv: Sequence[str]) -> int:
    """Does a command; what it warns of comes after what it prints, each once."""

    def complain(text: object) -> None:
        print(f"tfamp {name}: {text}", file=sys.stderr)

    read.argv, read.complain = argv, complain
    status = FAILED
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            if name not in ("doctor", "serve"):
                _start_tensorflow()
            status = _work(name)(read)
        except KeyboardInterrupt:
            complain("stopped")
            return INTERRUPTED
        except (
            *(ImportError, MemoryError, OSError),
            *(RuntimeError, TypeError, ValueError),
        ) as error:
            complain(error)
    for text in dict.fromkeys(str(warning.message) for warning in caught):
        complain(text)
    return status


def _usage() -> str:
    """Returns the help, with a line for each command."""
    lines = [f"  {name:<9}{command.purpose}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: tfamp [--help] [--version] <command> [flags]",
            "",
            "Mixed precision for Keras 3 on TensorFlow that is fast where it can be.",
            "",
            *lines,
            "",
            "example:",
            "  tfamp run train.py --policy=auto    # an unchanged program, faster",
            "",
            f"Policies: {', '.join(POLICIES)}.",
            "`tfamp <command> --help` lists the flags of a command.",
        ]
    )


def _unknown(name: str, options: Any) -> str:
    """Returns the message for a command or flag that there is none of."""
    what = "flag" if name.startswith("-") else "command or argument"
    guess = checks.did_you_mean(name, options)
    advice = f"; did you mean {guess!r}?" if guess else "."
    return f"Unknown {what} {name!r}{advice}"
