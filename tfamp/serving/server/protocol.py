"""The Open Inference Protocol v2: JSON, and tensors as raw bytes behind it.

Nothing is cast silently: what does not fit is refused with a message, a `Refusal`.

Source: KServe's Open Inference Protocol and its binary extension (November 2026).
"""

import json
import reprlib
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson
from starlette.exceptions import HTTPException

from tfamp.records import checks
from tfamp.serving.runtimes import signature as signatures
from tfamp.serving.runtimes.signature import DATATYPES, LoadedModel, Signature

HEADER = "inference-header-content-length"  # of the JSON, where raw bytes follow it
VERSION = "1"
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
    told = f"There is no {what} {quoted(name)}; expected {', '.join(map(repr, names))}"
    return Refusal(status, f"{told}. {advice}")


def quoted(value: object) -> str:
    """Returns the beginning of what came, however much it is."""
    return _SHORT.repr(value)


class Asked(NamedTuple):
    """What a request asks for; outputs by name, each as raw bytes or not."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    identity: Any


def json_length(body: bytes, marked: str | None) -> int:
    """Returns the length of the JSON in a body, which a header may mark."""
    if marked is None:
        return len(body)
    is_number = marked.isascii() and marked.isdigit() and len(marked) < 20
    if not is_number or not 0 < int(marked) <= len(body):
        told = f"Inference-Header-Content-Length is {quoted(marked)}; expected from 1 "
        raise Refusal(400, f"{told}to {len(body)}, the bytes of the JSON. Correct it.")
    return int(marked)


def read(body: bytes, marked: str | None, signature: Signature) -> Asked:
    """Returns what an `infer` request of JSON and raw bytes behind it asks for."""
    length = json_length(body, marked)
    text = body[:length]
    try:
        is_strict = b"NaN" not in text and b"Infinity" not in text
        content = orjson.loads(text) if is_strict else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The body is not JSON ({error}). Send an object.") from None
    try:
        return _asked(content, memoryview(body)[length:], signature)
    except (KeyError, AttributeError) as error:
        told = f"is JSON of another form ({type(error).__name__}: {error})"
    except (TypeError, ValueError, OverflowError) as error:
        told = f"does not fit: {error}"
    wanted = '{"inputs": [{"name": "", "datatype": "", "shape": [], "data": []}]}'
    advice = "Compare it with the metadata of the model."
    raise Refusal(400, f"The body {told}; expected {wanted}. {advice}")


def _asked(content: Any, binary: memoryview, signature: Signature) -> Asked:
    inputs: dict[str, np.ndarray] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for entry in content["inputs"]:
        if (name := entry["name"]) not in specs:
            raise unknown("input", str(name), specs, 400)
        if name in inputs:
            raise ValueError(f"input {name!r} came twice")
        inputs[name], binary = _tensor(entry, specs[name], binary)
    if binary:
        raise ValueError(f"{len(binary)} bytes follow the last `binary_data_size`")
    if missing := [name for name in specs if name not in inputs]:
        raise ValueError(f"inputs are {list(inputs)}; add {missing}")
    lengths = {name: len(array) for name, array in inputs.items()}
    if len({*lengths.values()}) > 1:
        raise ValueError(f"inputs have {lengths} examples; send as many of each")
    in_bytes = bool(_parameters(content).get("binary_data_output"))
    outputs = dict.fromkeys((spec.name for spec in signature.outputs), in_bytes)
    if entries := content.get("outputs"):
        wanted = {each["name"]: _parameters(each) for each in entries}
        for name in wanted:
            if name not in outputs:
                raise unknown("output", str(name), outputs, 400)
        outputs = {k: bool(x.get("binary_data", in_bytes)) for k, x in wanted.items()}
    ordered = {name: inputs[name] for name in specs}
    orjson.dumps(content.get("id"))  # no answer repeats a half of a character
    return Asked(ordered, outputs, content.get("id"))


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**(entry.get("parameters") or {})}


def _tensor(
    entry: Mapping[str, Any], spec: signatures.TensorSpec, binary: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Returns an input, and the raw bytes that are left for those behind it."""
    shape, dtype = entry["shape"], signatures.dtype_named(spec.dtype)
    if entry["datatype"] != DATATYPES[spec.dtype]:
        came = f"input {spec.name!r} is of datatype {quoted(entry['datatype'])}"
        raise ValueError(f"{came}, not {DATATYPES[spec.dtype]!r}")
    size = _parameters(entry).get("binary_data_size")
    if size is None:
        data = np.asarray(entry["data"], object if dtype.kind == "O" else None)
        if dtype.kind == "O" and not all(isinstance(x, str) for x in data.flat):
            raise ValueError(f"input {spec.name!r} holds what is no text")
    elif type(size) is not int or not 0 <= size <= len(binary) or "data" in entry:
        told = f"input {spec.name!r} has the `binary_data_size` {quoted(size)}, where "
        raise ValueError(f"{told}{len(binary)} bytes are left, or `data` too")
    elif dtype.kind == "O":
        texts, place = [], 0
        while place + 4 <= size:
            (length,) = struct.unpack_from("<I", binary, place)
            texts.append(bytes(binary[place + 4 : place + 4 + length]))
            place += 4 + length
        if place != size:
            raise ValueError(f"input {spec.name!r} has {size} bytes, not {place}")
        data = np.array(texts, object)
    else:
        # A copy stands where the runtime wants it, and lets go of the body.
        data = np.frombuffer(binary[:size], dtype).copy()
    array = data.reshape(shape) if data.ndim == 1 else data
    if list(array.shape) != shape or not array.size:
        told = f"input {spec.name!r} has data of shape {list(data.shape)}, and says "
        raise ValueError(f"{told}{quoted(shape)}; no length is 0")
    return signatures.checked(array, spec), binary[size or 0 :]


def write(
    asked: Asked, outputs: Mapping[str, np.ndarray], name: str
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow."""
    entries, raw, is_finite = [], [], True
    for output, binary in asked.outputs.items():
        array, texts = np.ascontiguousarray(outputs[output]), None
        if array.dtype.kind in "OSU":
            texts = [x if isinstance(x, bytes) else str(x).encode() for x in array.flat]
        dtype = array.dtype.name if texts is None else "object"
        entry: dict[str, Any] = {"name": output, "datatype": DATATYPES[dtype]}
        entry["shape"] = list(array.shape)
        if binary:
            parts = (struct.pack("<I", len(text)) + text for text in texts or ())
            raw.append(array.tobytes() if texts is None else b"".join(parts))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        elif texts is not None:
            entry["data"] = [text.decode(errors="replace") for text in texts]
        else:
            entry["data"] = array.ravel()
            is_finite &= array.dtype.kind != "f" or bool(np.isfinite(array).all())
        entries.append(entry)
    content: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if asked.identity is not None:
        content["id"] = asked.identity
    content["outputs"] = entries
    if is_finite:
        text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    else:  # NaN and Infinity, for which orjson writes null
        text = json.dumps(content, default=np.ndarray.tolist).encode()
    return b"".join((text, *raw)), len(text) if raw else None


def metadata(name: str, model: LoadedModel) -> dict[str, Any]:
    """Returns what the protocol tells of a model: -1 is a length that is free."""

    def metadata_of(spec: signatures.TensorSpec) -> dict[str, Any]:
        shape = [-1 if length is None else length for length in spec.shape]
        return {"name": spec.name, "datatype": DATATYPES[spec.dtype], "shape": shape}

    about = {"name": name, "versions": [VERSION], "platform": model.runtime}
    inputs, outputs = model.signature.inputs, model.signature.outputs
    return {
        **about,
        "inputs": [*map(metadata_of, inputs)],
        "outputs": [*map(metadata_of, outputs)],
    }
