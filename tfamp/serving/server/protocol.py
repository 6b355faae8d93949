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
# How long a client waits before it tries again, where the server is full.
RETRY_SECONDS = 1
_FIELDS = {str: "text", bool: "true or false", dict: "an object"}
# What a number of JSON has to be to become one of a dtype, by the dtype's kind.
_KINDS = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}
_WORDS = {"f": "numbers", "i": "integers", "u": "integers", "b": "booleans"}
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


def quoted(value: object) -> str:
    """Returns what came, for a message: its beginning, however much it is.

    Example:
        >>> quoted([1, "a"]), len(quoted("x" * 1000))
        ("[1, 'a']", 80)
    """
    return _SHORT.repr(value)


class Asked(NamedTuple):
    """What a request asks for."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    identity: str | None


def length_of(text: str, most: int) -> int:
    """Returns the length of the JSON that a header gives."""
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    if not is_number or not 0 < int(text) <= most:
        raise _bad(
            f"Inference-Header-Content-Length is {quoted(text)}; expected the bytes "
            f"of the JSON, from 1 to {most}. Correct it."
        )
    return int(text)


def read(body: bytes, length: int, signature: Signature) -> Asked:
    """Returns what an `infer` request of JSON and raw bytes behind it asks for."""
    content = _object(body[:length])
    binary = memoryview(body)[length:]
    inputs: dict[str, np.ndarray] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for entry in _objects(content, "inputs"):
        name = _field(entry, "name", str, "an input", is_needed=True)
        if name not in specs:
            raise unknown("input", name, specs, 400)
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
        raise _bad(
            f"Inputs have {lengths} examples; expected one number. Send as many of "
            "each."
        )
    ordered = {name: inputs[name] for name in specs}
    return Asked(ordered, _wanted(content, signature), _field(content, "id", str))


def write(
    asked: Asked, outputs: Mapping[str, np.ndarray], name: str, version: str
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow."""
    entries, raw, is_finite = [], [], True
    for output, binary in asked.outputs.items():
        array = outputs[output]
        dtype = "object" if array.dtype.kind in _TEXTS else array.dtype.name
        entry: dict[str, Any] = {
            "name": output,
            "datatype": DATATYPES[dtype],
            "shape": list(array.shape),
        }
        if binary:
            raw.append(_to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = data = _to_json(array)
            if isinstance(data, np.ndarray) and data.dtype.kind == "f":
                is_finite &= bool(np.isfinite(data).all())
        entries.append(entry)
    content: dict[str, Any] = {"model_name": name, "model_version": version}
    if asked.identity is not None:
        content["id"] = asked.identity
    content["outputs"] = entries
    if is_finite:
        text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    else:  # NaN and Infinity, for which orjson writes null
        text = json.dumps(content, default=_listed).encode()
    return b"".join((text, *raw)), len(text) if raw else None


def metadata(name: str, version: str, model: LoadedModel) -> dict[str, Any]:
    """Returns what the protocol tells of a model."""

    def described(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
        return [
            {
                "name": spec.name,
                "datatype": DATATYPES[spec.dtype],
                "shape": _pattern(spec),
            }
            for spec in specs
        ]

    return {
        "name": name,
        "versions": [version],
        "platform": model.runtime,
        "inputs": described(model.signature.inputs),
        "outputs": described(model.signature.outputs),
    }


def _bad(message: str) -> Refusal:
    return Refusal(400, message)


def _pattern(spec: TensorSpec) -> list[int]:
    """Returns a shape as the protocol tells it, with -1 for a length that is free."""
    return [-1 if length is None else length for length in spec.shape]


def _object(text: bytes) -> dict[str, Any]:
    """Returns the object that JSON holds; NaN and Infinity are taken, too."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        found = error
        if b"NaN" in text or b"Infinity" in text:
            try:
                found = json.loads(text)
                # What no answer could repeat, such as a half of a character.
                orjson.dumps(found.get("id") if isinstance(found, dict) else None)
            except (ValueError, TypeError, RecursionError) as other:
                found = other
        if isinstance(found, Exception):
            raise _bad(
                f"The body is not JSON ({found}); expected an object. Correct it."
            ) from error
    if not isinstance(found, dict):
        raise _bad(
            f"The body is a JSON {type(found).__name__}; expected an object. Put what "
            "you send between braces, under the names of the protocol."
        )
    return found


def _tensor(
    entry: Mapping[str, Any], spec: TensorSpec, binary: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Returns an input, and the raw bytes that are left for those behind it."""
    expected = DATATYPES[spec.dtype]
    if entry.get("datatype") != expected:
        raise _bad(
            f"Input {spec.name!r} is of datatype {quoted(entry.get('datatype'))}; "
            f"expected {expected!r}. Cast it and name that."
        )
    shape: Any = entry.get("shape")
    fits = isinstance(shape, list) and len(shape) == len(spec.shape)
    if not fits or not all(
        _is_length(length) and length > 0 and wanted in (None, length)
        for length, wanted in zip(shape, spec.shape, strict=True)
    ):
        raise _bad(
            f"Input {spec.name!r} is of shape {quoted(shape)}; expected "
            f"{_pattern(spec)}, where -1 is any length above 0 and the first is the "
            "number of examples. Reshape it."
        )
    parameters = _field(entry, "parameters", dict, f"input {spec.name!r}") or {}
    if any(name.startswith("shared_memory") for name in parameters):
        raise _bad(
            f"Input {spec.name!r} lies in shared memory, which this server does not "
            "read. Send the tensor as bytes, with `binary_data_size`."
        )
    size, data = parameters.get("binary_data_size"), entry.get("data")
    count = math.prod(shape)
    if size is not None:
        if "data" in entry or not _is_length(size) or size > len(binary):
            beside = " and `data` beside it" if "data" in entry else ""
            raise _bad(
                f"Input {spec.name!r} has the `binary_data_size` {quoted(size)} where "
                f"{len(binary)} bytes are left{beside}; expected as many bytes behind "
                "the JSON and no `data`. Set Inference-Header-Content-Length to the "
                "length of the JSON."
            )
        array = _from_bytes(binary[:size], count, spec)
        return array.reshape(shape), binary[size:]
    if not isinstance(data, list):
        raise _bad(
            f"Input {spec.name!r} has neither `data` in a list nor the parameter "
            "`binary_data_size`; expected one of them. Send the tensor."
        )
    array = _from_json(data, spec)
    if array.size != count or array.ndim != 1 and list(array.shape) != shape:
        raise _bad(
            f"Input {spec.name!r} has data of shape {list(array.shape)}; expected "
            f"{count} numbers, as its shape is {shape}. Correct one of them."
        )
    return array.reshape(shape), binary


def _from_json(data: list[Any], spec: TensorSpec) -> np.ndarray:
    """Returns lists of JSON, nested or flat, as an array of an input's dtype."""
    wanted = dtype_named(spec.dtype)
    kind = "f" if wanted.kind == _EXTRA else wanted.kind
    try:
        found = np.array(data, dtype=object if kind == "O" else None)
    except (ValueError, OverflowError):  # ragged, or an integer beyond 64 bits
        found = np.array(None)
    if kind == "O":
        if not all(isinstance(each, str) for each in found.flat):
            raise _bad(
                f"Input {spec.name!r} is {quoted(data)}; expected texts in lists. "
                "Send nothing else."
            )
        return found
    if found.dtype.kind not in _KINDS[kind]:
        raise _bad(
            f"Input {spec.name!r} is {quoted(data)}; expected {_WORDS[kind]} for "
            f"{spec.dtype} in nested lists, those of a level all of one length. Send "
            "neither null nor text, and no other kind of number."
        )
    with np.errstate(over="ignore", invalid="ignore"):
        array = found.astype(wanted)
    fits = np.isfinite(array) | ~np.isfinite(found) if kind == "f" else array == found
    if not np.all(fits):
        raise _bad(
            f"Input {spec.name!r} has {found[~fits][0]!s}, which is beyond what "
            f"{spec.dtype} holds. Send numbers within its range."
        )
    return array


def _from_bytes(data: memoryview, count: int, spec: TensorSpec) -> np.ndarray:
    """Returns raw little-endian bytes, or texts behind their lengths, as an array."""
    wanted = dtype_named(spec.dtype)
    if wanted.kind == "O":
        texts, place = [], 0
        while place + 4 <= len(data):
            (length,) = struct.unpack_from("<I", data, place)
            texts.append(bytes(data[place + 4 : place + 4 + length]))
            place += 4 + length
        if place != len(data) or len(texts) != count:
            raise _bad(
                f"Input {spec.name!r} has {len(data)} bytes; expected {count} texts, "
                "each behind its length as four bytes. Correct `shape` or the data."
            )
        return np.array(texts, dtype=object)
    if len(data) != count * wanted.itemsize:
        raise _bad(
            f"Input {spec.name!r} has {len(data)} bytes; expected "
            f"{count * wanted.itemsize}, for {count} elements of {spec.dtype} with "
            f"{wanted.itemsize} each. Correct `shape` or `binary_data_size`."
        )
    # A copy stands where the runtime wants it, and does not keep the body alive.
    return np.frombuffer(data, wanted).copy()


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
    by_default = _field(parameters, "binary_data_output", bool)
    if not content.get("outputs"):
        return dict.fromkeys(names, bool(by_default))
    found = {}
    for entry in _objects(content, "outputs"):
        name = _field(entry, "name", str, "an output", is_needed=True)
        if name not in names:
            raise unknown("output", name, names, 400)
        parameters = _field(entry, "parameters", dict, f"output {name!r}") or {}
        for strange in parameters.keys() - {"binary_data"}:
            raise _bad(
                f"Output {name!r} has the parameter {quoted(strange)}; expected "
                "'binary_data' alone. Leave it out."
            )
        own = _field(parameters, "binary_data", bool)
        found[name] = bool(by_default if own is None else own)
    return found


def _objects(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise _bad(
            f"`{name}` is {quoted(entries)}; expected a list of objects, each with a "
            "`name`. Send one for each tensor."
        )
    return entries


def _field(
    entry: Mapping[str, Any],
    key: str,
    kind: type,
    what: str = "the request",
    *,
    is_needed: bool = False,
) -> Any:
    """Returns a field of `what`; None where it is not there."""
    value = entry.get(key)
    if not (isinstance(value, kind) or (value is None and not is_needed)):
        raise _bad(f"`{key}` of {what} is {quoted(value)}; expected {_FIELDS[kind]}.")
    return value


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
