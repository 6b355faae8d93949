"""Bodies of requests: read whole, within limits of size and of time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tfamp.serving.server.refusals import Refusal, quoted

Headers = Mapping[bytes, bytes]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
# Bodies together may hold so many times the largest of them.
_AT_ONCE = 4


class Held:
    """What is known of a request while it is answered.

    Attributes:
        labels: The model, its version and the protocol, "" where they are not known.
        num_bytes: Of its body.
        since: When all of it was there; None before.
    """

    __slots__ = ("labels", "num_bytes", "since")

    def __init__(self) -> None:
        self.labels = ("", "", "other")
        self.num_bytes = 0
        self.since: float | None = None


class Bodies:
    """Reads the bodies of all requests.

    Args:
        max_bytes: The largest that is read; all together may be four times as large.
        seconds: How long a client may take to send one.
    """

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_bytes = 0

    def let_go(self, held: Held) -> None:
        """Forgets the body of a request that was answered."""
        self._num_bytes -= held.num_bytes

    async def read(self, headers: Headers, receive: Receive, held: Held) -> bytes:
        """Returns the body of a request.

        Raises:
            Refusal: It is compressed, too large, or did not come in time.
        """
        coding = headers.get(b"content-encoding", b"identity").lower()
        if coding != b"identity":
            raise Refusal(
                415,
                f"The body is encoded by {quoted(coding.decode('latin-1'))}; expected "
                "plain bytes. Send it without compression.",
                close=True,
            )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large(int(length))
        parts: list[bytes] = []
        task = asyncio.current_task()
        is_late = False

        def stop() -> None:
            nonlocal is_late
            is_late = True
            if task is not None:
                task.cancel()

        timer = asyncio.get_running_loop().call_later(self._seconds, stop)
        try:
            await self._receive(receive, held, parts)
        except asyncio.CancelledError:
            if not is_late:
                raise
            raise Refusal(
                408,
                f"The body did not come within {self._seconds:g} s; expected all of "
                "it. Send it faster, or in smaller requests.",
                close=True,
            ) from None
        finally:
            timer.cancel()
        held.since = time.perf_counter()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _receive(self, receive: Receive, held: Held, parts: list[bytes]) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "The client went away.")
            part = message.get("body", b"")
            parts.append(part)
            held.num_bytes += len(part)
            self._num_bytes += len(part)
            more = message.get("more_body", False)
            if held.num_bytes > self._max_bytes:
                raise self._too_large(held.num_bytes)
            if self._num_bytes > _AT_ONCE * self._max_bytes:
                raise Refusal(
                    503,
                    "The bodies of all requests together are larger than the server "
                    "holds. Try again.",
                    retry=True,
                    close=True,
                )

    def _too_large(self, found: int) -> Refusal:
        return Refusal(
            413,
            f"The body has {found} bytes or more; expected at most {self._max_bytes}. "
            "Send fewer examples at once.",
            close=True,
        )
