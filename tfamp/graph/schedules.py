"""A traced graph as one list of steps, and what each of them does to memory."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfamp.graph.bodies import (
    Body,
    Reference,
    functions_of,
    output_shape,
    outputs_of,
    read_bodies,
)
from tfamp.graph.constants import num_trips

# The step that makes a tensor and which output of it; `ARGUMENT` for what is passed.
Tensor = tuple[int, int]
ARGUMENT = -1
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_LOOPS = ("While", "StatelessWhile")
_BRANCHES = {
    "If": ("then_branch", "else_branch"),
    "StatelessIf": ("then_branch", "else_branch"),
}
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
GIVEN = frozenset(
    "Placeholder Const NoOp VarHandleOp AssignVariableOp AssignAddVariableOp "
    "AssignSubVariableOp".split()
)
# Give what a list holds already.
TAKING = frozenset(("TensorListPopBack", "TensorListGetItem"))
LISTS = frozenset(("TensorListPushBack", "TensorListSetItem"))
_WITHOUT_BYTES = (tf.resource, tf.variant, tf.string)


@dataclasses.dataclass(slots=True)
class Step:
    """One operation: what it reads, and the bytes of what it gives (0 for unknown)."""

    name: str  # behind those of the calls it is in
    op: str
    inputs: list[Tensor]
    outputs: list[int]
    inner: tuple["Schedule", ...] = ()  # of a loop, or the branches of a condition
    trips: int = 1


class Schedule:
    """The steps of a graph, or of a function that a loop or a condition runs."""

    def __init__(self, argument_bytes: Iterable[int] = ()) -> None:
        self.argument_bytes = list(argument_bytes)
        self.steps: list[Step] = []  # each behind those that it needs
        self.results: list[Tensor] = []
        # Operations whose sizes, and loops whose runs the graph does not tell.
        self.unknown: list[str] = []

    @property
    def arguments(self) -> list[Tensor]:
        """The tensors that are passed to it."""
        return [(ARGUMENT, index) for index in range(len(self.argument_bytes))]

    def bytes_of(self, tensor: Tensor) -> int:
        """Returns the size of a tensor."""
        step, output = tensor
        if step == ARGUMENT:
            return self.argument_bytes[output]
        outputs = self.steps[step].outputs
        return outputs[output] if output < len(outputs) else 0


def read_schedule(concrete: Any) -> Schedule:
    """Returns the steps that one call of a traced, concrete function runs."""
    schedule = Schedule()
    schedule.results = _append(schedule, read_bodies(concrete), "", [])
    return schedule


def _append(
    schedule: Schedule, body: Body, prefix: str, arguments: list[Tensor]
) -> list[Tensor]:
    """Appends a function's nodes, in the order of the program; returns its results."""
    made: dict[str, list[Tensor]] = {}

    def tensor(reference: Reference) -> Tensor:
        if reference.name in body.arguments:
            return arguments[body.arguments[reference.name]]
        if reference.name not in made:  # it was put in later, as the lists of a loop
            make(body.nodes[reference.name])
        outputs = made[reference.name]
        return outputs[min(reference.output, len(outputs) - 1)]

    def make(node: tf.compat.v1.NodeDef) -> None:
        inputs = [tensor(reference) for reference in body.inputs(node)]
        name = f"{prefix}{node.name}"
        called = body.function(node.attr["f"].func.name) if node.op in _CALLS else None
        if called is not None:
            made[node.name] = _append(schedule, called, f"{name}/", inputs)
        elif node.op == "IdentityN":
            made[node.name] = inputs
        else:
            step = _step(schedule, body, node, name, inputs)
            schedule.steps.append(step)
            number = len(schedule.steps) - 1
            made[node.name] = [(number, i) for i in range(max(1, len(step.outputs)))]

    for node in body.live():
        if node.name not in made:
            make(node)
    return [tensor(reference) for reference in body.results]


def _step(
    schedule: Schedule,
    body: Body,
    node: tf.compat.v1.NodeDef,
    name: str,
    inputs: list[Tensor],
) -> Step:
    """Returns the step of a node that is no call, with what it runs itself."""
    sizes = [
        _num_bytes(output_shape(node, index), dtype)
        for index, (_, dtype) in enumerate(outputs_of(node))
    ]
    step = Step(name, node.op, inputs, [size or 0 for size in sizes])
    is_unknown = None in sizes and not any(functions_of(node))
    keys = ("body",) if node.op in _LOOPS else _BRANCHES.get(node.op, ())
    if node.op in _LOOPS:
        trips = num_trips(body, node)
        step.trips, is_unknown = trips or 1, trips is None
    if is_unknown:
        schedule.unknown.append(name)
    if node.op in _BRANCHES:
        inputs = inputs[1:]
    references = body.inputs(node)[-len(inputs) :] if inputs else []
    functions = (body.function(node.attr[key].func.name) for key in keys)
    for function in filter(None, functions):
        for index, reference in enumerate(references):
            function.argument_shapes.setdefault(index, body.shape(reference))
        inner = Schedule(schedule.bytes_of(tensor) for tensor in inputs)
        inner.results = _append(inner, function, "", inner.arguments)
        schedule.unknown += [f"{node.name}/{each}" for each in inner.unknown]
        step.inner += (inner,)
    return step


def _num_bytes(shape: tuple[int | None, ...] | None, dtype: int) -> int | None:
    kind = tf.as_dtype(dtype)
    if kind in _WITHOUT_BYTES:
        return 0
    if shape is None or None in shape:
        return None
    return math.prod(size for size in shape if size is not None) * int(kind.size)


def scaled(
    first: Schedule, second: Schedule, sizes: tuple[int, int], size: int
) -> Schedule | None:
    """Returns the steps for another batch size, by plans of two, or None."""
    part = (size - sizes[0]) / (sizes[1] - sizes[0])

    def between(low: int, high: int) -> int:
        return max(0, round(low + (high - low) * part))

    if len(first.steps) != len(second.steps):
        return None
    plan = Schedule(map(between, first.argument_bytes, second.argument_bytes))
    for one, other in zip(first.steps, second.steps, strict=True):
        if one.op != other.op or len(one.outputs) != len(other.outputs):
            return None
        inner = []
        for low, high in zip(one.inner, other.inner, strict=True):
            each = scaled(low, high, sizes, size)
            if each is None:
                return None
            inner.append(each)
        outputs = list(map(between, one.outputs, other.outputs))
        plan.steps.append(dataclasses.replace(one, outputs=outputs, inner=tuple(inner)))
    plan.results = first.results
    return plan
