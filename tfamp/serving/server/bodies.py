"""Bodies of requests, read within limits of size and of time, and of answers.

TensorFlow Serving writes and reads `NaN`, `Infinity` and `-Infinity`, which strict JSON
has no words for; orjson would turn them into null silently.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfamp.serving.server.tensors import RETRY_SECONDS, Refusal, quoted

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


_WORDS = (b"NaN", b"Infinity")


def read_json(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Returns the object that a body holds.

    Raises:
        Refusal: It is no JSON, or no object.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        found = _with_words(bytes(body), error)
    if not isinstance(found, dict):
        raise Refusal(
            400,
            f"The body is a JSON {type(found).__name__}; expected an object. Put what "
            "you send between braces, under the names of the protocol.",
        )
    return found


def _with_words(body: bytes, error: Exception) -> Any:
    """Returns what a body holds that may have NaN in it."""
    if any(word in body for word in _WORDS):
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as other:
            error = other
    raise Refusal(
        400, f"The body is not JSON ({error}); expected an object. Correct it."
    )


def write_json(content: Any, arrays: list[np.ndarray]) -> bytes:
    """Returns JSON in which arrays, which are named once more, are lists."""
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays):
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(content, default=_listed).encode()


def _listed(array: np.ndarray) -> Any:
    # The shortest text that gives the same float32, as orjson writes it.
    if array.dtype.kind == "f":
        array = np.asarray(array).astype(str).astype(np.float64)
    return array.tolist()


JSON = (b"content-type", b"application/json")
TEXT = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
BYTES = (b"content-type", b"application/octet-stream")


class Answer(NamedTuple):
    """A status, a body and headers."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = (JSON,)


def json_answer(content: dict[str, Any], status: int = 200) -> Answer:
    """Returns an answer of JSON."""
    return Answer(status, orjson.dumps(content))


def refused(refusal: Refusal) -> Answer:
    """Returns the answer that says what is wrong with a request."""
    headers = [JSON]
    if refusal.retry:
        headers.append((b"retry-after", b"%d" % RETRY_SECONDS))
    if refusal.close:
        headers.append((b"connection", b"close"))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    # A lone surrogate, which JSON may hold, cannot be written as UTF-8.
    message = refusal.message.encode(errors="replace").decode()
    return Answer(refusal.status, orjson.dumps({"error": message}), tuple(headers))
