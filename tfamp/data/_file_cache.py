"""Files that hold the elements of a pipeline: whose they are, and whether whole.

A cache lies in files whose names begin with the user's path and the pipeline's
fingerprint, so a changed pipeline has other files, and none reads another's. The
format is that of tf.data's own file cache, which writes `<name>.index` last: without
it a cache is unfinished. Beside it lies `<name>.tfamp`, which says what the cache
holds. Whoever fills the cache holds an exclusive `flock` on that file, whoever reads
it a shared one for the life of the process. The system releases both when a process
ends, however it ends, so a lock that stands belongs to someone alive.
"""

import contextlib
import dataclasses
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

try:
    import fcntl
except ImportError:  # Windows has none: there a cache has one user at a time.
    fcntl = None  # type: ignore[assignment]

_CAN_LOCK = fcntl is not None
_POLL_SECONDS = 0.1
# Open files by name of the record; never closed, or the lock would be released.
_HELD: dict[Path, int] = {}


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


@dataclasses.dataclass(frozen=True)
class CacheFiles:
    """The files of one cache.

    Attributes:
        path: The user's path, where the names begin.
        digest: The pipeline's fingerprint in short.
    """

    path: Path
    digest: str

    @property
    def stem(self) -> Path:
        """What tf.data is given as the cache's file name."""
        return self.path.with_name(f"{self.path.name}-{self.digest}")

    @property
    def record(self) -> Path:
        """The file that is locked, and says what the cache holds."""
        return self.path.with_name(f"{self.stem.name}.tfamp")

    @property
    def is_complete(self) -> bool:
        """Whether both tf.data and tfamp finished writing."""
        index = self.stem.with_name(f"{self.stem.name}.index")
        return index.exists() and "num_elements" in self.read()

    def parts(self) -> list[Path]:
        """Returns the data files here, whole or left unfinished."""
        pattern = re.compile(re.escape(self.stem.name) + r"(_\d+)?\.(?!tfamp$).+")
        found = self.path.parent.iterdir()
        return sorted(path for path in found if pattern.fullmatch(path.name))

    @property
    def num_bytes(self) -> int:
        """What the data files hold now."""
        total = 0
        for path in self.parts():
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                total += path.stat().st_size
        return total

    def read(self) -> dict[str, Any]:
        """Returns what the record says, nothing where there is none."""
        try:
            return dict(json.loads(self.record.read_text()))
        except (OSError, ValueError):
            return {}

    def write(self, contents: dict[str, Any]) -> None:
        """Writes the record in place: its locks belong to this very file."""
        self.record.write_text(json.dumps(contents))

    def remove_data(self) -> None:
        """Removes the data files."""
        for path in self.parts():
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the data files and the record."""
        self.remove_data()
        self.record.unlink(missing_ok=True)

    @contextlib.contextmanager
    def owned_or_complete(
        self, sleep: Callable[[float], None] = time.sleep
    ) -> Iterator[bool]:
        """Waits until the cache is whole, or this process alone may fill it.

        On leaving, this process holds the cache as a reader until it ends, unless
        an exception passes through.

        Args:
            sleep: Waits for some seconds.

        Yields:
            Whether the cache is to be filled here.

        Raises:
            ValueError: Others read it, and its files have gone.
        """
        if not _CAN_LOCK:
            yield not self.is_complete
            return
        locked = _HELD.pop(self.record, None)
        if locked is None:
            locked = os.open(self.record, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_owner = self._wait(locked, sleep)
            yield is_owner
        except BaseException:
            os.close(locked)
            raise
        fcntl.flock(locked, fcntl.LOCK_SH)
        _HELD[self.record] = locked

    def _wait(self, locked: int, sleep: Callable[[float], None]) -> bool:
        """Returns whether this process owns the cache, or may read it."""
        is_told = False
        while True:
            if _try(locked, fcntl.LOCK_EX):
                return not self.is_complete
            if _try(locked, fcntl.LOCK_SH):
                if self.is_complete:
                    return False
                raise ValueError(
                    f"Cache {str(self.stem)!r} is read by another process, and its "
                    "files have gone; expected them whole. Wait for that process to "
                    "end, or choose another path."
                )
            if not is_told:
                is_told = True
                logging.info("Waiting for the process that fills %s.", self.stem)
            sleep(_POLL_SECONDS)


def others(files: CacheFiles) -> list[CacheFiles]:
    """Returns the caches of other pipelines that begin with the same path."""
    name = re.escape(files.path.name)
    pattern = re.compile(rf"{name}-([0-9a-f]+)\.tfamp")
    matches = (pattern.fullmatch(path.name) for path in files.path.parent.iterdir())
    digests = sorted(match[1] for match in matches if match)
    return [
        CacheFiles(files.path, digest) for digest in digests if digest != files.digest
    ]


def is_in_use(files: CacheFiles) -> bool:
    """Whether a process reads or fills a cache, this one included."""
    if not _CAN_LOCK or files.record in _HELD:
        return True
    try:
        with files.record.open("r+") as record:
            return not _try(record.fileno(), fcntl.LOCK_EX)
    except OSError:
        return True


def _try(locked: int, kind: int) -> bool:
    try:
        fcntl.flock(locked, kind | fcntl.LOCK_NB)
    except OSError:  # held by another, or a file system without locks
        return False
    return True
