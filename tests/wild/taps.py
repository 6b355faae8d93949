"""Which dtypes a program computed in, read off the operations that it ran."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from tensorflow.python.framework import op_callbacks

HALF = (tf.float16, tf.bfloat16)
SOFTMAXES = {
    "LogSoftmax",
    "Softmax",
    "SoftmaxCrossEntropyWithLogits",
    "SparseSoftmaxCrossEntropyWithLogits",
    "CTCLoss",
    "CTCLossV2",
}
# What sums up to a loss: rounding here is rounding of the loss.
REDUCTIONS = SOFTMAXES | {"Mean", "Sum", "L2Loss", "SquaredDifference", "Square", "Log"}
PRODUCTS = {
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Conv1D",
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv3D",
    "DepthwiseConv2dNative",
    "Einsum",
    "MatMul",
}
# A layer that computes in float32 by itself, whatever comes in.
NORMALIZATIONS = {"FusedBatchNormV3", "Rsqrt"}
# Where walking back from an output ends: what comes before is not its making.
ENDS = PRODUCTS | {
    "GatherV2",
    "If",
    "PartitionedCall",
    "Placeholder",
    "ReadVariableOp",
    "ResourceGather",
    "StatefulPartitionedCall",
    "StatelessIf",
    "StatelessWhile",
    "TensorListStack",
    "While",
}


@dataclasses.dataclass
class Seen:
    """What a program did in float16 or bfloat16 that has to be float32.

    Args:
        softmaxes: Operations of the softmax family.
        losses: Targets of gradients, and reductions on the way to one.
        num_targets: Targets of gradients that were looked at.
    """

    softmaxes: set[str] = dataclasses.field(default_factory=set)
    losses: set[str] = dataclasses.field(default_factory=set)
    num_targets: int = 0

    def operation(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        """Looks at an operation that is run eagerly or put into a graph."""
        if op_type in SOFTMAXES and not in_symbolic_scope():
            for tensor in (*inputs, *outputs):
                if tensor.dtype in HALF:
                    self.softmaxes.add(f"{op_type} in {tensor.dtype.name}")

    def target(self, target):
        """Looks at what a gradient is taken of."""
        self.num_targets += 1
        for tensor in tf.nest.flatten(target):
            if tensor.dtype in HALF:
                self.losses.add(f"gradient of a {tensor.dtype.name}")
            if not tf.executing_eagerly():
                self.losses |= half_before_products(tensor, REDUCTIONS)


@contextlib.contextmanager
def seen() -> Iterator[Seen]:
    """Watches the operations of this thread, and the targets of its gradients."""
    found = Seen()

    class Tape(tf.GradientTape):
        @functools.wraps(tf.GradientTape.gradient)
        def gradient(self, target, *args, **kwargs):
            found.target(target)
            return super().gradient(target, *args, **kwargs)

    stock = tf.GradientTape
    # One bound method: it is taken out by identity.
    watch = found.operation
    op_callbacks.add_op_callback(watch)
    tf.GradientTape = Tape
    try:
        yield found
    finally:
        tf.GradientTape = stock
        op_callbacks.remove_op_callback(watch)


def half_before_products(tensor: tf.Tensor, kinds=None) -> set[str]:
    """Returns the half operations that make a tensor, back to the nearest products.

    Args:
        tensor: Of a graph.
        kinds: Kinds of operation to look for; None looks for any, and ends at a
            normalization in float32.
    """
    found, known, todo = set(), set(), [tensor.op]
    while todo:
        op = todo.pop()
        if op in known:
            continue
        known.add(op)
        halves = [t.dtype.name for t in op.outputs if t.dtype in HALF]
        if halves and (kinds is None or op.type in kinds):
            found.add(f"{op.type} in {halves[0]}")
        if op.type not in ENDS:
            todo += [source.op for source in op.inputs if source.dtype.is_floating]
    is_float32 = any(
        op.type in NORMALIZATIONS and op.outputs[0].dtype == tf.float32 for op in known
    )
    return set() if kinds is None and is_float32 else found


def half_heads(model: keras.Model, inputs) -> set[str]:
    """Returns what makes a model's outputs in half precision, products included."""

    @tf.function
    def call(inputs):
        return model(inputs, training=False)

    call_graph = call.get_concrete_function(inputs)
    outputs = tf.nest.flatten(call_graph.structured_outputs)
    found = {f"output in {t.dtype.name}" for t in outputs if t.dtype in HALF}
    for tensor in call_graph.graph.outputs:
        if tensor.dtype.is_floating:
            found |= half_before_products(tensor)
    return found
