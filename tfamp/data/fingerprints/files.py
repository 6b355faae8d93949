"""The files whose names stand in texts."""

import os
from collections.abc import Iterable

from tfamp.data.fingerprints.walk import Files

# Linux allows no longer path; a text beyond it names no file.
_MAX_LENGTH = 4096


def files_named(texts: Iterable[str | bytes]) -> Files:
    """Returns path, bytes and nanoseconds of the last change of each file named.

    Texts may be anything; folders are looked up once, so that most texts, which name
    no file, cost little.
    """
    is_folder: dict[str, bool] = {}
    found = {}
    for text in texts:
        path = os.fsdecode(text)
        if not path or len(path) > _MAX_LENGTH or "\0" in path or "\n" in path:
            continue
        folder = os.path.dirname(path)
        if folder not in is_folder:
            is_folder[folder] = os.path.isdir(folder or ".")
        if is_folder[folder] and path not in found and os.path.isfile(path):
            stat = os.stat(path)
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return Files(tuple((path, *stat) for path, stat in found.items()))
