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
                http="h11",
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
