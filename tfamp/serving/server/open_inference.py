"""The Open Inference Protocol v2: JSON, and tensors as raw bytes behind it.

Source: KServe's Open Inference Protocol, and its binary tensor data extension (read in
November 2026).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec
from tfamp.serving.server import bodies, tensors
from tfamp.serving.server.tensors import Refusal, quoted, unknown

# Header with the length of the JSON, where raw bytes follow it.
HEADER = b"inference-header-content-length"
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


def read(body: bytes, header_length: bytes | None, signature: Signature) -> Asked:
    """Returns what an `infer` request asks for; the header gives its JSON's length.

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
    content = bodies.read_json(body[:length])
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
    identity = _field(content, "id", str)
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
        dtype = "object" if array.dtype.kind in "OSU" else array.dtype.name
        entry: dict[str, Any] = {
            "name": output,
            "datatype": tensors.DATATYPES[dtype],
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
    text = bodies.write_json({**content, "outputs": entries}, arrays)
    if not raw:
        return text, None
    return b"".join((text, *raw)), len(text)


def metadata(name: str, versions: list[str], model: LoadedModel) -> dict[str, Any]:
    """Returns what the protocol tells of a model."""
    return {
        "name": name,
        "versions": versions,
        "platform": model.runtime,
        "inputs": list(map(_described, model.signature.inputs)),
        "outputs": list(map(_described, model.signature.outputs)),
    }


def _described(spec: TensorSpec) -> dict[str, Any]:
    shape, datatype = tensors.pattern(spec.shape), tensors.DATATYPES[spec.dtype]
    return {"name": spec.name, "datatype": datatype, "shape": shape}


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
    parameters = _field(entry, "parameters", dict, f"input {spec.name!r}") or {}
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
    what: str = "",
    *,
    is_needed: bool = False,
) -> Any:
    """Returns a field of a request or of `what`; None where it is not there."""
    value = entry.get(key)
    if not (isinstance(value, kind) or (value is None and not is_needed)):
        of = f" of {what}" if what else ""
        raise Refusal(400, f"`{key}`{of} is {quoted(value)}; expected {_KINDS[kind]}.")
    return value


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48
