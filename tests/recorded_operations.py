"""Records the operations TensorFlow runs or traces, with their dtypes.

Graph, XLA and eager runs all pass here, so a test can ask what was computed in
which dtype without trusting what a layer says of itself.
"""

import collections
import contextlib

from tensorflow.python.framework import op_callbacks


class Operations:
    """The input dtypes seen of each type of operation."""

    def __init__(self):
        self.dtypes = collections.defaultdict(set)
        self.shapes = collections.defaultdict(set)

    def __call__(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if _is_for_shapes_only(graph):
            return
        for tensor in (*inputs, *outputs):
            if getattr(tensor, "dtype", None) is None or not tensor.dtype.is_floating:
                continue
            self.dtypes[op_type].add(tensor.dtype.name)
            if tensor.shape.rank:
                last = tensor.shape[-1]
                self.shapes[op_type, last].add(tensor.dtype.name)

    def of(self, op_type):
        """Returns the floating-point dtypes that `op_type` took and gave."""
        return set(self.dtypes[op_type])


def _is_for_shapes_only(graph):
    """Returns whether Keras traces only to learn shapes; nothing of it is run."""
    while graph is not None:
        if getattr(graph, "name", "").startswith("scratch_graph"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


@contextlib.contextmanager
def recorded_operations():
    """Yields the `Operations` of everything inside the block."""
    operations = Operations()
    op_callbacks.add_op_callback(operations)
    try:
        yield operations
    finally:
        op_callbacks.remove_op_callback(operations)
