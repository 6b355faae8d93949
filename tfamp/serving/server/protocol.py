"""The Open Inference Protocol v2: JSON, and tensors as raw bytes behind it.

Nothing is cast silently: a float where the model takes integers, a text where it takes
numbers or a number that does not fit is refused with a message, a `Refusal`.

Source: KServe's Open Inference Protocol, and its binary tensor data extension (read in
November 2026).
"""

import json
import math
import reprlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from starlette.exceptions import HTTPException

from tfamp.records import checks
from tfamp.serving.runtimes.signature import (
    DATATYPES,
    LoadedModel,
    Signature,
    TensorSpec,
    dtype_named,
)

# Header with the length of the JSON, where raw bytes follow it.
HEADER = "inference-header-content-length"
VERSION = "1"
# Kind of a dtype -> the kinds that numbers of JSON may be of.
_KINDS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}
# An extra dtype of NumPy, as bfloat16 is, has this kind; texts have one of those.
_EXTRA, _TEXTS = "V", "OSU"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


class Refusal(HTTPException):
    """A request that gets an error for an answer."""

    def __init__(
        self, status: int, message: str, *, retry: bool = False, close: bool = False
    ) -> None:
        headers = {"retry-after": "1"} if retry else {}
        if close:
            headers["connection"] = "close"
        super().__init__(status, message, headers)


def unknown(what: str, name: str, known: Iterable[str], status: int = 404) -> Refusal:
    """Returns the refusal of a name that is not known."""
    names = list(known)
    guess = checks.did_you_mean(name, names)
    advice = f"Did you mean {guess!r}?" if guess else "Ask for one of these."
    expected = ", ".join(map(repr, names))
    return Refusal(
        status, f"There is no {what} {quoted(name)}; expected {expected}. {advice}"
    )


def quoted(value: object) -> str:
    """Returns the beginning of what came, however much it is."""
    return _SHORT.repr(value)


class Asked(NamedTuple):
    """What a request asks for; outputs by name, each as raw bytes or not."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    identity: str | None


def read(body: bytes, marked: str | None, signature: Signature) -> Asked:
    """Returns what an `infer` request of JSON and raw bytes behind it asks for."""
    length = json_length(body, marked)
    content = _object(body[:length])
    binary = memoryview(body)[length:]
    inputs: dict[str, np.ndarray] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for entry in _objects(content, "inputs"):
        name = _field(entry, "name", str)
        if name not in specs:
            raise unknown("input", name or "", specs, 400)
        if name in inputs:
            raise _bad(f"Input {name!r} came twice; send it once.")
        inputs[name], binary = _tensor(entry, specs[name], binary)
    if binary:
        raise _bad(
            f"{len(binary)} bytes follow the last tensor; expected none. Give each "
            "input its `binary_data_size`."
        )
    if missing := [name for name in specs if name not in inputs]:
        raise _bad(f"Inputs are {list(inputs)}; expected {list(specs)}. Add {missing}.")
    lengths = {name: array.shape[0] for name, array in inputs.items() if array.ndim}
    if len({*lengths.values()}) > 1:
        raise _bad(f"Inputs have {lengths} examples; send as many of each.")
    ordered = {name: inputs[name] for name in specs}
    return Asked(ordered, _wanted(content, signature), _field(content, "id", str))


def json_length(body: bytes, marked: str | None) -> int:
    """Returns the length of the JSON in a body, which a header may mark."""
    if marked is None:
        return len(body)
    is_number = marked.isascii() and marked.isdigit() and len(marked) < 20
    if not is_number or not 0 < int(marked) <= len(body):
        raise _bad(
            f"Inference-Header-Content-Length is {quoted(marked)}; expected the bytes "
            f"of the JSON, from 1 to {len(body)}. Correct it."
        )
    return int(marked)


def write(
    asked: Asked, outputs: Mapping[str, np.ndarray], name: str
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow."""
    entries, raw, is_finite = [], [], True
    for output, binary in asked.outputs.items():
        array = outputs[output]
        dtype = "object" if array.dtype.kind in _TEXTS else array.dtype.name
        entry: dict[str, Any] = {"name": output, "datatype": DATATYPES[dtype]}
        entry["shape"] = list(array.shape)
        if binary:
            raw.append(_to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = data = _to_json(array)
            if isinstance(data, np.ndarray) and data.dtype.kind == "f":
                is_finite &= bool(np.isfinite(data).all())
        entries.append(entry)
    content: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if asked.identity is not None:
        content["id"] = asked.identity
    content["outputs"] = entries
    if is_finite:
        text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    else:  # NaN and Infinity, for which orjson writes null
        text = json.dumps(content, default=_listed).encode()
    return b"".join((text, *raw)), len(text) if raw else None


def metadata(name: str, model: LoadedModel) -> dict[str, Any]:
    """Returns what the protocol tells of a model."""
    inputs, outputs = (
        [
            {"name": x.name, "datatype": DATATYPES[x.dtype], "shape": _pattern(x)}
            for x in specs
        ]
        for specs in model.signature
    )
    about = {"name": name, "versions": [VERSION], "platform": model.runtime}
    return {**about, "inputs": inputs, "outputs": outputs}


def _bad(message: str) -> Refusal:
    return Refusal(400, message)


def _pattern(spec: TensorSpec) -> list[int]:
    """Returns a shape as the protocol tells it, with -1 for a length that is free."""
    return [-1 if length is None else length for length in spec.shape]


def _object(text: bytes) -> dict[str, Any]:
    """Returns the object that JSON holds; NaN and Infinity are taken, too."""
    try:
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError:
            if b"NaN" not in text and b"Infinity" not in text:
                raise
            found = json.loads(text)
            orjson.dumps(found)  # no answer repeats a half of a character
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(f"The body is not JSON ({error}). Send an object.") from error
    if not isinstance(found, dict):
        what = type(found).__name__
        raise _bad(f"The body is a JSON {what}; expected an object. Add braces.")
    return found


def _tensor(
    entry: Mapping[str, Any], spec: TensorSpec, binary: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Returns an input, and the raw bytes that are left for those behind it."""

    def bad(came: str, expected: str) -> Refusal:
        return _bad(f"Input {spec.name!r} {came}; expected {expected}. Correct it.")

    dtype: Any = entry.get("datatype")
    shape: Any = entry.get("shape")
    if dtype != DATATYPES[spec.dtype]:
        raise bad(f"is of datatype {quoted(dtype)}", repr(DATATYPES[spec.dtype]))
    is_shape = isinstance(shape, list) and len(shape) == len(spec.shape)
    if not is_shape or not all(map(_is_length, shape, spec.shape)):
        wanted = f"{_pattern(spec)}, where -1 is any length above 0"
        raise bad(f"is of shape {quoted(shape)}", wanted)
    parameters, count = _field(entry, "parameters", dict) or {}, math.prod(shape)
    size, data = parameters.get("binary_data_size"), entry.get("data")
    if size is None:
        if not isinstance(data, list):
            wanted = "one of them, as shared memory is not read"
            raise bad("has neither `data` in a list nor `binary_data_size`", wanted)
        array = _from_json(data, spec)
        if array is None:
            wanted = f"what {spec.dtype} holds, in nested lists of one length a level, "
            raise bad(f"is {quoted(data)}", f"{wanted}with neither null nor others")
        if array.size != count or array.ndim != 1 and list(array.shape) != shape:
            wanted = f"{count} numbers, as its shape is {shape}"
            raise bad(f"has data of shape {list(array.shape)}", wanted)
        return array.reshape(shape), binary
    if data is not None or not _is_length(size, None, 0) or size > len(binary):
        wanted = "as many behind the JSON, whose length Inference-Header-Content-Length"
        raise bad(
            f"has the `binary_data_size` {quoted(size)} where {len(binary)} bytes are "
            "left",
            f"{wanted} has, and no `data`",
        )
    array = _from_bytes(binary[:size], count, dtype_named(spec.dtype))
    if array is None:
        wanted = f"{count} elements of {spec.dtype}, texts behind their lengths"
        raise bad(f"has {size} bytes", wanted)
    return array.reshape(shape), binary[size:]


def _from_json(data: list[Any], spec: TensorSpec) -> np.ndarray | None:
    """Returns lists of JSON, nested or flat, as an array; None where they are none."""
    wanted = dtype_named(spec.dtype)
    kind = "f" if wanted.kind == _EXTRA else wanted.kind
    try:
        found = np.array(data, dtype=object if kind == "O" else None)
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        return None
    if kind == "O":
        return found if all(isinstance(each, str) for each in found.flat) else None
    if found.dtype.kind not in _KINDS[kind] and found.size:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(wanted)
    fits = np.isfinite(array) | ~np.isfinite(found) if kind == "f" else array == found
    return array if np.all(fits) else None


def _from_bytes(data: memoryview, count: int, wanted: np.dtype) -> np.ndarray | None:
    """Returns raw little-endian bytes, or texts behind their lengths, as an array."""
    if wanted.kind != "O":
        if len(data) != count * wanted.itemsize:
            return None
        # A copy stands where the runtime wants it, and lets go of the body.
        return np.frombuffer(data, wanted).copy()
    texts, place = [], 0
    while place + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, place)
        texts.append(bytes(data[place + 4 : place + 4 + length]))
        place += 4 + length
    is_whole = place == len(data) and len(texts) == count
    return np.array(texts, dtype=object) if is_whole else None


def _to_bytes(array: np.ndarray) -> bytes:
    """Returns an array as `_from_bytes` reads it."""
    if array.dtype.kind not in _TEXTS:
        return array.tobytes()
    texts = [x if isinstance(x, bytes) else str(x).encode() for x in array.flat]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _to_json(array: np.ndarray) -> Any:
    """Returns the elements of an array, in a row, as `orjson` writes them."""
    if array.dtype.kind in _TEXTS:
        return [
            x.decode(errors="replace") if isinstance(x, bytes) else str(x)
            for x in array.flat
        ]
    if array.dtype.kind == _EXTRA:
        array = array.astype(np.float32)
    return np.ascontiguousarray(array).ravel()


def _listed(array: np.ndarray) -> Any:
    # The shortest text that gives the same float32, as orjson writes it.
    if array.dtype.kind == "f":
        array = array.astype(str).astype(np.float64)
    return array.tolist()


def _wanted(content: Mapping[str, Any], signature: Signature) -> dict[str, bool]:
    """Returns the outputs that are wanted, and whether each as raw bytes."""
    names = [spec.name for spec in signature.outputs]
    parameters = _field(content, "parameters", dict) or {}
    by_default = bool(_field(parameters, "binary_data_output", bool))
    if not content.get("outputs"):
        return dict.fromkeys(names, by_default)
    found = {}
    for entry in _objects(content, "outputs"):
        name = _field(entry, "name", str)
        if name not in names:
            raise unknown("output", name or "", names, 400)
        own = _field(_field(entry, "parameters", dict) or {}, "binary_data", bool)
        found[name] = by_default if own is None else own
    return found


def _objects(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise _bad(
            f"`{name}` is {quoted(entries)}; expected a list of objects, each with a "
            "`name`. Send one for each tensor."
        )
    return entries


def _field(entry: Mapping[str, Any], key: str, kind: type) -> Any:
    """Returns a field of JSON; None where it is not there."""
    value = entry.get(key)
    if not isinstance(value, kind | None):
        raise _bad(f"`{key}` is {quoted(value)}; expected JSON's {kind.__name__}.")
    return value


def _is_length(value: Any, wanted: int | None, least: int = 1) -> bool:
    is_length = type(value) is int and least <= value < 2**48
    return is_length and wanted in (None, value)
