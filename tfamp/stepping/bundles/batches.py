"""The batches of a bundle: arrays with a description of their structure, and back.

A description is made of dicts that JSON can hold, each with a "kind": "none", "tensor",
"text" (strings, serialized by TensorFlow), "ragged", "sparse", "tuple", "list", "dict",
or "scalar" (a number of Python).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.stepping.bundles.files import Contents
from tfamp.stepping.bundles.record import Batch, Call

_Description = Mapping[str, Any]


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
    """
    if data is None or isinstance(data, tf.experimental.Optional):
        return {"kind": "none"}
    if isinstance(data, (bool, int, float)):
        return {"kind": "scalar", "value": data}
    described: dict[str, Any]
    if isinstance(data, Mapping):
        described, items = {"kind": "dict", "keys": list(data)}, list(data.values())
    elif isinstance(data, (tuple, list)):
        described = {"kind": "list" if isinstance(data, list) else "tuple"}
        items = list(data)
    elif isinstance(data, tf.RaggedTensor):
        described, items = {"kind": "ragged"}, [data.values, data.row_splits]
    elif isinstance(data, tf.SparseTensor):
        described = {"kind": "sparse"}
        items = [data.indices, data.values, data.dense_shape]
    else:
        tensor = tf.convert_to_tensor(data)
        is_text = tensor.dtype == tf.string
        if is_text:
            text = tf.io.serialize_tensor(tensor).numpy()
            arrays[name] = np.frombuffer(text, np.uint8)
        else:
            arrays[name] = np.asarray(tensor)
        return {
            "kind": "text" if is_text else "tensor",
            "name": name,
            "dtype": tensor.dtype.name,
            "shape": list(tensor.shape),
            "graph_shape": shapes.get(id(data), list(tensor.shape)),
        }
    packed = [pack(item, f"{name}/{i}", arrays, shapes) for i, item in enumerate(items)]
    return {**described, "items": packed}


def unpack(
    description: _Description,
    arrays: Mapping[str, np.ndarray],
    tensor_of: Callable[[_Description], Any] | None = None,
) -> Any:
    """Returns what `pack` described, with tensors again.

    `tensor_of` gives the tensor of each of `leaves`; None takes the arrays. Raises
    ValueError where the description is none, or names an array that is not there.
    """
    kind = description.get("kind")
    if kind in ("tensor", "text"):
        return tensor_of(description) if tensor_of else _tensor(description, arrays)
    items = [unpack(each, arrays, tensor_of) for each in description.get("items", ())]
    if kind == "dict":
        return dict(zip(description["keys"], items, strict=True))
    if kind == "ragged":
        return tf.RaggedTensor.from_row_splits(*items, validate=False)
    if kind == "sparse":
        return tf.SparseTensor(*items)
    if kind in ("tuple", "list"):
        return items if kind == "list" else tuple(items)
    if kind in ("none", "scalar"):
        return description.get("value")
    raise ValueError(
        f"Found a part of a batch of kind {kind!r}; expected a kind that "
        "`tfamp.stepping.bundles.batches` lists. Update tfamp if a later version "
        "wrote it."
    )


def leaves(description: _Description) -> list[_Description]:
    """Returns the descriptions of all dense tensors in one, in order."""
    if "dtype" in description:
        return [description]
    return [leaf for item in description.get("items", ()) for leaf in leaves(item)]


def part_of(contents: Contents, number: int, replica: int = 0) -> Any:
    """Returns the part of a batch that a replica trained on.

    Raises:
        ValueError: The batch is not kept.
    """
    return unpack(_batch(contents, number).parts[replica], contents.batches)


def iterator_of(
    contents: Contents, calls: Sequence[Call], strategy: tf.distribute.Strategy
) -> Any:
    """Returns an iterator over the batches of some calls in a row.

    Its batches have the shapes that the graph knew then: a dimension that is known is
    folded into constants, and that can change a bit. With a strategy each replica gets
    its part again.
    """
    batches = [
        _batch(contents, number)
        for call in calls
        for number in range(call.first, call.first + call.num_batches)
    ]
    parts = [part for batch in batches for part in batch.parts]
    signature = tuple(
        tf.TensorSpec(_common([leaf["graph_shape"] for leaf in same]), same[0]["dtype"])
        for same in zip(*map(leaves, parts), strict=True)
    )

    def generate() -> Iterator[tuple[Any, ...]]:
        for part in parts:
            yield tuple(_tensor(leaf, contents.batches) for leaf in leaves(part))

    def packed(*tensors: Any) -> Any:
        rest = iter(tensors)
        return unpack(parts[0], {}, lambda leaf: next(rest))

    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
    dataset = dataset.map(packed)
    if strategy.num_replicas_in_sync == 1:
        return iter(strategy.experimental_distribute_dataset(dataset))
    return iter(strategy.distribute_datasets_from_function(lambda context: dataset))


def _tensor(leaf: _Description, arrays: Mapping[str, np.ndarray]) -> tf.Tensor:
    array = arrays.get(leaf["name"])
    if array is None:
        raise ValueError(
            f"The array {leaf['name']!r} of a batch is missing in the bundle; expected "
            "every array that its record names. Take another bundle."
        )
    if leaf["kind"] == "text":
        return tf.io.parse_tensor(array.tobytes(), tf.string)
    return tf.constant(array, leaf["dtype"])


def _batch(contents: Contents, number: int) -> Batch:
    for batch in contents.record.batches:
        if batch.number == number:
            return batch
    kept = tuple(batch.number for batch in contents.record.batches)
    raise ValueError(
        f"Batch {number} is not in the bundle, which keeps {kept!r}; expected every "
        "batch of its calls. Take another bundle."
    )


def _common(shapes: Sequence[Any]) -> tuple[int | None, ...]:
    """Returns the shape that all of some shapes have, None where they differ.

    Example:
        >>> _common([[4, 3], [2, 3]])
        (None, 3)
    """
    sizes = (set(same) for same in zip(*shapes, strict=True))
    return tuple(same.pop() if len(same) == 1 else None for same in sizes)
