"""The first examples of what `fit` is given, read without any effect.

Arrays are cut. Of a `tf.data.Dataset` a copy of its graph is read, without shuffles and
caches, so that its next pass has the order that it would have had; where code of the
user's in Python would run, nothing is read. A graph that holds much data is not copied:
then its elements are read ahead of the shuffle.

Relies on: `DatasetToGraphV2` and `DatasetFromGraph` giving a dataset that shares no
state with the first; a dataset's `_inputs` and `_functions`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from tfamp.stepping.arguments import arrays_of

# Stages that change the order, the number or the place of elements, and not themselves.
_PASSED_BY = ("Shuffle", "Cache", "Repeat", "Prefetch")
_AROUND_SHUFFLES = ("Batch", "Repeat", "Prefetch", "Options", "Shuffle", "Take")
_MAX_COPIED_BYTES = 2**25


def first_examples(arguments: Mapping[str, Any], count: int) -> Any | None:
    """Returns a batch as `fit` would draw it, None where reading it has effects.

    Args:
        arguments: Those of `fit` or `train_on_batch`, by name.
        count: Examples in it, at most.
    """
    x, y = arguments.get("x"), arguments.get("y")
    if isinstance(x, tf.data.Dataset):
        return _of_dataset(x, count)
    if x is None or hasattr(x, "__next__") or isinstance(x, keras.utils.PyDataset):
        return None
    given = (x, y, arguments.get("sample_weight"))
    arrays = arrays_of(given[: 2 if given[2] is None else 3], needs_targets=False)
    return None if arrays is None else _cut(arrays, count)


def _cut(batch: Any, count: int) -> Any:
    return tf.nest.map_structure(lambda x: x[:count], batch)


def _of_dataset(dataset: tf.data.Dataset, count: int) -> Any | None:
    stages = list(_stages(dataset))
    if any(map(_runs_python, stages)):
        return None
    size = sum(_held_bytes(stage) for stage in stages)
    if size <= _MAX_COPIED_BYTES:
        chosen = _copied(dataset)
    else:
        chosen = _ahead_of_shuffles(dataset, stages, count)
    for batch in () if chosen is None else chosen.take(1):
        return _cut(batch, count)
    return None


def _stages(dataset: Any) -> Iterator[Any]:
    yield dataset
    for each in dataset._inputs():
        yield from _stages(each)


def _is(stage: Any, names: tuple[str, ...]) -> bool:
    return any(name in type(stage).__name__ for name in names)


def _runs_python(stage: Any) -> bool:
    """States whether reading a stage runs a user's Python code, or files another's."""
    graphs = [each.function.graph for each in stage._functions()]
    operations = [op for graph in graphs for op in graph.as_graph_def().node]
    functions = [f for graph in graphs for f in graph.as_graph_def().library.function]
    operations += [op for function in functions for op in function.node_def]
    is_foreign = _is(stage, ("Generator", "Variant", "Iterator", "Service"))
    return is_foreign or any("PyFunc" in each.op for each in operations)


def _held_bytes(stage: Any) -> int:
    tensors = getattr(stage, "_tensors", ())
    return sum(int(tf.size(t)) * int(t.dtype.size) for t in tensors)


def _copied(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of the same graph, without what has state."""
    written = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor, external_state_policy=1
    )
    graph = tf.compat.v1.GraphDef.FromString(written.numpy())
    instead = {
        node.name: node.input[0]
        for node in graph.node
        if any(f"{name}Dataset" in node.op for name in _PASSED_BY)
    }
    for node in graph.node:
        for place, name in enumerate(node.input):
            while name.split(":")[0] in instead:
                name = instead[name.split(":")[0]]
            node.input[place] = name
    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph.SerializeToString())
    return dataset_ops._VariantDataset(variant, dataset.element_spec)


def _ahead_of_shuffles(
    dataset: tf.data.Dataset, stages: list[Any], count: int
) -> tf.data.Dataset | None:
    """Returns the elements that a shuffle is given, None where more is made of them."""
    if any(_is(stage, ("Cache",)) for stage in stages):
        return None
    if not any(_is(stage, ("Shuffle",)) for stage in stages):
        return dataset
    stage, is_batched, rest = dataset, False, sum(_is(s, ("Shuffle",)) for s in stages)
    while rest:
        if not _is(stage, _AROUND_SHUFFLES):
            return None
        is_batched |= _is(stage, ("Batch",))
        rest -= _is(stage, ("Shuffle",))
        (stage,) = stage._inputs()
    return stage.batch(count) if is_batched else stage
