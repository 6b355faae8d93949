"""Tensors of requests: names of dtypes, numbers of JSON and raw bytes to arrays.

Nothing is cast silently: a float where the model takes integers, a text where it takes
numbers or a number that does not fit is refused with a message: a `Refusal`, which is
what a request is answered with when it cannot be answered.
"""

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfamp.records import checks
from tfamp.serving.runtimes.signature import TensorSpec, dtype_named, has_shape

# Of the Open Inference Protocol, by NumPy's names.
DATATYPES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "object": "BYTES",
    "string": "BYTES",
}
# Of TensorFlow Serving.
TF_DATATYPES = {
    "bool": "DT_BOOL",
    **{f"uint{bits}": f"DT_UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"DT_INT{bits}" for bits in (8, 16, 32, 64)},
    **{"float16": "DT_HALF", "float32": "DT_FLOAT", "float64": "DT_DOUBLE"},
    "bfloat16": "DT_BFLOAT16",
    "object": "DT_STRING",
    "string": "DT_STRING",
}
# What a number of JSON has to be to become one of a dtype, by the dtype's kind.
_KINDS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b", "O": "OUS"}
_WORDS = {"f": "numbers", "i": "integers", "u": "integers", "b": "booleans"}
# An extra dtype of NumPy, as bfloat16 is, has this kind.
_EXTRA = "V"


def from_json(data: Any, spec: TensorSpec) -> np.ndarray:
    """Returns nested lists of JSON as an array of an input's dtype.

    Raises:
        Refusal: They are ragged, of another kind, or out of the dtype's range.
    """
    wanted = dtype_named(spec.dtype)
    kind = "f" if wanted.kind == _EXTRA else wanted.kind
    if kind == "O":
        return _texts(data, spec)
    try:
        found = np.array(data)
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        found = np.array(None)
    if found.size == 0 and found.dtype.kind == "f":
        return found.astype(wanted)
    if found.dtype.kind not in _KINDS[kind]:
        raise Refusal(
            400,
            f"Input {spec.name!r} is {quoted(data)}; expected {_WORDS[kind]} for "
            f"{spec.dtype} in nested lists, those of a level all of one length. Send "
            "neither null nor text, and no other kind of number.",
        )
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(wanted)
    if kind == "f":
        fits = np.isfinite(array) | ~np.isfinite(found)
    else:
        fits = array == found
    if not np.all(fits):
        raise Refusal(
            400,
            f"Input {spec.name!r} has {found[~fits][0]!s}, which is beyond what "
            f"{spec.dtype} holds. Send numbers within its range.",
        )
    return array


def _texts(data: Any, spec: TensorSpec) -> np.ndarray:
    """Returns nested lists of texts as an array of objects."""
    try:
        found = np.array(data, dtype=object)
    except ValueError:
        found = np.array(None)
    if not all(isinstance(each, (str, bytes)) for each in found.flat):
        raise Refusal(
            400,
            f"Input {spec.name!r} is {quoted(data)}; expected texts in nested lists, "
            "those of a level all of one length.",
        )
    return found


def from_bytes(data: memoryview, shape: Sequence[int], spec: TensorSpec) -> np.ndarray:
    """Returns raw little-endian bytes as an array.

    Raises:
        Refusal: There are more or fewer bytes than the shape takes.
    """
    wanted = dtype_named(spec.dtype)
    count = math.prod(shape)
    if wanted.kind == "O":
        return _unpacked(data, count, spec).reshape(shape)
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


def _unpacked(data: memoryview, count: int, spec: TensorSpec) -> np.ndarray:
    """Returns texts, each behind four bytes of its length."""
    texts: list[bytes] = []
    place = 0
    while place + 4 <= len(data) and len(texts) < count:
        (length,) = struct.unpack_from("<I", data, place)
        texts.append(bytes(data[place + 4 : place + 4 + length]))
        place += 4 + length
    if len(texts) != count or place != len(data):
        raise Refusal(
            400,
            f"Input {spec.name!r} has {len(data)} bytes; expected {count} texts, each "
            "behind its length as four bytes. Correct `shape` or the data.",
        )
    found = np.empty(count, dtype=object)
    found[:] = texts
    return found


def to_bytes(array: np.ndarray) -> bytes:
    """Returns an array as raw little-endian bytes, as `from_bytes` reads them.

    Example:
        >>> to_bytes(np.array([1, 2], np.int16)).hex()
        '01000200'
    """
    if array.dtype.kind in "OSU":
        texts = [_encoded(each) for each in array.flat]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return array.tobytes()


def _encoded(text: Any) -> bytes:
    return text if isinstance(text, bytes) else str(text).encode()


def plain(array: np.ndarray) -> Any:
    """Returns an array that orjson writes, or lists of texts."""
    if array.dtype.kind in "OSU":
        return [
            each.decode(errors="replace") if isinstance(each, bytes) else str(each)
            for each in array.flat
        ]
    if array.dtype.kind == _EXTRA:
        return array.astype(np.float32)
    return np.ascontiguousarray(array)


def check_inputs(
    inputs: Mapping[str, np.ndarray], specs: Sequence[TensorSpec]
) -> dict[str, np.ndarray]:
    """Returns inputs in the order of the signature.

    Raises:
        Refusal: A name is missing or unknown, a shape is not that of the signature, or
            there are not as many examples of each.
    """
    names = [spec.name for spec in specs]
    if inputs.keys() != set(names):
        missing = [name for name in names if name not in inputs]
        strange = [name for name in inputs if name not in names]
        raise Refusal(
            400,
            f"Inputs are {quoted(list(inputs))}; expected {names}."
            + (f" Add {missing}." if missing else "")
            + (f" Leave out {quoted(strange)}." if strange else ""),
        )
    for spec in specs:
        shape = inputs[spec.name].shape
        if 0 in shape or not has_shape(inputs[spec.name], spec.shape):
            raise Refusal(
                400,
                f"Input {spec.name!r} is of shape {list(shape)}; expected "
                f"{pattern(spec.shape)}, where -1 is any length above 0 and the first "
                "is the number of examples. Reshape it.",
            )
    found = {name: inputs[name] for name in names}
    lengths = {name: array.shape[0] for name, array in found.items() if array.ndim}
    if len({*lengths.values()}) > 1:
        raise Refusal(
            400,
            f"Inputs have {lengths} examples; expected one number. Send as many of "
            "each.",
        )
    return found


def pattern(shape: Sequence[int | None]) -> list[int]:
    """Returns a shape as both protocols tell it, with -1 for a length that is free."""
    return [-1 if length is None else length for length in shape]


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
