"""Runs an exported folder in a fresh process: `python -m ... folder inputs outputs`.

A file counts once a process that knows nothing of the model has loaded and run it:
exporters report success on files that no runtime can load.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tfamp.records.checks import short_error

_DEADLINE_SECONDS = 180
_MODULE = "tfamp.serving.runtimes.fresh_process"


def answers(folder: Path, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns what an exported folder answers in a fresh process.

    Raises:
        ValueError: It cannot be loaded or run there; the message says why.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch, "in.npz"), Path(scratch, "out.npz")
        _save(asked, inputs)
        paths = [path or os.getcwd() for path in sys.path]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        words = [sys.executable, "-m", _MODULE, str(folder), str(asked), str(answered)]
        try:
            done = subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_DEADLINE_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"The exported file gave no answer in {_DEADLINE_SECONDS} s in a fresh "
                "process. Export another format."
            ) from error
        if done.returncode:
            told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise ValueError(
                f"The exported file does not run in a fresh process: {told[-1]} Export "
                "another format."
            )
        with np.load(answered) as found:
            return {name: found[name] for name in found.files}


def main(folder: str, asked: str, answered: str) -> int:
    """Answers the inputs of one file in another."""
    from tfamp.serving.runtimes import manifest
    from tfamp.serving.runtimes.loader import open_model

    try:
        model = open_model(Path(folder), manifest.read(Path(folder)))
        with np.load(asked) as inputs:
            given = {name: inputs[name] for name in inputs.files}
        prepared = model.prepared(given)
        model.run({name: value[:1] for name, value in prepared.items()})
        outputs = model.run(prepared)  # of another batch than the first
        _save(Path(answered), outputs)
    except Exception as error:  # of whatever the runtime raises
        print(short_error(error), file=sys.stderr)
        return 1
    return 0


def _save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as files hold them without pickle: texts in place of objects."""
    plain: dict[str, Any] = {
        name: value.astype("S") if value.dtype == object else value
        for name, value in arrays.items()
    }
    np.savez(file, **plain)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
