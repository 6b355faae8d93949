"""What a request is answered with when it cannot be answered."""

from collections.abc import Iterable

from tfamp.records import checks

# How long a client waits before it tries again, where the server is full.
RETRY_SECONDS = 1


class Refusal(Exception):
    """A request that gets an error for an answer.

    Args:
        status: The HTTP status, such as 400.
        message: What came, what was expected, what to do.
        retry: Whether the same request may be answered a moment later.
        close: Whether the connection is of no more use, as a body was left unread.
    """

    def __init__(
        self, status: int, message: str, *, retry: bool = False, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry = retry
        self.close = close


def unknown(what: str, name: str, known: Iterable[str], status: int = 404) -> Refusal:
    """Returns the refusal of a name that is not known.

    Example:
        >>> unknown("model", "digit", ["digits"]).message
        "There is no model 'digit'; expected 'digits'. Did you mean 'digits'?"
    """
    names = list(known)
    expected = ", ".join(map(repr, names)) or f"no {what} at all, as none is loaded"
    guess = checks.did_you_mean(name, names)
    advice = f"Did you mean {guess!r}?" if guess else "Ask for one of these."
    return Refusal(
        status, f"There is no {what} {quoted(name)}; expected {expected}. {advice}"
    )


def quoted(value: object) -> str:
    """Returns what came, for a message: at most 80 characters of it.

    Example:
        >>> quoted("x" * 100)[-8:], quoted([1, 2])
        ('xxxxxxx…', '[1, 2]')
    """
    # Of a long list, `repr` would write all only to cut it.
    if isinstance(value, (list, dict, str)) and len(value) > 80:
        value = value[:80] if isinstance(value, (list, str)) else list(value)[:80]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
