"""Files that hold the elements of a pipeline: whose they are, and whether whole.

A cache lies in files whose names begin with the user's path and the pipeline's
fingerprint, so a changed pipeline has other files, and none reads another's. Whoever
fills it writes files under a name of its own, in the format of tf.data's file cache,
and then puts a record into place, `<name>.tfamp`, which says which files they are and
how long each is. Nobody reads a file that no record names, and a record appears whole:
so nothing that is half written is ever read, whatever becomes of writers and locks.

Locks keep two processes from doing the same work, and files that are read from being
removed. Whoever fills has an exclusive lock on `<name>.lock`, whoever reads a shared
one until the process ends, however it ends. That file is empty and stays.
"""

import contextlib
import dataclasses
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from tfamp.data.stages.file_locks import Lease, UnsupportedError, try_lock
from tfamp.records import files as _files

_POLL_SECONDS = 0.1
# Others that only look have a shared lock for less than one look at them.
_LOOKS = 5
# Open files by name of the lock; never closed, or the lock would be released.
_HELD: dict[Path, int] = {}
_HOLDING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class CacheFiles:
    """The files of one cache: the user's path, and the fingerprint in short."""

    path: Path
    digest: str

    @property
    def stem(self) -> Path:
        """What the names of all files of this cache begin with."""
        return self.path.with_name(f"{self.path.name}-{self.digest}")

    @property
    def record(self) -> Path:
        """The file that says what the cache holds, and in which files."""
        return self.path.with_name(f"{self.stem.name}.tfamp")

    @property
    def lock(self) -> Path:
        """The file that is locked; empty."""
        return self.path.with_name(f"{self.stem.name}.lock")

    @property
    def is_complete(self) -> bool:
        """Whether there is a record, and all files are as it says."""
        return bool(self.read())

    def new_data(self) -> Path:
        """Returns a name for tf.data's files that nothing has had before."""
        return self.path.with_name(f"{self.stem.name}-{secrets.token_hex(4)}")

    def parts(self, data: str | None = None) -> list[Path]:
        """Returns the data files here, whole or left unfinished, by name or all."""
        anything = rf"{re.escape(self.stem.name)}-[0-9a-f]{{8}}"
        pattern = re.compile((re.escape(data) if data else anything) + r"(_\d+)?\..+")
        found = self.path.parent.iterdir()
        return sorted(path for path in found if pattern.fullmatch(path.name))

    @property
    def num_bytes(self) -> int:
        """What the data files hold now."""
        return sum(_sizes(self.parts()).values())

    def read(self) -> dict[str, Any]:
        """Returns the record of a cache that is whole, nothing of any other."""
        try:
            record = dict(json.loads(self.record.read_text()))
            files = record["files"]
            folder = self.path.parent
            if all((folder / name).stat().st_size == files[name] for name in files):
                return record
        except (OSError, ValueError, KeyError):
            pass
        return {}

    def write(self, contents: dict[str, Any]) -> None:
        """Puts a record into place, which makes the files it names the cache."""
        with _files.whole(self.record) as beside:
            beside.write_text(json.dumps(contents))

    def publish(self, data: Path, contents: dict[str, Any]) -> None:
        """Makes files that were written the cache; raises where there are none."""
        files = _sizes(self.parts(data.name))
        if f"{data.name}.index" not in files:
            raise FileNotFoundError(
                f"The cache files {str(data)!r} are gone before they were all written; "
                "expected nobody to remove them. Build again."
            )
        self.write({**contents, "data": data.name, "files": files})

    def remove_unnamed(self) -> list[Path]:
        """Removes, under the exclusive lock, and returns what no record names."""
        named = self.read().get("files", {})
        left = [path for path in self.parts() if path.name not in named]
        begin = re.sub(r"([\[?*])", r"[\1]", f".{self.record.name}.")
        for path in [*left, *self.path.parent.glob(f"{begin}*{_files.BESIDE}")]:
            path.unlink(missing_ok=True)
        return left

    def remove(self) -> None:
        """Removes the record and the data files; the lock's file stays."""
        self.record.unlink(missing_ok=True)
        self.remove_unnamed()


def fill_or_read(files: CacheFiles, fill: Callable[[], None]) -> bool:
    """Fills a cache, or waits until another process has; returns whether it did.

    The files stay until this process ends. `fill` writes and publishes them, or raises
    and leaves nothing.
    """
    with _HOLDING:
        if files.lock in _HELD:
            if files.is_complete:
                return False
            os.close(_HELD.pop(files.lock))
    try:
        return _fill_or_read(files, fill)
    except UnsupportedError:
        return _fill_with_lease(files, fill)


def _fill_or_read(files: CacheFiles, fill: Callable[[], None]) -> bool:
    is_filled = is_told = False
    looks = 0
    while True:
        locked = try_lock(files.lock, is_shared=False)
        if locked is not None:
            try:
                if not files.is_complete:
                    fill()
                    is_filled = True
            finally:
                os.close(locked)
        # A lock cannot be changed without a moment in which another may have it: the
        # cache is looked at again under the one that stays.
        shared = try_lock(files.lock, is_shared=True)
        if shared is not None:
            if files.is_complete:
                with _HOLDING:
                    if _HELD.setdefault(files.lock, shared) != shared:
                        os.close(shared)
                return is_filled
            os.close(shared)
        looks = looks + 1 if shared is not None else 0
        if looks > _LOOKS:
            raise ValueError(
                f"Cache {str(files.stem)!r} is read by another process, and its files "
                "have gone; expected them whole. Wait for that process to end, or "
                "choose another path."
            )
        if not is_told:
            is_told = True
            logging.info("Waiting for the process that fills %s.", files.stem)
        time.sleep(_POLL_SECONDS)


def _fill_with_lease(files: CacheFiles, fill: Callable[[], None]) -> bool:
    """Fills a cache where there are no locks; two that do both leave a whole one."""
    lease = Lease(files.path.with_name(f"{files.stem.name}.owner"))
    logging.info(
        "%s lies on a file system without locks: caches there are never removed.",
        files.path,
    )
    while not files.is_complete:
        if lease.try_take():
            with lease.kept():
                if not files.is_complete:
                    fill()
                    return True
        else:
            time.sleep(_POLL_SECONDS)
    return False


@contextlib.contextmanager
def kept_from_others(files: CacheFiles) -> Iterator[bool]:
    """Yields whether nobody reads or fills a cache, and sees that nobody begins."""
    opened = None
    if files.lock not in _HELD:
        with contextlib.suppress(OSError, UnsupportedError):
            opened = try_lock(files.lock, is_shared=False)
    try:
        yield opened is not None
    finally:
        if opened is not None:
            os.close(opened)


def others(files: CacheFiles) -> list[CacheFiles]:
    """Returns the caches under the same path, whole or not, of other pipelines."""
    name = re.escape(files.path.name)
    data = r"-[0-9a-f]{8}(?:_\d+)?\..+"
    pattern = re.compile(rf"{name}-([0-9a-f]+)(?:\.tfamp|{data})")
    matches = (pattern.fullmatch(path.name) for path in files.path.parent.iterdir())
    digests = sorted({match[1] for match in matches if match})
    return [
        CacheFiles(files.path, digest) for digest in digests if digest != files.digest
    ]


def _sizes(paths: list[Path]) -> dict[str, int]:
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found[path.name] = path.stat().st_size
    return found
