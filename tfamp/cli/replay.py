"""`tfamp replay`: reproduces the failing step of a bundle, and says why it failed."""

import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfamp.cli import _flags

_PURPOSE = """\
Reproduces the failing step of a bundle that `tfamp.callbacks.FlightRecorder` wrote: the
model is rebuilt with the state from before the failure and trains on the kept batches
as it did. Compares every bit, and says why the step failed.

Ends with status 0 if the failure was reproduced, 1 if not or if it cannot be told, 2
if called wrongly."""
_RECORD = "bundle.json"
# Variables that TensorFlow reads when it is imported, and nothing else.
_PREFIXES = ("ONEDNN_", "DNNL_", "XLA_", "TF_", "OMP_", "NVIDIA_TF32_")


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "replay".

    Returns:
        The exit status, as the help says.
    """
    values = _define()

    def work(path: str) -> _flags.Outcome:
        with _flags.reading():
            if values.build is not None and not all(values.build.partition(":")):
                build = values.build
                raise ValueError(f"`--build` is {build!r}; expected 'module:function'")
        _take_environment(Path(path))
        sys.path.insert(0, os.getcwd())  # where the model's classes may lie
        from tfamp.numerics.triage.bundle_replay import replay

        with _working():
            replayed = replay(path, build=values.build, explain=values.triage)
        _flags.write(values, replayed)
        return _flags.Outcome(replayed.table(), is_bad=not replayed.is_reproduced)

    return _flags.run(
        argv,
        values,
        work,
        command="tfamp replay",
        purpose=_PURPOSE,
        argument="bundle",
    )


def _working() -> contextlib.AbstractContextManager[Any]:
    """Shows on a terminal that the command is at work, and takes it away again."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("Replaying the failing step")


def _take_environment(folder: Path) -> None:
    """Sets the variables of the bundle that decide which kernels compute.

    What is set here already stands. A bundle that cannot be read is told later.
    """
    try:
        text = (folder / _RECORD).read_text(encoding="utf-8")
        named = json.loads(text)["surroundings"]["environment"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for name, value in named:
        if name.startswith(_PREFIXES) and isinstance(value, str):
            os.environ.setdefault(name, value)


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add(
        "string",
        "build",
        None,
        "module:function that returns the compiled model, where the bundle has none.",
    )
    add("string", "json", None, _flags.JSON)
    add("bool", "triage", True, "Say why the step failed.")
    return values
