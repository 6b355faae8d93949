"""Runs an exported folder in a fresh process: `python -m ... folder inputs outputs`.

A file counts once a process that knows nothing of the model has loaded and run it:
exporters report success on files that no runtime can load. The process imports what a
program that only predicts does, so that memory and cold start are those of such a one.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tfamp
from tfamp.records.checks import short_error

_DEADLINE_SECONDS = 180
_COST = ".cost"


class Answered(NamedTuple):
    """What a fresh process answered, and what that cost it."""

    outputs: dict[str, np.ndarray]
    seconds: float
    peak_bytes: int


def ask(folder: Path, inputs: Mapping[str, np.ndarray]) -> Answered:
    """Returns what an exported folder answers in a fresh process."""
    # Not above: the process that answers has no need of them.
    import subprocess
    import tempfile

    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory(prefix="tfamp-fresh-") as scratch:
        asked, answered = Path(scratch, "in.npz"), Path(scratch, "out.npz")
        _save(asked, inputs)
        began = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, *map(str, (folder, asked, answered))],
                env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=_DEADLINE_SECONDS,
                start_new_session=True,  # Ctrl-C is for this process, which ends it
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(
                f"The exported file gave no answer in {_DEADLINE_SECONDS} s in a fresh "
                "process. Export another format."
            ) from error
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            told = lines[-1] if lines else f"it ended with status {done.returncode}."
            raise ValueError(
                f"The exported file does not run in a fresh process: {told} Export "
                "another format."
            )
        ended, peak = answered.with_suffix(_COST).read_text().split()
        return Answered(_read(answered), float(ended) - began, int(peak))


def main(folder: str, asked: str, answered: str) -> int:
    """Answers the inputs of one file in another.

    Beside it is written when the first example was answered, by the system's monotonic
    clock, and the peak until then in bytes.
    """
    try:
        model = tfamp.load_exported(folder)
        prepared = model.prepared(_read(Path(asked)))
        model.run({name: value[:1] for name, value in prepared.items()})
        cost = f"{time.monotonic()} {_peak_bytes()}"
        Path(answered).with_suffix(_COST).write_text(cost)
        # Of another batch than the first.
        _save(Path(answered), model.run(prepared))
    except Exception as error:  # of whatever the runtime raises
        print(short_error(error), file=sys.stderr)
        return 1
    return 0


def _peak_bytes() -> int:
    """Returns the most memory that this process held."""
    from tfamp.machine.limits import sizes_in

    peak = sizes_in(Path("/proc/self/status")).get("VmHWM")
    if peak is None:  # on macOS, in bytes
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


def _save(file: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays as files hold them without pickle: texts in place of objects."""
    plain = [x.astype("S") if x.dtype == object else x for x in arrays.values()]
    np.savez(file, np.array(list(arrays)), *plain)  # a name may be that of an argument


def _read(file: Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `_save` wrote."""
    with np.load(file) as found:
        names, *arrays = (found[f"arr_{number}"] for number in range(len(found.files)))
    return dict(zip(names.tolist(), arrays, strict=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
