"""Tensors of requests: numbers of JSON and raw bytes to arrays, and back.

Nothing is cast silently: a float where the model takes integers, a text where it takes
numbers or a number that does not fit is refused with a message: a `Refusal`, which is
what a request is answered with when it cannot be answered.
"""

import math
import reprlib
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException

from tfamp.records import checks
from tfamp.serving.runtimes.signature import TensorSpec, dtype_named

# What a number of JSON has to be to become one of a dtype, by the dtype's kind.
_KINDS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}
_WORDS = {"f": "numbers", "i": "integers", "u": "integers", "b": "booleans"}
# An extra dtype of NumPy, as bfloat16 is, has this kind.
_EXTRA = "V"
# How long a client waits before it tries again, where the server is full.
RETRY_SECONDS = 1


class Refusal(HTTPException):
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
        headers = {"retry-after": str(RETRY_SECONDS)} if retry else {}
        if close:
            headers["connection"] = "close"
        super().__init__(status, message, headers)


def unknown(what: str, name: str, known: Iterable[str], status: int = 404) -> Refusal:
    """Returns the refusal of a name that is not known.

    Example:
        >>> unknown("model", "digit", ["digits"]).detail
        "There is no model 'digit'; expected 'digits'. Did you mean 'digits'?"
    """
    names = list(known)
    guess = checks.did_you_mean(name, names)
    advice = f"Did you mean {guess!r}?" if guess else "Ask for one of these."
    expected = ", ".join(map(repr, names))
    return Refusal(
        status, f"There is no {what} {quoted(name)}; expected {expected}. {advice}"
    )


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


def quoted(value: object) -> str:
    """Returns what came, for a message: its beginning, however much it is.

    Example:
        >>> quoted([1, "a"]), len(quoted("x" * 1000))
        ("[1, 'a']", 80)
    """
    return _SHORT.repr(value)


def from_json(data: Any, spec: TensorSpec) -> np.ndarray:
    """Returns lists of JSON, nested or flat, as an array of an input's dtype.

    Raises:
        Refusal: They are ragged, of another kind, or out of the dtype's range.
    """
    wanted = dtype_named(spec.dtype)
    kind = "f" if wanted.kind == _EXTRA else wanted.kind
    try:
        found = np.array(data, dtype=object if kind == "O" else None)
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        found = np.array(None)
    if kind == "O":
        if not all(isinstance(each, str) for each in found.flat):
            raise Refusal(
                400,
                f"Input {spec.name!r} is {quoted(data)}; expected texts in lists. "
                "Send nothing else.",
            )
        return found
    if found.dtype.kind not in _KINDS[kind]:
        raise Refusal(
            400,
            f"Input {spec.name!r} is {quoted(data)}; expected {_WORDS[kind]} for "
            f"{spec.dtype} in nested lists, those of a level all of one length. Send "
            "neither null nor text, and no other kind of number.",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(wanted)
    fits = np.isfinite(array) | ~np.isfinite(found) if kind == "f" else array == found
    if not np.all(fits):
        raise Refusal(
            400,
            f"Input {spec.name!r} has {found[~fits][0]!s}, which is beyond what "
            f"{spec.dtype} holds. Send numbers within its range.",
        )
    return array


def from_bytes(data: memoryview, shape: Sequence[int], spec: TensorSpec) -> np.ndarray:
    """Returns raw little-endian bytes as an array.

    Raises:
        Refusal: There are more or fewer bytes than the shape takes.
    """
    wanted = dtype_named(spec.dtype)
    count = math.prod(shape)
    if wanted.kind == "O":
        texts = _unpacked(data)
        if texts is None or len(texts) != count:
            raise Refusal(
                400,
                f"Input {spec.name!r} has {len(data)} bytes; expected {count} texts, "
                "each behind its length as four bytes. Correct `shape` or the data.",
            )
        return np.array(texts, dtype=object).reshape(shape)
    if len(data) != count * wanted.itemsize:
        raise Refusal(
            400,
            f"Input {spec.name!r} has {len(data)} bytes; expected "
            f"{count * wanted.itemsize}, as its shape is {list(shape)} and an element "
            f"of {spec.dtype} takes {wanted.itemsize}. Correct `shape` or "
            "`binary_data_size`.",
        )
    # A copy stands where the runtime wants it, and does not keep the body alive.
    return np.frombuffer(data, wanted).reshape(shape).copy()


def _unpacked(data: memoryview) -> list[bytes] | None:
    """Returns texts, each behind four bytes of its length; None if they are cut."""
    texts, place = [], 0
    while place + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, place)
        texts.append(bytes(data[place + 4 : place + 4 + length]))
        place += 4 + length
    return texts if place == len(data) else None


def to_bytes(array: np.ndarray) -> bytes:
    """Returns an array as raw little-endian bytes, as `from_bytes` reads them.

    Example:
        >>> to_bytes(np.array([1, 2], np.int16)).hex()
        '01000200'
    """
    if array.dtype.kind not in "OSU":
        return array.tobytes()
    texts = [x if isinstance(x, bytes) else str(x).encode() for x in array.flat]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def to_json(array: np.ndarray) -> Any:
    """Returns the elements of an array, in a row, as `orjson` writes them."""
    if array.dtype.kind in "OSU":
        return [
            x.decode(errors="replace") if isinstance(x, bytes) else str(x)
            for x in array.flat
        ]
    if array.dtype.kind == _EXTRA:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).ravel()
