"""What every benchmark states of itself, and how its figures leave it."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

# glibc gives blocks of at least so many bytes back when they are freed, and so a peak
# of the resident memory is one of what is in use, as with a GPU's allocator. The one
# that TensorFlow has for oneDNN gives nothing back, so it is left out.
FREED_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1",
}


def versions() -> dict[str, str]:
    """Returns the versions that figures depend on."""
    import keras
    import tensorflow as tf

    import tfamp

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "tfamp": tfamp.__version__,
    }


def in_a_process(script: str, side: dict[str, Any], **environment: str) -> Any:
    """Returns the last line of a script that measures one side in a fresh process.

    Args:
        script: Its file; it takes the side as JSON by `--side`.
        side: What to measure.
        **environment: Variables beside those that are set.
    """
    root = str(Path(__file__).resolve().parents[1])
    completed = subprocess.run(
        [sys.executable, script, f"--side={json.dumps(side)}"],
        env={**os.environ, **environment, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    if completed.returncode:
        raise RuntimeError(completed.stderr)
    return json.loads(completed.stdout.splitlines()[-1])


def finish(result: dict[str, Any], path: str) -> None:
    """Writes figures to a file, unless `path` is "", and prints them as a last line."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
