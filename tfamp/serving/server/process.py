"""The process under uvicorn: connections that hang, changes on disk, a graceful end."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from tfamp.serving.server.app import App

# How long a connection may be open without a whole request, and how long a client may
# take to read an answer.
_IDLE_SECONDS = 75.0
_READING_SECONDS = 30.0
# uvicorn's ticks, ten in a second.
_TICKS = 10
# As h11 has it. What came with the last packet is read in any case.
_MAX_HEAD_BYTES = 64 * 2**10
_TOO_LARGE = (
    b'{"error":"The head of the request has more than %d bytes; expected less. Send '
    b'what is large as the body."}' % _MAX_HEAD_BYTES
)
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json"
    b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
    % (len(_TOO_LARGE), _TOO_LARGE)
)

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    _PROTOCOL: Any = "h11"  # which has a limit of its own for heads
else:

    class _BoundedHeads(HttpToolsProtocol):
        """A connection that is closed when the head of a request is too large.

        httptools reads it as far as it goes; a head of 100 MB keeps the process from
        answering others.
        """

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._is_head = True
            self._num_bytes = 0

        def data_received(self, data: bytes) -> None:
            """Reads a part of a request."""
            super().data_received(data)
            if not self._is_head:
                return
            self._num_bytes += len(data)
            if self._num_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

        def on_headers_complete(self) -> None:
            """Goes on to the body."""
            self._is_head = False
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            """Goes on to the head of the next request."""
            self._is_head, self._num_bytes = True, 0
            super().on_message_complete()

    _PROTOCOL = _BoundedHeads


class Process(uvicorn.Server):
    """uvicorn with what it leaves to others.

    It has no limit on the time that a client takes to send the head of a request or to
    read an answer: connections would pile up.

    Args:
        app: What answers.
        on_start: Called when the server can be asked.
        reload_seconds: How often to look for changed models, in a thread; 0 never does.
        answer_seconds: How long reading a body and answering may take.
    """

    def __init__(
        self,
        app: App,
        *,
        on_start: Callable[[], Any],
        reload_seconds: float,
        answer_seconds: float,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_PROTOCOL,
                lifespan="off",
                ws="none",
                log_config=None,
                # A line for each malformed request would let clients fill the log.
                log_level="error",
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(_IDLE_SECONDS),
                timeout_graceful_shutdown=int(answer_seconds) + 1,
            )
        )
        self._app = app
        self._on_start = on_start
        self._reload_seconds = reload_seconds
        self._answer_seconds = answer_seconds
        self._ended = threading.Event()
        # Connection -> its last request, whether that was answered, and since when.
        self._since: dict[Any, tuple[Any, bool, float]] = {}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, and to look for changes."""
        await super().startup(sockets=sockets)
        if self._reload_seconds:
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Closes connections that hang, once a second."""
        if counter % _TICKS == 0:
            self._sweep(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answers what was asked and takes nothing new."""
        self._app.is_stopping = True
        self._ended.set()
        await super().shutdown(sockets=sockets)

    def _sweep(self, now: float) -> None:
        since: dict[Any, tuple[Any, bool, float]] = {}
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            is_idle = cycle is None or cycle.response_complete
            start = now
            if before := self._since.get(connection):
                if before[0] is cycle and before[1] is is_idle:
                    start = before[2]
            since[connection] = (cycle, is_idle, start)
            limit = _IDLE_SECONDS
            if not is_idle:
                limit = self._answer_seconds + _READING_SECONDS
            transport = getattr(connection, "transport", None)
            if now - start > limit and transport is not None:
                transport.abort()
        self._since = since

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ended.wait(self._reload_seconds):
            try:
                self._app.models.look(loop)
            except Exception:
                logging.getLogger("tfamp.serve").exception("Looking for models failed.")
