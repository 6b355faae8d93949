"""`tfamp export`: writes a saved model for a runtime that only predicts."""

import os
import sys
from pathlib import Path
from typing import Any

import tfamp
from tfamp.cli._flags import Call, Command, Flag, Outcome, one_of
from tfamp.cli.tools import STATUS
from tfamp.records import checks
from tfamp.serving.exports.request import DTYPES, SCHEMES
from tfamp.serving.runtimes.manifest import RUNTIMES
from tfamp.trials import parcel

_DATA = "module:function that returns {}, as {} takes them."


def _paths(name: str, text: str) -> list[str]:
    """Reads the paths of layers, with commas between."""
    del name
    return [path for path in text.split(",") if path]


def _data(target: str | None) -> Any:
    return None if target is None else parcel.load(target)()


def _export(call: Call) -> Outcome:
    values = dict(call.values)
    source = Path(call.argument)
    for name in ("json", "help"):
        values.pop(name, None)
    sys.path.insert(0, os.getcwd())  # where the model's classes and data may lie
    target = values.pop("out") or source.with_suffix("")
    for name in ("calibration", "validation"):
        values[name] = _data(values[name])
    return Outcome(tfamp.export(tfamp.load_model(source), target, **values))


def _positive(name: str, text: str) -> float:
    return checks.positive(name, float(text))


EXPORT = Command(
    "export",
    "Reads a model that was saved as a .keras file, and writes it for a runtime that "
    "only predicts: smaller, faster, and compared with float32. A folder that "
    "something else is in, and one where the export is worse, stay as they are.\n\n"
    f"{STATUS}",
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
            _DATA.format("inputs for static integers", "`tfamp.export`"),
        ),
        Flag(
            *("validation", "string", None),
            _DATA.format("(x, y) or a dataset to compare on", "`tfamp.export`"),
        ),
        Flag("tolerance", "float", 0.005, "By how much the metric may be worse."),
        Flag("keep_float32", _paths, [], "Paths of layers that stay in float32."),
        Flag(
            *("batch_size", "integer", None, "Examples in the calls to be timed."),
            {"lower_bound": 1},
        ),
        Flag(
            *("budget_seconds", _positive, 120.0),
            "For writing and timing candidates of auto.",
        ),
        Flag("write_failed", "bool", False, "Write it even where it is worse."),
    ),
    "model.keras",
)
COMMANDS = {"export": EXPORT}
