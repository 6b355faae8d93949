"""The process under uvicorn: how many connections there are, and which has to go."""

import asyncio
import functools
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

# How long a connection may be open without a whole request, and how long a client may
# take to read an answer.
_IDLE_SECONDS = 75.0
_READING_SECONDS = 30.0
_MAX_CONNECTIONS = 1000
# New ones that wait in the kernel: where there is no room a client tries again, only
# after 1, 3, 7 seconds. How many are taken from there at a time, or fewer where few
# files may be open: three times as many may be open for a moment, as asyncio takes the
# next ones before it has closed those that had to go. Files that models hold open.
_WAITING = 4096
_BACKLOG = 128
_OTHER_FILES = 48
# uvicorn's ticks, ten in a second.
_TICKS = 10


class Process(uvicorn.Server):
    """uvicorn with what it leaves to others: connections that hang are closed.

    A client may open connections and send nothing, or a part of a head, and it need not
    read its answer. uvicorn waits for ever.
    """

    def __init__(
        self,
        app: App,
        *,
        on_start: Callable[[], Any],
        max_connections: int | None,
        timeout_seconds: float,
    ) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        backlog = max(1, min(_BACKLOG, files // 8))
        if max_connections is None:
            most = files - 3 * backlog - _OTHER_FILES
            max_connections = max(1, min(_MAX_CONNECTIONS, most))
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
                timeout_keep_alive=int(_IDLE_SECONDS),
                timeout_graceful_shutdown=int(2 * timeout_seconds) + 1,
            )
        )
        self._max_connections = max_connections
        self._on_start = on_start
        self._answer_seconds = 2 * timeout_seconds
        # Connection -> its last request, whether that was answered, and since when.
        self._since: dict[Any, tuple[Any, bool, float]] = {}
        # Taken, and counted among the connections from the event loop's next round on.
        self._coming: list[Any] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen."""
        await super().startup(sockets=sockets)
        for server in self.servers:
            for listening in server.sockets:
                with listening.dup() as same:
                    same.listen(_WAITING)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Closes connections that hang, once a second."""
        if counter % _TICKS == 0:
            now = time.monotonic()
            self._look(now)
            for connection, (_, is_idle, start) in self._since.items():
                most = _IDLE_SECONDS
                if not is_idle:
                    most = self._answer_seconds + _READING_SECONDS
                if now - start > most:
                    connection.transport.abort()
        return await super().on_tick(counter)

    def _look(self, now: float) -> None:
        """Notes of each connection whether it is idle, and since when."""
        before, self._since = self._since, {}
        for connection in self.server_state.connections:
            cycle = connection.cycle
            is_idle = cycle is None or cycle.response_complete
            last = before.get(connection)
            is_same = last is not None and last[:2] == (cycle, is_idle)
            start = last[2] if last is not None and is_same else now
            self._since[connection] = (cycle, is_idle, start)

    def _connection(self, **options: Any) -> asyncio.Protocol:
        """Returns what a new connection is answered by, in the place of an idle one."""
        connections = self.server_state.connections
        self._coming = [new for new in self._coming if new.transport is None]
        if len(connections) + len(self._coming) >= self._max_connections:
            self._look(time.monotonic())
            idle = [
                (start, number, connection)
                for number, (connection, (_, is_idle, start)) in enumerate(
                    self._since.items()
                )
                if is_idle
            ]
            if idle:
                _, _, oldest = min(idle)
                oldest.transport.abort()
                # It would count until the event loop comes round to it.
                connections.discard(oldest)
            elif self._coming:
                oldest = self._coming.pop(0)
                asyncio.get_running_loop().call_soon(lambda: oldest.transport.abort())
            else:
                return _Full(self._max_connections)
        new = H11Protocol(**options)
        self._coming.append(new)
        return new


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
        close = functools.partial(transport.close)
        asyncio.get_running_loop().call_later(RETRY_SECONDS, close)
