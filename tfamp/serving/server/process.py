"""The process under uvicorn: how many connections there are, and which has to go."""

import asyncio
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import orjson
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tfamp.serving.server.app import App
from tfamp.serving.server.protocol import RETRY_SECONDS

_IDLE_SECONDS = 75
# How long a client may take to read an answer.
_READING_SECONDS = 30.0
_MAX_CONNECTIONS = 1000
# New ones that wait in the kernel: where there is no room a client tries again, only
# after 1, 3, 7 seconds. How many are taken from there at a time, or fewer where few
# files may be open: three times as many may be open for a moment, as asyncio takes the
# next ones before it has closed those that had to go. Files that models hold open.
_WAITING = 4096
_BACKLOG = 128
_OTHER_FILES = 48


class Process(uvicorn.Server):
    """uvicorn with a bound on connections, which it leaves to others.

    A client may open connections and send nothing, or a part of a head, and it need not
    read its answer; uvicorn waits for ever. Here they go where there are too many.
    """

    def __init__(
        self,
        app: App,
        max_connections: int | None,
        *,
        on_start: Callable[[], object],
    ) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        backlog = max(1, min(_BACKLOG, files // 8))
        room = max(1, min(_MAX_CONNECTIONS, files - 3 * backlog - _OTHER_FILES))
        self._most = max_connections or room
        self._on_start = on_start
        # A body and an answer may take so long each.
        seconds = 2 * app.limits.timeout_seconds
        self._busy_seconds = seconds + _READING_SECONDS
        self._open: set[_Connection] = set()
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,
                lifespan="off",
                ws="none",
                log_config=None,
                # A line for each malformed request would let clients fill the log.
                log_level="error",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                backlog=backlog,
                timeout_keep_alive=_IDLE_SECONDS,
                timeout_graceful_shutdown=int(seconds) + 1,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets=sockets)
        for listening in sockets or ():
            listening.listen(_WAITING)
        self._on_start()

    def _connection(self, **options: Any) -> asyncio.Protocol:
        """Returns what a new connection is answered by, in the place of an idle one."""
        if len(self._open) >= self._most:
            late = time.monotonic() - self._busy_seconds
            idle = (each for each in self._open if not each.is_busy(late))
            oldest = min(idle, key=lambda each: each.since, default=None)
            if oldest is None:
                return _Full(self._most)
            self._open.discard(oldest)
            # One that was taken in this round of the event loop has no transport yet.
            asyncio.get_running_loop().call_soon(lambda: oldest.transport.abort())
        new = _Connection(**options)
        new.among = self._open
        self._open.add(new)
        return new


class _Connection(H11Protocol):
    """A connection that knows since when nothing was heard of it."""

    among: set["_Connection"]
    since = 0.0

    def is_busy(self, late: float) -> bool:
        """States whether a request of a moment that is not too late is answered."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return not is_idle and self.since > late

    def connection_made(self, transport: Any) -> None:
        """Is called by asyncio."""
        self.since = time.monotonic()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Is called by asyncio."""
        self.among.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Is called by asyncio."""
        self.since = time.monotonic()
        super().data_received(data)


class _Full(asyncio.Protocol):
    """A connection too many, which is told so and closed."""

    def __init__(self, most: int) -> None:
        message = (
            f"There are {most} connections already, which is the most that may be, "
            "and none is idle. Try again, or ask another server."
        )
        body = orjson.dumps({"error": message})
        self._answer = (
            b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
            b"retry-after: %d\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
        ) % (RETRY_SECONDS, len(body), body)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Tells it."""
        transport.write(self._answer)  # type: ignore[attr-defined]
        # Closed at once, a request on its way would take the answer with it.
        asyncio.get_running_loop().call_later(RETRY_SECONDS, transport.close)
