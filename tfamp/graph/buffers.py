"""What operations do to memory: share a buffer, write into it, or make a new one."""

import math

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfamp.graph.bodies import output_shape

# Hand on the buffer of their first input.
SHARING = frozenset(
    "Identity Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape "
    "Bitcast ReadVariableOp CheckNumerics Snapshot".split()
)
# Write into an input of the same size that nobody else needs any more.
IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd ClipByValue Div DivNoNan Elu EluGrad Erf Erfc Exp "
    "Expm1 Floor LeakyRelu LeakyReluGrad Log Log1p LogSoftmax LogicalAnd LogicalNot "
    "LogicalOr Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal ReciprocalGrad "
    "Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad "
    "Sigmoid SigmoidGrad Sign Softmax Softplus SoftplusGrad Sqrt SqrtGrad Square "
    "SquaredDifference Sub Tanh TanhGrad Xdivy Xlogy".split()
)
# Are there before the step, or hold nothing of the host's memory.
GIVEN = frozenset(("Placeholder", "Const", "NoOp", "VarHandleOp"))
ASSIGNMENTS = frozenset(
    ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
)
# Give what a list holds already.
TAKING = frozenset(("TensorListPopBack", "TensorListGetItem"))
LISTS = frozenset(("TensorListPushBack", "TensorListSetItem"))
_PRODUCTS = frozenset(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"))
_WITHOUT_BYTES = (tf.resource, tf.variant, tf.string)
_FLOAT32_BYTES = 4


def output_bytes(node: tf.compat.v1.NodeDef) -> list[int | None]:
    """Returns the bytes of each output of a node, None where shapes are not known.

    Handles of variables and lists count 0.
    """
    return [
        _num_bytes(output_shape(node, index), dtype)
        for index, dtype in enumerate(_dtypes(node))
    ]


def scratch_bytes(
    node: tf.compat.v1.NodeDef,
    inputs: list[int],
    outputs: list[int],
    *,
    emulated: frozenset[str],
) -> int:
    """Returns what an operation holds while it runs, beside inputs and outputs.

    Products of `emulated` dtypes are computed in float32 on this device: it copies the
    factors to float32 and the result back.
    """
    if node.op == "Einsum":
        return _transposed(node, inputs)
    if node.op in _PRODUCTS:
        dtype = tf.as_dtype(node.attr["T"].type)
        if dtype.name in emulated:
            return (sum(inputs) + sum(outputs)) // dtype.size * _FLOAT32_BYTES
    return 0


def _transposed(node: tf.compat.v1.NodeDef, inputs: list[int]) -> int:
    """Returns the bytes of the copies that an Einsum makes to multiply matrices.

    A factor is a matrix as it lies where the labels of the batch, those kept and those
    summed over follow one another.
    """
    equation = node.attr["equation"].s.decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    factors = terms.split(",")
    if len(factors) != 2 or "..." in equation:
        return 0
    total = 0
    for factor, other, size in zip(factors, reversed(factors), inputs, strict=True):
        kinds = "".join(_kind(label, other, result) for label in factor)
        if kinds.strip("b") and _is_mixed(kinds):
            total += size
    return total


def _kind(label: str, other: str, result: str) -> str:
    if label in other:
        return "b" if label in result else "s"
    return "k"


def _is_mixed(kinds: str) -> bool:
    """Whether labels of one kind do not follow one another, or a batch comes late."""
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    return len(runs) != len(set(runs)) or "b" in runs[1:]


def _dtypes(node: tf.compat.v1.NodeDef) -> list[int]:
    definition = op_def_registry.get(node.op)
    found: list[int] = []
    for each in definition.output_arg if definition is not None else ():
        if each.type_list_attr:
            found += node.attr[each.type_list_attr].list.type
            continue
        count = node.attr[each.number_attr].i if each.number_attr else 1
        found += [each.type or node.attr[each.type_attr].type] * count
    return found


def _num_bytes(shape: tuple[int | None, ...] | None, dtype: int) -> int | None:
    kind = tf.as_dtype(dtype)
    if kind in _WITHOUT_BYTES:
        return 0
    if shape is None or None in shape:
        return None
    return math.prod(size for size in shape if size is not None) * int(kind.size)
