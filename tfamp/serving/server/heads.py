"""Heads of requests are bounded, as their bodies are.

uvicorn reads a head by httptools as far as it goes; one of 100 MB keeps the process
from answering others. Its other parser, h11, has a limit of its own.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# As h11 has it. What came with the last packet is read in any case.
MAX_BYTES = 64 * 2**10
_BODY = (
    b'{"error":"The head of the request has more than %d bytes; expected less. Send '
    b'what is large as the body."}' % MAX_BYTES
)
_ANSWER = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json"
    b"\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(_BODY), _BODY)
)


class BoundedHeads(HttpToolsProtocol):
    """A connection that is closed when the head of a request is too large."""

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
        if self._num_bytes > MAX_BYTES and not self.transport.is_closing():
            self.transport.write(_ANSWER)
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Goes on to the body."""
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Goes on to the head of the next request."""
        self._is_head, self._num_bytes = True, 0
        super().on_message_complete()
