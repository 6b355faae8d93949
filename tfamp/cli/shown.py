"""How a result reaches the terminal, or a file."""

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# Of characters that draw tables, what stands for them on a terminal of ASCII.
_LINES = {"[─━═]": "-", "[│┃║]": "|", "[\u2500-\u257f]": "+"}


def show(read: argparse.Namespace, record: Any, text: str | None = None) -> None:
    """Prints a result, or writes it to where --json says."""
    if read.json == "-":
        print(record.to_json())
        return
    if read.json is not None:
        record.to_json(read.json)
    text = str(record) if text is None else text
    if "utf" not in (sys.stdout.encoding or "utf").lower():
        for pattern, plain in _LINES.items():
            text = re.sub(pattern, plain, text)
        text = text.encode(sys.stdout.encoding, "replace").decode(sys.stdout.encoding)
    print(text)


@contextlib.contextmanager
def held_back() -> Iterator[list[str]]:
    """Keeps what is written to the error stream, also by C++, out of the tables.

    TensorFlow's first notices heed no log level. On leaving, the list holds the text.
    """
    log: list[str] = []
    try:
        saved = os.dup(2)
    except OSError:
        # There is no error stream.
        yield log
        return
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield log
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            if text := file.read().decode(errors="replace").strip():
                log.append(text)
