"""Commands on what was saved: `tfamp freeze`, `export` and `serve`.

Nothing here loads TensorFlow before a command asks for it: a server of other runtimes
does without it.
"""

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import tfamp
from tfamp.cli.command import Call, Command, Flag, Outcome, UsageError, one_of
from tfamp.records.formats import HALF
from tfamp.records.record import TableRecord
from tfamp.records.units import format_bytes, parse_bytes
from tfamp.serving.exports.request import DTYPES, SCHEMES
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.trials import parcel


def _working(what: str) -> contextlib.AbstractContextManager[Any]:
    """Shows on a terminal that the command is at work, and takes it away again."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(what)


@dataclasses.dataclass(frozen=True)
class Frozen(TableRecord):
    """What `tfamp freeze` wrote: where, and how many weights and bytes it stores."""

    model: str
    path: str
    dtype: str
    num_lowered: int
    num_weights: int
    bytes_before: int
    bytes_after: int

    def table(self) -> str:
        """Returns two lines."""
        return (
            f"{self.num_lowered} of {self.num_weights} weights of {self.model!r} are "
            f"stored in {self.dtype} now, {format_bytes(self.bytes_after)} instead of "
            f"{format_bytes(self.bytes_before)}.\nModel: {self.path}"
        )


def _freeze(call: Call) -> Outcome:
    source, dtype = Path(call.argument), call.given["dtype"]
    target = Path(call.values["out"] or source.with_suffix(f".{dtype}.keras"))
    if target.suffix != ".keras":
        raise UsageError(f"`--out` is {str(target)!r}; expected a name with .keras")
    sys.path.insert(0, os.getcwd())
    with _working("Freezing the model"):
        model = tfamp.load_model(source)
        frozen = tfamp.freeze(model, dtype)
        frozen.save(target)
    from tfamp.keras_hooks.structure import bytes_of

    return Outcome(
        Frozen(
            *(model.name, str(target), dtype),
            num_lowered=sum(weight.dtype == dtype for weight in frozen.weights),
            num_weights=len(frozen.weights),
            bytes_before=bytes_of(model.weights),
            bytes_after=bytes_of(frozen.weights),
        )
    )


def _export(call: Call) -> Outcome:
    source = Path(call.argument)
    sys.path.insert(0, os.getcwd())  # where the model's classes and data may lie
    target = call.values["out"] or source.with_suffix("")
    given = dict(call.given)
    for name in ("calibration", "validation"):
        named = call.values[name]
        given[name] = None if named is None else parcel.load(named)()
    return Outcome(tfamp.export(tfamp.load_model(source), target, **given))


_FREEZE = Command(
    "freeze",
    "tfamp.freeze",
    _freeze,
    (
        Flag("dtype", one_of(*HALF), "bfloat16", "What weights are stored in."),
        Flag(
            "out", "string", None, "The new file; else model.<dtype>.keras beside it."
        ),
    ),
    without=("sample", "in_place"),
    purpose="Reads a model that was saved as a .keras file, and writes one for "
    "inference that stores its weights in half precision: the same outputs as under "
    "the mixed policy, half the memory, no training.",
    argument="model.keras",
)
_DATA = "module:function that returns {}, as `tfamp.export` takes them."
_EXPORT = Command(
    "export",
    "tfamp.export",
    _export,
    (
        Flag("out", "string", None, "The new folder; else model/ beside model.keras."),
        Flag("format", one_of("auto", *RUNTIMES), "auto", "What runs it."),
        Flag("dtype", one_of(*DTYPES, "auto"), "float32", "What holds the weights."),
        Flag(
            *("scheme", one_of(*SCHEMES), None),
            "What integers are for: weights, or activations too, dynamic or static.",
        ),
        Flag(
            *("calibration", "string", None),
            _DATA.format("inputs for static integers"),
        ),
        Flag(
            *("validation", "string", None),
            _DATA.format("(x, y) or a dataset to compare on"),
        ),
        Flag("keep_float32", "list", [], "Paths of layers that stay in float32."),
    ),
    without=("calibration", "validation", "metric"),
    purpose="Reads a model that was saved as a .keras file, and writes it for a "
    "runtime that only predicts: smaller, faster, and compared with float32. A folder "
    "that something else is in, and one where the export is worse, stay as they are.",
    argument="model.keras",
)
_STATUS = "Ends with status 0 if done, 1 if not, 2 if called wrongly."


def _serve(call: Call) -> Outcome:
    from tfamp.serving.server.main import serve

    def say(address: str) -> None:
        print(f"Serving at {address}; Ctrl-C or SIGTERM ends it.", flush=True)

    return Outcome(serve(call.arguments, on_start=say, **call.given))


SERVE = Command(
    "serve",
    "tfamp.serving.server.main.serve",
    _serve,
    (
        Flag("port", "integer", 8000, "Port to listen at; 0 takes a free one."),
        Flag(
            "max_body", parse_bytes, 64 * 2**20, "The largest request, such as 64MiB."
        ),
        Flag(
            *("max_json", parse_bytes, 4 * 2**20),
            "The largest JSON, such as 4MiB; tensors may come as bytes behind it.",
        ),
    ),
    without=("load", "on_start"),
    purpose="Answers for models that `tfamp.export` wrote, over HTTP, by the Open "
    "Inference Protocol v2, as Triton and KServe do, at /v2/models/NAME/infer. A path "
    "is an exported folder, or one of several; name=path names the model. Metrics for "
    "Prometheus are at /metrics.",
    more=_STATUS,
    argument="path...",
)
_ALL = (_FREEZE, _EXPORT, SERVE)
COMMANDS = {command.name: command for command in _ALL}
