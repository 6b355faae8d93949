"""What every benchmark states of itself, and how its figures leave it."""

import json
import platform
from pathlib import Path
from typing import Any


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


def finish(result: dict[str, Any], path: str) -> None:
    """Writes figures to a file, unless `path` is "", and prints them as a last line."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
