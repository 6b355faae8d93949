"""The Open Inference Protocol v2: JSON, and tensors as raw bytes behind it.

Source: KServe's Open Inference Protocol, and its binary tensor data extension (read in
November 2026).
"""

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from tfamp.serving.runtimes.signature import (
    DATATYPES,
    LoadedModel,
    Signature,
    TensorSpec,
)
from tfamp.serving.server import tensors
from tfamp.serving.server.tensors import Refusal, quoted, unknown

# Header with the length of the JSON, where raw bytes follow it.
HEADER = "inference-header-content-length"
_KINDS = {str: "text", bool: "true or false", dict: "an object"}


class Asked(NamedTuple):
    """What a request asks for.

    Args:
        inputs: Arrays by name.
        outputs: Name of each output that is wanted -> whether as raw bytes.
        identity: What the answer is marked with, as the client chose it.
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, bool]
    identity: str | None


def length_of(text: str, most: int) -> int:
    """Returns the length of the JSON that a header gives.

    Raises:
        Refusal: It is no number of bytes, or more than there are.
    """
    is_number = text.isascii() and text.isdigit() and len(text) < 20
    if not is_number or not 0 < int(text) <= most:
        raise Refusal(
            400,
            f"Inference-Header-Content-Length is {quoted(text)}; expected the bytes "
            f"of the JSON, from 1 to {most}. Correct it.",
        )
    return int(text)


def read(body: bytes, length: int, signature: Signature) -> Asked:
    """Returns what an `infer` request asks for.

    Args:
        body: JSON, and raw bytes behind it.
        length: Of the JSON.
        signature: Of the model.

    Raises:
        Refusal: It is not what the protocol or the model takes.
    """
    content = _object(body[:length])
    binary = memoryview(body)[length:]
    inputs: dict[str, np.ndarray] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for entry in _objects(content, "inputs"):
        name = _field(entry, "name", str, "an input", is_needed=True)
        if name not in specs:
            raise unknown("input", name, specs, 400)
        if name in inputs:
            raise Refusal(400, f"Input {name!r} came twice; send it once.")
        inputs[name], binary = _tensor(entry, specs[name], binary)
    if binary:
        raise Refusal(
            400,
            f"{len(binary)} bytes follow the last tensor; expected none. Give each "
            "input its `binary_data_size`.",
        )
    if missing := [name for name in specs if name not in inputs]:
        raise Refusal(
            400, f"Inputs are {list(inputs)}; expected {list(specs)}. Add {missing}."
        )
    lengths = {name: array.shape[0] for name, array in inputs.items() if array.ndim}
    if len({*lengths.values()}) > 1:
        raise Refusal(
            400,
            f"Inputs have {lengths} examples; expected one number. Send as many of "
            "each.",
        )
    return Asked(
        {name: inputs[name] for name in specs},
        _wanted(content, signature),
        _field(content, "id", str),
    )


def write(
    asked: Asked, outputs: Mapping[str, np.ndarray], name: str, version: str
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow."""
    entries, raw, is_finite = [], [], True
    for output, binary in asked.outputs.items():
        array = outputs[output]
        dtype = "object" if array.dtype.kind in "OSU" else array.dtype.name
        entry: dict[str, Any] = {
            "name": output,
            "datatype": DATATYPES[dtype],
            "shape": list(array.shape),
        }
        if binary:
            raw.append(tensors.to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            entry["data"] = data = tensors.to_json(array)
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

    def described(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
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


def _pattern(spec: TensorSpec) -> list[int]:
    """Returns a shape as the protocol tells it, with -1 for a length that is free."""
    return [-1 if length is None else length for length in spec.shape]


def _listed(array: np.ndarray) -> Any:
    # The shortest text that gives the same float32, as orjson writes it.
    if array.dtype.kind == "f":
        array = array.astype(str).astype(np.float64)
    return array.tolist()


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
            raise Refusal(
                400, f"The body is not JSON ({found}); expected an object. Correct it."
            ) from error
    if not isinstance(found, dict):
        raise Refusal(
            400,
            f"The body is a JSON {type(found).__name__}; expected an object. Put what "
            "you send between braces, under the names of the protocol.",
        )
    return found


def _tensor(
    entry: Mapping[str, Any], spec: TensorSpec, binary: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Returns an input, and the raw bytes that are left for those behind it."""
    expected = DATATYPES[spec.dtype]
    if entry.get("datatype") != expected:
        raise Refusal(
            400,
            f"Input {spec.name!r} is of datatype {quoted(entry.get('datatype'))}; "
            f"expected {expected!r}. Cast it and name that.",
        )
    shape = entry.get("shape")
    if not isinstance(shape, list) or not _fits(shape, spec):
        raise Refusal(
            400,
            f"Input {spec.name!r} is of shape {quoted(shape)}; expected "
            f"{_pattern(spec)}, where -1 is any length above 0 and the first is the "
            "number of examples. Reshape it.",
        )
    parameters = _field(entry, "parameters", dict, f"input {spec.name!r}") or {}
    if any(name.startswith("shared_memory") for name in parameters):
        raise Refusal(
            400,
            f"Input {spec.name!r} lies in shared memory, which this server does not "
            "read. Send the tensor as bytes, with `binary_data_size`.",
        )
    size = parameters.get("binary_data_size")
    if size is None:
        return _listed_tensor(entry, shape, spec), binary
    if "data" in entry or not _is_length(size) or size > len(binary):
        raise Refusal(
            400,
            f"Input {spec.name!r} has the `binary_data_size` {quoted(size)} where "
            f"{len(binary)} bytes are left"
            + (" and `data` beside it" if "data" in entry else "")
            + "; expected as many bytes behind the JSON and no `data`. Set "
            "Inference-Header-Content-Length to the length of the JSON.",
        )
    return tensors.from_bytes(binary[:size], shape, spec), binary[size:]


def _listed_tensor(
    entry: Mapping[str, Any], shape: list[int], spec: TensorSpec
) -> np.ndarray:
    """Returns an input that came as JSON, flat or nested."""
    if not isinstance(entry.get("data"), list):
        raise Refusal(
            400,
            f"Input {spec.name!r} has neither `data` in a list nor the parameter "
            "`binary_data_size`; expected one of them. Send the tensor.",
        )
    array = tensors.from_json(entry["data"], spec)
    count = math.prod(shape)
    if array.size != count or array.ndim != 1 and list(array.shape) != shape:
        raise Refusal(
            400,
            f"Input {spec.name!r} has data of shape {list(array.shape)}; expected "
            f"{count} numbers, as its shape is {shape}. Correct one of them.",
        )
    return array.reshape(shape)


def _wanted(content: Mapping[str, Any], signature: Signature) -> dict[str, bool]:
    """Returns the outputs that are wanted, and whether each as raw bytes."""
    names = [spec.name for spec in signature.outputs]
    parameters = _field(content, "parameters", dict, "the request") or {}
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
            raise Refusal(
                400,
                f"Output {name!r} has the parameter {quoted(strange)}; expected "
                "'binary_data' alone. Leave it out.",
            )
        own = _field(parameters, "binary_data", bool)
        found[name] = bool(by_default if own is None else own)
    return found


def _objects(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise Refusal(
            400,
            f"`{name}` is {quoted(entries)}; expected a list of objects, each with a "
            "`name`. Send one for each tensor.",
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
        raise Refusal(
            400, f"`{key}` of {what} is {quoted(value)}; expected {_KINDS[kind]}."
        )
    return value


def _fits(shape: list[Any], spec: TensorSpec) -> bool:
    return len(shape) == len(spec.shape) and all(
        _is_length(length) and length > 0 and wanted in (None, length)
        for length, wanted in zip(shape, spec.shape, strict=True)
    )


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
