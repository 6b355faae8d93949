"""The Open Inference Protocol v2: JSON, and tensors as raw bytes behind it.

Source: KServe's Open Inference Protocol, and its binary tensor data extension (read in
November 2026).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfamp.serving.runtimes.signature import Signature, TensorSpec
from tfamp.serving.server import json_text, tensors
from tfamp.serving.server.refusals import Refusal, quoted, unknown

# Header with the length of the JSON, where raw bytes follow it.
HEADER = b"inference-header-content-length"


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


def read(body: bytes, header_length: bytes | None, signature: Signature) -> Asked:
    """Returns what an `infer` request asks for.

    Args:
        body: All of it.
        header_length: The header of the length of the JSON; None without one.
        signature: The model's.

    Raises:
        Refusal: It is not what the protocol or the model takes.
    """
    length = len(body)
    if header_length is not None:
        if not header_length.isdigit() or not 0 < int(header_length) <= len(body):
            raise Refusal(
                400,
                "Inference-Header-Content-Length is "
                f"{quoted(header_length.decode('latin-1'))}; expected the bytes of the "
                f"JSON, from 1 to {len(body)}. Correct it.",
            )
        length = int(header_length)
    content = json_text.read(body[:length])
    binary = memoryview(body)[length:]
    inputs: dict[str, np.ndarray] = {}
    specs = {spec.name: spec for spec in signature.inputs}
    for entry in _objects(content, "inputs"):
        name = _text(entry, "name", "an input")
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
    identity = content.get("id")
    if identity is not None and not isinstance(identity, str):
        raise Refusal(400, f"`id` is {quoted(identity)}; expected text.")
    inputs = tensors.check_inputs(inputs, signature.inputs)
    return Asked(inputs, _wanted(content, signature), identity)


def write(
    asked: Asked, outputs: Mapping[str, np.ndarray], name: str, version: str
) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow."""
    entries, raw = [], []
    arrays: list[np.ndarray] = []
    for output, binary in asked.outputs.items():
        array = outputs[output]
        entry: dict[str, Any] = {
            "name": output,
            "datatype": tensors.DATATYPES[_dtype_name(array)],
            "shape": list(array.shape),
        }
        if binary:
            raw.append(tensors.to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            data = tensors.plain(array)
            entry["data"] = data
            if isinstance(data, np.ndarray):
                entry["data"] = data.ravel()
                arrays.append(data)
        entries.append(entry)
    content: dict[str, Any] = {"model_name": name, "model_version": version}
    if asked.identity is not None:
        content["id"] = asked.identity
    text = json_text.write({**content, "outputs": entries}, arrays)
    if not raw:
        return text, None
    return b"".join((text, *raw)), len(text)


def metadata(
    name: str, versions: list[str], signature: Signature, runtime: str
) -> dict[str, Any]:
    """Returns what the protocol tells of a model."""
    return {
        "name": name,
        "versions": versions,
        "platform": runtime,
        "inputs": [tensors.described(spec) for spec in signature.inputs],
        "outputs": [tensors.described(spec) for spec in signature.outputs],
    }


def _dtype_name(array: np.ndarray) -> str:
    return "object" if array.dtype.kind in "OSU" else array.dtype.name


def _tensor(
    entry: Mapping[str, Any], spec: TensorSpec, binary: memoryview
) -> tuple[np.ndarray, memoryview]:
    """Returns an input, and the raw bytes that are left for those behind it."""
    expected = tensors.DATATYPES[spec.dtype]
    if entry.get("datatype") != expected:
        raise Refusal(
            400,
            f"Input {spec.name!r} is of datatype {quoted(entry.get('datatype'))}; "
            f"expected {expected!r}. Cast it and name that.",
        )
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(map(_is_length, shape)):
        raise Refusal(
            400,
            f"Input {spec.name!r} has the shape {quoted(shape)}; expected a list of "
            "lengths. Name the number of examples first.",
        )
    parameters = _parameters(entry, f"input {spec.name!r}")
    for name in parameters:
        if name.startswith("shared_memory"):
            raise Refusal(
                400,
                f"Input {spec.name!r} lies in shared memory, which this server does "
                "not read. Send the tensor as bytes, with `binary_data_size`.",
            )
    size = parameters.get("binary_data_size")
    if size is None:
        return _listed(entry, shape, spec), binary
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


def _listed(entry: Mapping[str, Any], shape: list[int], spec: TensorSpec) -> np.ndarray:
    """Returns an input that came as JSON, flat or nested."""
    if not isinstance(entry.get("data"), list):
        raise Refusal(
            400,
            f"Input {spec.name!r} has neither `data` in a list nor the parameter "
            "`binary_data_size`; expected one of them. Send the tensor.",
        )
    array = tensors.from_json(entry["data"], spec)
    count = 1
    for length in shape:
        count *= length
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
    by_default = _flag(_parameters(content, "the request"), "binary_data_output")
    if not content.get("outputs"):
        return dict.fromkeys(names, bool(by_default))
    found = {}
    for entry in _objects(content, "outputs"):
        name = _text(entry, "name", "an output")
        if name not in names:
            raise unknown("output", name, names, 400)
        parameters = _parameters(entry, f"output {name!r}")
        for strange in parameters.keys() - {"binary_data"}:
            raise Refusal(
                400,
                f"Output {name!r} has the parameter {quoted(strange)}; expected "
                "'binary_data' alone. Leave it out.",
            )
        own = _flag(parameters, "binary_data")
        found[name] = bool(by_default if own is None else own)
    return found


def _flag(parameters: Mapping[str, Any], name: str) -> bool | None:
    value = parameters.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal(400, f"`{name}` is {quoted(value)}; expected true or false.")
    return value


def _objects(content: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries = content.get(name)
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise Refusal(
            400,
            f"`{name}` is {quoted(entries)}; expected a list of objects, each with a "
            "`name`. Send one for each tensor.",
        )
    return entries


def _text(entry: Mapping[str, Any], key: str, what: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise Refusal(400, f"`{key}` of {what} is {quoted(value)}; expected text.")
    return value


def _parameters(entry: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    found = entry.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise Refusal(
            400, f"`parameters` of {what} is {quoted(found)}; expected an object."
        )
    return found


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
