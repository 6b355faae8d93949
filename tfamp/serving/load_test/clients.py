"""Clients of one server, in one thread, without an event loop.

What the generator takes of a machine that it shares with the server, the server lacks.
A request costs a third here of what it costs under asyncio and uvloop, and a wait ends
to the microsecond, where their timers are up to a millisecond late.
"""

import collections
import errno
import itertools
import math
import re
import select
import socket
import time
from typing import Any, NamedTuple

from tfamp.serving.load_test.target import Target

# At the start of a line: others end alike, as Inference-Header-Content-Length does.
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_CHUNKED = re.compile(rb"^transfer-encoding: *chunked", re.IGNORECASE | re.MULTILINE)
_CLOSE = re.compile(rb"^connection: *close", re.IGNORECASE | re.MULTILINE)
_LAST_CHUNK = b"0\r\n\r\n"
_READ_BYTES = 2**18


class Answer(NamedTuple):
    """What became of a request.

    Args:
        due: When it was due, by `time.perf_counter`.
        ended: When its answer was there to its end, or it was given up.
        status: "200", another status, "timeout", or the name of an error.
    """

    due: float
    ended: float
    status: str


class _Asked:
    """A request under way on a connection of its own."""

    __slots__ = ("due", "unsent", "got", "is_opening")

    def __init__(self, due: float, request: bytes, is_opening: bool) -> None:
        self.due = due
        self.unsent = memoryview(request)
        self.got = bytearray()
        self.is_opening = is_opening


class Clients:
    """Connections to a server, used again as long as they are good.

    Args:
        target: What they ask.
        limit: How many there may be; more requests than that wait, and it counts.
        timeout_seconds: How long an answer may take, from when it was due.
    """

    def __init__(self, target: Target, limit: int, timeout_seconds: float) -> None:
        self._target = target
        self._limit = limit
        self._timeout_seconds = timeout_seconds
        # Of a name that has several, the one that the server listens at.
        self._address: tuple[socket.AddressFamily | int, Any] | None = None
        self._idle: list[socket.socket] = []
        # In the order of the moments at which they were due, as the queue is.
        self._asked: dict[socket.socket, _Asked] = {}
        self._queued: collections.deque[float] = collections.deque()
        self._ended: list[Answer] = []

    @property
    def is_busy(self) -> bool:
        """Whether a request has no answer yet."""
        return bool(self._asked or self._queued or self._ended)

    def ask(self, due: float) -> None:
        """Sends a request, or has it wait for a connection.

        Args:
            due: From when it counts, by `time.perf_counter`.
        """
        if len(self._asked) >= self._limit:
            self._queued.append(due)
            return
        connection = self._idle.pop() if self._idle else None
        is_opening = connection is None
        if connection is None:
            try:
                connection = self._opened()
            except TimeoutError:
                self._note(due, "timeout")
                return
            except OSError as error:  # a name that nobody knows, no more files
                self._note(due, type(error).__name__)
                return
        asked = _Asked(due, self._target.request, is_opening)
        self._asked[connection] = asked
        if not is_opening:
            self._send(connection, asked)

    def wait(self, until: float) -> list[Answer]:
        """Returns the answers that have come, when some have or a moment is reached.

        Args:
            until: The moment, by `time.perf_counter`.
        """
        while True:
            ends = self._give_up(time.perf_counter())
            if self._ended:
                answers, self._ended = self._ended, []
                return answers
            left = min(until, ends) - time.perf_counter()
            if left <= 0 and until <= ends:
                return []
            self._select(max(left, 0.0))
            if not self._ended and time.perf_counter() >= until:
                return []

    def close(self) -> None:
        """Closes all connections."""
        for each in (*self._idle, *self._asked):
            each.close()
        self._idle.clear()
        self._asked.clear()
        self._queued.clear()

    def _opened(self) -> socket.socket:
        """Returns a connection on its way; the first finds the address that answers."""
        if self._address is None:
            made = socket.create_connection(
                (self._target.host, self._target.port), self._timeout_seconds
            )
            self._address = made.family, made.getpeername()
            status = 0
            made.setblocking(False)
        else:
            family, address = self._address
            made = socket.socket(family, socket.SOCK_STREAM)
            made.setblocking(False)
            status = made.connect_ex(address)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if status not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
            made.close()
            raise OSError(status, errno.errorcode.get(status, ""))
        return made

    def _select(self, seconds: float) -> None:
        """Waits for the server, and reads and sends what can be."""
        unsent = [one for one, each in self._asked.items() if each.unsent]
        # Not epoll, whose waits are whole milliseconds; those asked are few.
        reading, sending, _ = select.select(list(self._asked), unsent, [], seconds)
        for connection in sending:
            if (asked := self._asked.get(connection)) is not None:
                self._send(connection, asked)
        for connection in reading:
            if (asked := self._asked.get(connection)) is not None:
                self._read(connection, asked)

    def _send(self, connection: socket.socket, asked: _Asked) -> None:
        if asked.is_opening:
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if status:
                self._end(connection, asked, type(OSError(status, "")).__name__)
                return
            asked.is_opening = False
        try:
            asked.unsent = asked.unsent[connection.send(asked.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, asked, type(error).__name__)

    def _read(self, connection: socket.socket, asked: _Asked) -> None:
        try:
            part = connection.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(connection, asked, type(error).__name__)
            return
        if not part:
            self._end(connection, asked, "hung up")
            return
        got = asked.got
        got += part
        end = got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(got[:end])
        length = None
        if found := _LENGTH.search(head):
            length = end + 4 + int(found[1])
            is_whole = len(got) >= length
        elif _CHUNKED.search(head):
            is_whole = got.endswith(_LAST_CHUNK)
        else:
            self._end(connection, asked, "an answer of unknown length")
            return
        if not is_whole:
            return
        status = head.split(maxsplit=2)[1].decode("latin-1")
        if length is not None and len(got) > length:
            status = "an answer longer than it said"
        # One that was answered before it was sent holds the rest of its request.
        is_good = status == "200" and not asked.unsent and not _CLOSE.search(head)
        self._end(connection, asked, status, is_good=is_good)

    def _end(
        self,
        connection: socket.socket,
        asked: _Asked,
        status: str,
        *,
        is_good: bool = False,
    ) -> None:
        """Notes what a request came to, and lets the next one have its connection."""
        del self._asked[connection]
        if is_good:
            self._idle.append(connection)
        else:
            connection.close()
        self._note(asked.due, status)
        if self._queued:
            self.ask(self._queued.popleft())

    def _note(self, due: float, status: str) -> None:
        self._ended.append(Answer(due, time.perf_counter(), status))

    def _give_up(self, now: float) -> float:
        """Ends what has taken too long; returns when the next will have."""
        begun = now - self._timeout_seconds
        while self._queued and self._queued[0] <= begun:
            self._note(self._queued.popleft(), "timeout")
        for connection, asked in list(self._asked.items()):
            if asked.due > begun:
                break
            self._end(connection, asked, "timeout")
        oldest = [each.due for each in itertools.islice(self._asked.values(), 1)]
        if self._queued:
            oldest.append(self._queued[0])
        return min(oldest, default=math.inf) + self._timeout_seconds
