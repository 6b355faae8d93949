"""The program of a fresh process: loads an exported model and answers once.

It imports what a program that only predicts does, so that memory and cold start are
those of such a program.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tfamp
from tfamp.machine.limits import sizes_in

ANSWERED = "answered"


def main(arguments: Sequence[str]) -> None:
    """Prints when it answered, by the system's monotonic clock, and the peak in bytes.

    Args:
        arguments: What to load, and a file of NumPy's with one example.
    """
    path, given = arguments
    loaded = tfamp.load_exported(path)
    with np.load(given, allow_pickle=False) as file:
        loaded.predict(dict(file))
    answered = time.monotonic()
    print(ANSWERED, answered, peak_bytes())


def peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """Returns the most memory that this process held."""
    peak = sizes_in(status).get("VmHWM")
    if peak is None:
        import resource

        # Source: getrusage(2): kilobytes on Linux and BSD, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        peak = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak


if __name__ == "__main__":
    main(sys.argv[1:])
