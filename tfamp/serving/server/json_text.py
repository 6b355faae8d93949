"""JSON as bodies hold it: read quickly, and NaN and infinities written as NumPy does.

TensorFlow Serving writes and reads `NaN`, `Infinity` and `-Infinity`, which strict JSON
has no words for; orjson would turn them into null silently.
"""

import json
from typing import Any

import numpy as np
import orjson

from tfamp.serving.server.refusals import Refusal

_WORDS = (b"NaN", b"Infinity")


def read(body: bytes | bytearray | memoryview) -> dict[str, Any]:
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


def write(content: Any, arrays: list[np.ndarray]) -> bytes:
    """Returns JSON in which arrays are lists.

    Args:
        content: What is written.
        arrays: The arrays in it, which may hold what JSON has no words for.
    """
    if all(array.dtype.kind != "f" or np.isfinite(array).all() for array in arrays):
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(content, default=_listed).encode()


def _listed(array: np.ndarray) -> Any:
    # The shortest text that gives the same float32, as orjson writes it.
    if array.dtype.kind == "f":
        array = np.asarray(array).astype(str).astype(np.float64)
    return array.tolist()
