"""What goes back to a client: a status, a body and headers."""

from typing import Any, NamedTuple

import orjson

from tfamp.serving.server.refusals import RETRY_SECONDS, Refusal

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
