"""What in a dataset cannot be shared out among processes, found in its graph.

Every worker runs the beginning of a dataset, up to the point where it is shared out,
and keeps its share by position. So all must see the same elements in the same order.
"""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_SHUFFLES = ("ShuffleDataset", "ShuffleAndRepeatDataset")
_RANDOM_DATASETS = ("RandomDataset",)
# Random numbers decide here which elements come, not only what they hold.
_CHOOSING = ("Filter", "FlatMap", "Interleave", "TakeWhile")
_RANDOM_VALUES = (
    "RandomUniform",
    "RandomUniformInt",
    "RandomStandardNormal",
    "TruncatedNormal",
    "ParameterizedTruncatedNormal",
    "RandomGamma",
    "RandomPoisson",
    "RandomPoissonV2",
    "RandomShuffle",
    "Multinomial",
)
_INTEGERS = (tf.int32.as_datatype_enum, tf.int64.as_datatype_enum)


def check_beginning(dataset: tf.data.Dataset) -> None:
    """Raises where two workers would not see the same elements in the same order.

    Args:
        dataset: What every worker runs before it takes its share.

    Raises:
        ValueError: An order or a choice that differs from process to process, a file
            cache that two processes would write, or Python code.
    """
    check_functions(dataset)
    graph = _graph(dataset)
    if dataset.options().deterministic is False or any(
        node.attr["deterministic"].s == b"false" for node in _nodes(graph)
    ):
        raise ValueError(
            "`dataset` gives its elements in no fixed order (`deterministic=False`); "
            "expected one order for all workers, which share it out by position. "
            "Leave `deterministic` out."
        )
    for operations in (graph.node, *(f.node_def for f in graph.library.function)):
        _check_seeds(list(operations))
    names = {node.op for node in _nodes(graph)}
    drawn = sorted(names.intersection(_RANDOM_VALUES))
    if drawn and any(word in name for name in names for word in _CHOOSING):
        raise ValueError(
            f"`dataset` draws random numbers ({', '.join(drawn)}) and chooses "
            "elements; expected every worker to choose the same ones. Draw with "
            "`tf.random.stateless_uniform` and a seed from the element's number, or "
            "filter in `Pipeline.filter`."
        )


def check_functions(dataset: tf.data.Dataset) -> None:
    """Raises where a dataset calls Python, which another process does not have.

    Raises:
        ValueError: A generator, `py_function` or `numpy_function`, or more constants
            than a graph can carry.
    """
    python = sorted({node.op for node in _nodes(_graph(dataset)) if node.op in _PYTHON})
    if python:
        raise ValueError(
            f"`dataset` calls Python ({', '.join(python)}): a generator, "
            "`py_function` or `numpy_function`; expected TensorFlow operations only, "
            "since the workers are other processes. Write it with `tf` functions, or "
            "build without `service`."
        )


def _check_seeds(nodes: list[tf.compat.v1.NodeDef]) -> None:
    """Checks the datasets in one graph or function for seeds and files."""
    constants = {node.name: node.attr["value"].tensor for node in nodes}
    for node in nodes:
        inputs = [constants.get(name.split(":")[0].lstrip("^")) for name in node.input]
        if node.op.startswith(_SHUFFLES) and not any(_integers(inputs[2:4])):
            raise ValueError(
                "`dataset` shuffles without a seed; expected one order for all "
                "workers, or elements are lost and doubled. Pass "
                "`dataset.shuffle(..., seed=1)`, or shuffle in `Pipeline.shuffle`."
            )
        if node.op.startswith(_RANDOM_DATASETS) and not any(_integers(inputs[:2])):
            raise ValueError(
                "`dataset` draws from `Dataset.random` without a seed, as "
                "`sample_from_datasets` does; expected one order for all workers, or "
                "elements are lost and doubled. Pass `seed=1`."
            )
        if node.op.startswith("CacheDataset"):
            path = inputs[1].string_val[0] if inputs[1] is not None else b"?"
            if path:
                raise ValueError(
                    f"`dataset` caches into the file {path.decode()!r}; expected no "
                    "file that several workers would write at once. Use "
                    "`Pipeline.cache`, which is written by this process alone."
                )


def _integers(tensors: list[Any]) -> Iterator[int]:
    """Yields the seeds among a node's inputs; one that is no constant counts as 1."""
    for tensor in tensors:
        if tensor is None:
            yield 1
        elif tensor.dtype in _INTEGERS:
            yield int(tf.make_ndarray(tensor))


def _nodes(graph: tf.compat.v1.GraphDef) -> Iterator[tf.compat.v1.NodeDef]:
    """Yields every operation, in the graph and in its functions."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def _graph(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef:
    """Returns a dataset's graph, as a service sends it to its workers."""
    try:
        text = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=1,  # ignore: what has state is looked for here
            strip_device_assignment=True,
        )
    except (tf.errors.OpError, MemoryError) as error:
        raise ValueError(
            "`dataset` cannot be written as a graph for other processes "
            f"({str(error)[:300]}); expected serialisable steps and less than 2 GiB of "
            "arrays. Write large arrays to files, or build without `service`."
        ) from error
    return tf.compat.v1.GraphDef.FromString(text.numpy())
