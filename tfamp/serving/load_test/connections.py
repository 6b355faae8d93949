"""Connections of the load generator: one request after the other, as cheap as can be.

What the generator takes of a machine that it shares with the server, the server lacks.
"""

import asyncio
import re
import time
from typing import Any

from tfamp.serving.load_test.target import Target

# At the start of a line: others end alike, as Inference-Header-Content-Length does.
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_CHUNKED = re.compile(rb"^transfer-encoding: *chunked", re.IGNORECASE | re.MULTILINE)
_CLOSE = re.compile(rb"^connection: *close", re.IGNORECASE | re.MULTILINE)
_LAST_CHUNK = b"0\r\n\r\n"


class Connection(asyncio.Protocol):
    """A connection that asks one request at a time.

    Args:
        target: What it asks.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: Any = None
        self._answer: asyncio.Future[str] | None = None
        self._got = bytearray()
        # Whether more came than the last answer had.
        self._has_more = False

    async def ask(self, until: float) -> str:
        """Returns the status of an answer that was read to its end, or what came.

        Args:
            until: When it counts as a "timeout", by `time.perf_counter`.
        """
        loop = asyncio.get_running_loop()
        target = self._target
        if self._transport is None:
            opening = loop.create_connection(lambda: self, target.host, target.port)
            try:
                seconds = max(until - time.perf_counter(), 1e-3)
                await asyncio.wait_for(opening, seconds)
            except (TimeoutError, asyncio.TimeoutError):
                return "timeout"
            except OSError as error:
                return type(error).__name__
        if self._has_more:
            self._has_more = False
            self.close()
            return "an answer longer than it said"
        self._got.clear()
        self._answer = loop.create_future()
        self._transport.write(target.request)
        left = max(until - time.perf_counter(), 1e-3)
        timer = loop.call_later(left, self._end, "timeout")
        try:
            return await self._answer
        finally:
            timer.cancel()

    def close(self) -> None:
        """Closes it; the next request opens it again."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Takes the connection."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Takes a part of an answer."""
        if self._answer is None or self._answer.done():
            self._has_more = True
            return
        self._got += data
        end = self._got.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._got[:end])
        if found := _LENGTH.search(head):
            is_whole = len(self._got) >= end + 4 + int(found[1])
        elif _CHUNKED.search(head):
            is_whole = self._got.endswith(_LAST_CHUNK)
        else:
            self._end("an answer of unknown length")
            return
        if is_whole:
            self._end(head.split(maxsplit=2)[1].decode("latin-1"), _CLOSE.search(head))

    def connection_lost(self, error: Exception | None) -> None:
        """Notes that the server has hung up."""
        self._transport = None
        self._end("hung up" if error is None else type(error).__name__)

    def _end(self, what: str, is_last: Any = True) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(what)
            if is_last:
                self.close()
