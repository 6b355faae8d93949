"""Care for tf.data's file cache: leftovers of dead writers, and foreign contents.

tf.data writes `<path>.index` last, so a cache without it is unfinished, and it
leaves `<path>_0.lockfile` behind when its process is killed. That file names no
process. Beside it, therefore, every process that builds a pipeline on the cache
holds a shared `flock` on `<path>.tfamp`, which the system releases when the
process ends, however it ends. Whoever gets it exclusively is alone and may clear
what the dead left behind. The file itself says what the cache holds.
"""

import contextlib
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows has none: leftovers are reported, never removed.
    fcntl = None  # type: ignore[assignment]

# Open file descriptors by cache path; never closed, or the lock would be released.
_HELD: dict[str, int] = {}


def check_path(path: str | os.PathLike[str]) -> Path:
    """Returns the absolute path of a cache whose folder exists and can be written.

    Raises:
        ValueError: The folder is missing, cannot be written, or `path` is a folder.
    """
    absolute = Path(path).expanduser().absolute()
    if absolute.is_dir():
        raise ValueError(
            f"Cache path {str(path)!r} is a folder; expected the path that the names "
            f"of the cache files begin with. Pass {str(Path(path) / 'train')!r}."
        )
    if not absolute.parent.is_dir():
        raise ValueError(
            f"Cache path {str(path)!r} lies in a folder that does not exist; expected "
            f"an existing one. Create it with `mkdir -p {absolute.parent}`."
        )
    if not os.access(absolute.parent, os.W_OK):
        raise ValueError(
            f"Cache path {str(path)!r} lies in a folder that cannot be written; "
            "expected a writable one. Choose another, or cache in 'memory'."
        )
    return absolute


def is_complete(path: Path) -> bool:
    """Whether tf.data finished writing the cache: its index is written last."""
    return path.with_name(f"{path.name}.index").exists()


def leftovers(path: Path) -> list[Path]:
    """Returns the files of an unfinished cache: its lock and its partial data."""
    name = re.escape(path.name)
    pattern = re.compile(
        rf"{name}_\d+\.(lockfile|index|data-.*)|{name}\.data-\d+-of-\d+.*"
    )
    return sorted(p for p in path.parent.iterdir() if pattern.fullmatch(p.name))


def claim(path: Path, *, element_spec: Any, cardinality: int) -> None:
    """Makes sure that `Dataset.cache(path)` can start, before it is called.

    Args:
        path: Where the names of the cache's files begin.
        element_spec: What the pipeline puts in.
        cardinality: How many elements, as `Dataset.cardinality` gives it.

    Raises:
        ValueError: A finished cache holds other elements, or an unfinished one
            belongs to a process that may still write it.
    """
    contents = {"element_spec": repr(element_spec), "cardinality": cardinality}
    if is_complete(path):
        _check_contents(path, contents)
        return
    is_alone = _hold(path)
    found = leftovers(path)
    if found and not is_alone:
        raise ValueError(
            f"Cache {str(path)!r} is unfinished and its writer may be alive (found "
            f"{found[0].name!r}); expected a finished cache or none. Wait for the "
            "process or the iterator that fills it; if there is none, delete these "
            "files or choose another path."
        )
    if found:
        warnings.warn(
            f"Cache {str(path)!r} was left unfinished by a process that has ended; "
            f"its {len(found)} files are removed and it is built again.",
            stacklevel=5,  # claim, Cache.check, _plan.run, Pipeline.build, caller
        )
        for leftover in found:
            leftover.unlink(missing_ok=True)
    _record(path).write_text(json.dumps(contents))


def _record(path: Path) -> Path:
    return path.with_name(f"{path.name}.tfamp")


def _check_contents(path: Path, contents: dict[str, Any]) -> None:
    """Raises when the cache is known to hold other elements than `contents`."""
    try:
        recorded = json.loads(_record(path).read_text())
    except (OSError, ValueError):
        return  # Written by plain tf.data: nothing is known about it.
    for key, value in contents.items():
        if recorded.get(key) != value:
            raise ValueError(
                f"Cache {str(path)!r} holds elements with {key} "
                f"{recorded.get(key)!r}; this pipeline gives {value!r}. Delete the "
                "cache's files, or choose another path."
            )


def _hold(path: Path) -> bool:
    """Locks the cache's record for the life of this process.

    Returns:
        Whether leftovers can only be those of the dead: this process is the only
        one here, and holds the cache for the first time.
    """
    if fcntl is None or (str(path) in _HELD and _record(path).exists()):
        return False
    record = os.open(_record(path), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except OSError:  # Held by another process, or a file system without locks.
        is_alone = False
    with contextlib.suppress(OSError):
        fcntl.flock(record, fcntl.LOCK_SH)
    _HELD[str(path)] = record
    return is_alone
