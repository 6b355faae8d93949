"""Files that hold the elements of a pipeline: whose they are, and whether whole.

A cache lies in files whose names begin with the user's path and the pipeline's
fingerprint, so a changed pipeline has other files, and none reads another's. Whoever
fills it writes files under a name of its own, in the format of tf.data's file cache,
and then puts a record into place, `<name>.tfamp`, which says which files they are and
how long each is. Nobody reads a file that no record names, and a record appears whole:
so nothing that is half written is ever read, whatever becomes of writers and locks.

Locks keep two processes from doing the same work, and files that are read from being
removed. Whoever fills has an exclusive lock on `<name>.lock`, whoever reads a shared
one until the process ends, however it ends. That file is empty and stays. A lock
belongs to an open file, not to its name: whoever gets one compares the two.

Some network and bucket file systems know no locks, and Windows none of this kind. A
lease takes their place there: a file that names its owner, which a thread touches.
It keeps most processes from doing work twice; nothing that must not fail rests on it.
"""

import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import logging

from tfamp.records import record as _files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.1
# Others that only look have a shared lock for less than one look at them.
_LOOKS = 5
# Open files by name of the lock; never closed, or the lock would be released.
_HELD: dict[Path, int] = {}
_HOLDING = threading.Lock()
_HEARTBEAT_SECONDS = 10.0
# A lease that nobody touched for this long has no owner any more.
_STALE_SECONDS = 60.0
_TAKING_SECONDS = 0.2
_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


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
        with contextlib.suppress(OSError, ValueError, KeyError):
            record = dict(json.loads(self.record.read_text()))
            files = record["files"]
            folder = self.path.parent
            if all((folder / name).stat().st_size == files[name] for name in files):
                return record
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
    text = "%s lies on a file system without locks: caches there are never removed."
    logging.info(text, files.path)
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
    return [CacheFiles(files.path, one) for one in digests if one != files.digest]


def _sizes(paths: list[Path]) -> dict[str, int]:
    found = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
            found[path.name] = path.stat().st_size
    return found


class UnsupportedError(Exception):
    """The file system has no locks."""


def try_lock(path: Path, *, is_shared: bool) -> int | None:
    """Locks a file, which is made if it is missing.

    Returns the open file that holds the lock until `os.close`, or until the process
    ends; None where another one, of this process or of others, stands against it. A
    shared lock lets others have shared ones beside it.
    """
    if fcntl is None:
        raise UnsupportedError
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    while True:
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(opened, kind | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(opened), os.stat(path)):
                    return opened
        except OSError as error:
            os.close(opened)
            if error.errno in _BUSY:
                return None
            if error.errno in _UNSUPPORTED:
                raise UnsupportedError from error
            raise
        os.close(opened)  # another file has taken its name


@dataclasses.dataclass
class Lease:
    """A file that names who does some work, as far as others can tell."""

    path: Path
    _token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    _last: tuple[Any, float] | None = None

    def try_take(self) -> bool:
        """Returns whether this process owns the work now; to be called until it does.

        An owner counts as gone once its lease was the same for a minute, or at once if
        its process has ended on this very machine.
        """
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token}
        try:
            with self.path.open("x") as file:
                file.write(json.dumps(owner))
        except FileExistsError:
            if not self._is_stale():
                return False
            with _files.whole(self.path) as beside:
                beside.write_text(json.dumps(owner))
            # Another one may do the same at this moment: the last one has it.
            time.sleep(_TAKING_SECONDS)
            return self._is_own()
        return True

    def owner(self) -> dict[str, Any]:
        """Returns what the lease says, nothing where there is none."""
        try:
            return dict(json.loads(self.path.read_text()))
        except (OSError, ValueError):
            return {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Touches the lease while the block runs, and gives it up behind it."""
        ended = threading.Event()

        def touch() -> None:
            while not ended.wait(_HEARTBEAT_SECONDS):
                with contextlib.suppress(OSError):
                    os.utime(self.path)

        thread = threading.Thread(target=touch, name="tfamp-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if self._is_own():
                self.path.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        return self.owner().get("token") == self._token

    def _is_stale(self) -> bool:
        """Whether nobody has touched the lease of another for long enough."""
        owner = self.owner()
        if owner.get("host") == socket.gethostname() and not _is_alive(owner["pid"]):
            return True
        try:
            state = owner, self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return False  # given up: the next try makes a new one
        if self._last is None or self._last[0] != state:
            self._last = state, time.monotonic()
        return time.monotonic() - self._last[1] > _STALE_SECONDS


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # there a signal would end the process
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # of others it may be forbidden
        return not isinstance(error, ProcessLookupError)
    return True
