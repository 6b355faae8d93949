"""Locks on files that hold between processes, and end with the process that has them.

A lock belongs to an open file, not to its name: whoever gets one compares the file
with the one that now has the name. Files that are locked are never unlinked.

Some network and bucket file systems know no locks, and Windows none of this kind. A
lease takes their place there: a file that names its owner, which a thread touches.
It keeps most processes from doing work twice; nothing that must not fail rests on it.
"""

import contextlib
import dataclasses
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfamp.records import files

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_HEARTBEAT_SECONDS = 10.0
# A lease that nobody touched for this long has no owner any more.
_STALE_SECONDS = 60.0
_TAKING_SECONDS = 0.2
_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_UNSUPPORTED = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


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
            if _has_name(opened, path):
                return opened
        except OSError as error:
            os.close(opened)
            if error.errno in _BUSY:
                return None
            if error.errno in _UNSUPPORTED:
                raise UnsupportedError from error
            raise
        os.close(opened)  # another file has taken its name


def _has_name(opened: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(opened), os.stat(path))
    except FileNotFoundError:
        return False


@dataclasses.dataclass
class Lease:
    """A file that names who does some work, as far as others can tell."""

    path: Path
    _token: str = dataclasses.field(default_factory=lambda: secrets.token_hex(8))
    _last: tuple[Any, float] | None = None

    def try_take(self) -> bool:
        """Returns whether this process owns the work now.

        To be called until it does: an owner counts as gone once its lease was the same
        for a minute, or at once if its process has ended on this very machine.
        """
        try:
            opened = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if not self._is_stale():
                return False
            with files.whole(self.path) as beside:
                beside.write_text(self._text())
            # Another one may do the same at this moment: the last one has it.
            time.sleep(_TAKING_SECONDS)
            return self._is_own()
        with os.fdopen(opened, "w") as file:
            file.write(self._text())
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

    def _text(self) -> str:
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps({**place, "token": self._token})

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
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
