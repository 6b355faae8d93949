"""Batches as plain arrays and a description of how they are packed, and back.

A description is made of dicts that JSON can hold, each with a "kind": "none", "tensor",
"text" (strings), "ragged", "sparse", "tuple", "list", "dict", or "scalar" (a number of
Python).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def pack(
    data: Any, name: str, arrays: dict[str, np.ndarray], shapes: Mapping[int, Any]
) -> dict[str, Any]:
    """Returns the description of a part of a batch.

    Args:
        data: Tensors in tuples, lists and dicts, with None among them.
        name: What the names of its arrays begin with.
        arrays: Gets the arrays.
        shapes: For the identity of a tensor the shape that its graph knew, with None
            where it varied; of others their own shape is taken.

    Example:
        >>> arrays = {}
        >>> description = pack((tf.constant([1, 2]), None), "0", arrays, {})
        >>> [item["kind"] for item in description["items"]], list(arrays)
        (['tensor', 'none'], ['0/0'])
        >>> unpack(description, arrays)[0].numpy()
        array([1, 2], dtype=int32)
    """
    if data is None or isinstance(data, tf.experimental.Optional):
        return {"kind": "none"}
    if isinstance(data, (bool, int, float)):
        return {"kind": "scalar", "value": data}
    if isinstance(data, Mapping):
        items = [
            [key, pack(value, f"{name}/{i}", arrays, shapes)]
            for i, (key, value) in enumerate(data.items())
        ]
        return {"kind": "dict", "items": items}
    if isinstance(data, (tuple, list)):
        kind = "list" if isinstance(data, list) else "tuple"
        packed = [pack(v, f"{name}/{i}", arrays, shapes) for i, v in enumerate(data)]
        return {"kind": kind, "items": packed}
    if isinstance(data, tf.RaggedTensor):
        inner = {"values": data.values, "splits": data.row_splits}
    elif isinstance(data, tf.SparseTensor):
        inner = {
            "indices": data.indices,
            "values": data.values,
            "dense_shape": data.dense_shape,
        }
    else:
        return _pack_tensor(data, name, arrays, shapes)
    kind = "ragged" if isinstance(data, tf.RaggedTensor) else "sparse"
    return {
        "kind": kind,
        **{
            key: pack(value, f"{name}/{key}", arrays, shapes)
            for key, value in inner.items()
        },
    }


def unpack(description: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns what `pack` described, with tensors again.

    Raises:
        ValueError: The description is none, or names an array that is not there.
    """
    kind = description.get("kind")
    if kind == "none":
        return None
    if kind == "scalar":
        return description["value"]
    if kind == "dict":
        return {key: unpack(item, arrays) for key, item in description["items"]}
    if kind in ("tuple", "list"):
        items = [unpack(item, arrays) for item in description["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "ragged":
        return tf.RaggedTensor.from_row_splits(
            unpack(description["values"], arrays),
            unpack(description["splits"], arrays),
            validate=False,
        )
    if kind == "sparse":
        return tf.SparseTensor(
            *(unpack(description[k], arrays) for k in _SPARSE_FIELDS)
        )
    if kind in ("tensor", "text"):
        return tf.constant(_array_of(description, arrays), description["dtype"])
    raise ValueError(
        f"Found a part of a batch of kind {kind!r}; expected a kind that "
        "`tfamp.stepping.bundles.packing` lists. Update tfamp if a later version "
        "wrote it."
    )


_SPARSE_FIELDS = ("indices", "values", "dense_shape")


def leaves(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the descriptions of all dense tensors in one, in order."""
    kind = description.get("kind")
    if kind in ("tensor", "text"):
        return [description]
    if kind == "dict":
        inner = [item for _, item in description["items"]]
    elif kind in ("tuple", "list"):
        inner = description["items"]
    elif kind == "ragged":
        inner = [description["values"], description["splits"]]
    elif kind == "sparse":
        inner = [description[key] for key in _SPARSE_FIELDS]
    else:
        inner = []
    return [leaf for item in inner for leaf in leaves(item)]


def repack(description: Mapping[str, Any], flat: list[Any]) -> Any:
    """Returns the structure of a description around other dense tensors.

    Args:
        description: As `pack` returned it.
        flat: A tensor for each of `leaves`, which are taken out of the list.
    """
    kind = description["kind"]
    if kind in ("tensor", "text"):
        return flat.pop(0)
    if kind == "dict":
        return {key: repack(item, flat) for key, item in description["items"]}
    if kind in ("tuple", "list"):
        items = [repack(item, flat) for item in description["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "ragged":
        values = repack(description["values"], flat)
        splits = repack(description["splits"], flat)
        return tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    if kind == "sparse":
        return tf.SparseTensor(*(repack(description[k], flat) for k in _SPARSE_FIELDS))
    return unpack(description, {})


def array_of(leaf: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the numbers or strings of one of `leaves`."""
    return _array_of(leaf, arrays)


def _pack_tensor(
    data: Any, name: str, arrays: dict[str, np.ndarray], shapes: Mapping[int, Any]
) -> dict[str, Any]:
    tensor = tf.convert_to_tensor(data)
    array = np.asarray(tensor)
    described = {
        "name": name,
        "dtype": tensor.dtype.name,
        "shape": list(array.shape),
        "graph_shape": shapes.get(id(data), list(array.shape)),
    }
    if tensor.dtype != tf.string:
        arrays[name] = array
        return {"kind": "tensor", **described}
    texts = [bytes(text) for text in array.ravel()]
    arrays[f"{name}/bytes"] = np.frombuffer(b"".join(texts), np.uint8)
    arrays[f"{name}/lengths"] = np.array([len(text) for text in texts], np.int64)
    return {"kind": "text", **described}


def _array_of(
    description: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
    name = description["name"]
    try:
        if description["kind"] == "tensor":
            return arrays[name]
        joined = arrays[f"{name}/bytes"].tobytes()
        lengths = arrays[f"{name}/lengths"]
    except KeyError as error:
        raise ValueError(
            f"The array {error.args[0]!r} of a batch is missing in the bundle; "
            "expected every array that its record names. Take another bundle."
        ) from error
    texts = np.empty(len(lengths), object)
    ends = np.cumsum(lengths, dtype=np.int64)
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        texts[i] = joined[end - length : end]
    return texts.reshape(description["shape"])
