"""TensorFlow Serving's Predict over REST: rows in `instances`, columns in `inputs`.

Source: the RESTful API of TensorFlow Serving (read in November 2026).
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfamp.serving.runtimes.signature import Signature, TensorSpec
from tfamp.serving.server import bodies, tensors
from tfamp.serving.server.tensors import Refusal, quoted, unknown

SIGNATURE_NAME = "serving_default"
_KEYS = ("instances", "inputs", "signature_name")


class Asked(NamedTuple):
    """What a request asks for: arrays by name, and whether they came as rows."""

    inputs: dict[str, np.ndarray]
    by_row: bool


def read(body: bytes, signature: Signature) -> Asked:
    """Returns what a `predict` request asks for.

    Raises:
        Refusal: It is not what the protocol or the model takes.
    """
    content = bodies.read_json(body)
    for key in content:
        if key not in _KEYS:
            raise unknown("key", key, _KEYS, 400)
    name = content.get("signature_name", SIGNATURE_NAME)
    if name not in ("", SIGNATURE_NAME):
        raise Refusal(
            400,
            f"`signature_name` is {quoted(name)}; expected {SIGNATURE_NAME!r}, the "
            "only one there is. Leave it out.",
        )
    by_row = "instances" in content
    if by_row is ("inputs" in content):
        raise Refusal(
            400,
            f"The body has {'both' if by_row else 'neither'} `instances` "
            f"{'and' if by_row else 'nor'} `inputs`; expected one: `instances` has a "
            "row for each example, `inputs` a tensor for each input.",
        )
    if by_row:
        columns = _columns(content["instances"], signature)
    else:
        columns = _tensors(content["inputs"], signature)
    specs = {spec.name: spec for spec in signature.inputs}
    arrays = {
        name: tensors.from_json(_decoded(data, specs[name]), specs[name])
        for name, data in columns.items()
    }
    return Asked(tensors.check_inputs(arrays, signature.inputs), by_row)


def write(asked: Asked, outputs: Mapping[str, np.ndarray]) -> bytes:
    """Returns the body of an answer, in rows or columns as the request came."""
    arrays = [array for array in outputs.values() if array.dtype.kind not in "OSU"]
    values = {name: _nested(array) for name, array in outputs.items()}
    if len(values) == 1:
        (found,) = values.values()
    elif asked.by_row:
        if len({array.shape[:1] for array in outputs.values()}) > 1:
            raise Refusal(
                400,
                "The outputs have no row for each example each. Send `inputs` in the "
                "place of `instances`.",
            )
        found = [
            dict(zip(values, row, strict=True))
            for row in zip(*values.values(), strict=True)
        ]
    else:
        found = values
    return bodies.write_json(
        {"predictions" if asked.by_row else "outputs": found}, arrays
    )


def status(versions: Iterable[str]) -> dict[str, Any]:
    """Returns what is told of the versions of a model that answer."""
    well = {"error_code": "OK", "error_message": ""}
    return {
        "model_version_status": [
            {"version": version, "state": "AVAILABLE", "status": well}
            for version in versions
        ]
    }


def metadata(name: str, version: str, signature: Signature) -> dict[str, Any]:
    """Returns what is told of a model's inputs and outputs."""
    described = {
        "inputs": {spec.name: _described(spec) for spec in signature.inputs},
        "outputs": {spec.name: _described(spec) for spec in signature.outputs},
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": name, "signature_name": "", "version": version},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE_NAME: described}}},
    }


def _described(spec: TensorSpec) -> dict[str, Any]:
    lengths = [{"size": str(n), "name": ""} for n in tensors.pattern(spec.shape)]
    return {
        "dtype": tensors.TF_DATATYPES[spec.dtype],
        "tensor_shape": {"dim": lengths, "unknown_rank": False},
        "name": spec.name,
    }


def _columns(rows: Any, signature: Signature) -> dict[str, Any]:
    """Returns the data of each input from rows."""
    names = [spec.name for spec in signature.inputs]
    if not isinstance(rows, list) or not rows:
        raise Refusal(
            400,
            f"`instances` is {quoted(rows)}; expected a list with a row for each "
            "example. Send at least one.",
        )
    named = [isinstance(row, dict) and row.keys() != {"b64"} for row in rows]
    if not any(named) and len(names) == 1:
        return {names[0]: rows}
    for row, is_named in zip(rows, named, strict=True):
        if not is_named or row.keys() != set(names):
            raise Refusal(
                400,
                f"A row of `instances` is {quoted(row)}; expected an object with the "
                f"inputs {names}. Write all rows alike.",
            )
    return {name: [row[name] for row in rows] for name in names}


def _tensors(inputs: Any, signature: Signature) -> dict[str, Any]:
    """Returns the data of each input from columns."""
    names = [spec.name for spec in signature.inputs]
    if isinstance(inputs, dict) and inputs.keys() != {"b64"}:
        for name in inputs:
            if name not in names:
                raise unknown("input", name, names, 400)
        return inputs
    if len(names) == 1:
        return {names[0]: inputs}
    raise Refusal(
        400,
        f"`inputs` is {quoted(inputs)}; expected an object with the inputs {names}. "
        "Name each tensor.",
    )


def _decoded(data: Any, spec: TensorSpec) -> Any:
    """Returns the data with bytes in the place of `{"b64": ...}`, for texts."""
    if tensors.TF_DATATYPES[spec.dtype] != "DT_STRING":
        return data
    if isinstance(data, list):
        return [_decoded(each, spec) for each in data]
    if isinstance(data, dict) and data.keys() == {"b64"}:
        try:
            return base64.b64decode(data["b64"], validate=True)
        except (binascii.Error, TypeError, ValueError) as error:
            raise Refusal(
                400,
                f"`b64` of input {spec.name!r} is {quoted(data['b64'])}; expected "
                "bytes in base64. Encode them so.",
            ) from error
    return data


def _nested(array: np.ndarray) -> Any:
    """Returns an array for JSON; texts as nested lists."""
    if array.dtype.kind not in "OSU":
        return tensors.plain(array)
    texts = np.array(tensors.plain(array), dtype=object)
    return texts.reshape(array.shape).tolist()
