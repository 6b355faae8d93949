"""Reads what TensorFlow makes of a graph before it runs it: fused, rewritten, cast."""

import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfamp.graph.hlo import CompiledProduct
from tfamp.graph.operation import plain_type
from tfamp.graph.products import CONVOLUTIONS, MATRIX_PRODUCTS

_PRODUCTS = MATRIX_PRODUCTS | CONVOLUTIONS | {"Einsum"}


def read_optimized(
    run: Callable[[], Any], *, named: str
) -> tuple[CompiledProduct, ...]:
    """Returns the products and convolutions that really run, with their dtypes.

    TensorFlow's own mixed precision changes dtypes after a function was traced, and
    only a run shows the result. The more functions a process has traced, the longer
    it takes: a minute where there are thousands.

    Args:
        run: Calls a traced function once.
        named: Text in the names of its operations; others are left out, since
            TensorFlow may hand out graphs of functions that ran before.

    Example:
        >>> double = tf.function(lambda x: tf.matmul(x, x, name="square"))
        >>> run = lambda: double(tf.eye(2))
        >>> read_optimized(run, named="square")[0].dtypes  # doctest: +SKIP
        ('float32', 'float32')
    """
    found = []
    for graph in _graphs(run):
        nodes = [*graph.node]
        for function in graph.library.function:
            nodes += function.node_def
        for node in nodes:
            if plain_type(node.op) in _PRODUCTS and named in node.name:
                dtype = str(tf.as_dtype(node.attr["T"].type).name)
                kind = plain_type(node.op)
                found.append(
                    CompiledProduct(node.name, kind, node.name, (dtype, dtype), ())
                )
    # A function is in the library of each graph that calls it.
    return tuple(dict.fromkeys(found))


def _graphs(run: Callable[[], Any]) -> Iterator[Any]:
    """Yields the graphs that ran, as TensorFlow's summaries of them hold them."""
    with tempfile.TemporaryDirectory() as folder:
        writer = tf.summary.create_file_writer(folder)
        tf.summary.trace_on(graph=True)
        try:
            run()
            with writer.as_default():
                tf.summary.trace_export("graph", step=0)
        finally:
            tf.summary.trace_off()
            writer.close()
        for path in sorted(pathlib.Path(folder).iterdir()):
            for record in tf.data.TFRecordDataset(str(path)):
                event = tf.compat.v1.Event.FromString(record.numpy())
                for value in event.summary.value:
                    data = tf.make_ndarray(value.tensor).item()
                    graphs = tf.compat.v1.RunMetadata.FromString(data).function_graphs
                    yield from (each.post_optimization_graph for each in graphs)
