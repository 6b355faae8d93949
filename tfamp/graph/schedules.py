"""A traced graph as one list of steps, and what each of them does to memory."""

import dataclasses
import itertools
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
    after: list[int]  # steps that run before it, beside those that make its inputs
    outputs: list[int]
    node: tf.compat.v1.NodeDef | None = None  # of the begin and end of a call
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

    def add(self, step: Step) -> int:
        """Appends a step and returns its number."""
        self.steps.append(step)
        return len(self.steps) - 1


def read_schedule(concrete: Any) -> Schedule:
    """Returns the steps that one call of a traced, concrete function runs."""
    schedule = Schedule()
    schedule.results, _ = _append(schedule, read_bodies(concrete), "", [], [])
    return schedule


def _append(
    schedule: Schedule,
    body: Body,
    prefix: str,
    arguments: list[Tensor],
    begin: list[int],
) -> tuple[list[Tensor], list[int]]:
    """Appends a function's nodes; returns its results and the steps that end it."""
    made: dict[str, list[Tensor]] = {}
    ends: dict[str, int] = {}

    def tensor(reference: Reference) -> Tensor:
        if reference.name in body.arguments:
            return arguments[body.arguments[reference.name]]
        outputs = made[reference.name]
        return outputs[min(reference.output, len(outputs) - 1)]

    for node in _sorted(body):
        inputs = [tensor(reference) for reference in body.inputs(node)]
        names = [_plain(text) for text in node.input if text[0] == "^"]
        after = [ends[name] for name in names if name in ends]
        name = f"{prefix}{node.name}"
        called = body.function(node.attr["f"].func.name) if node.op in _CALLS else None
        if called is not None:
            first = schedule.add(Step(f"{name}/begin", "NoOp", [], after + begin, []))
            made[node.name], kept = _append(
                schedule, called, f"{name}/", inputs, [first]
            )
            end = Step(f"{name}/end", "NoOp", [], [*kept, first], [])
            ends[node.name] = schedule.add(end)
        elif node.op == "IdentityN":
            # TensorFlow takes it apart: no output waits for the input of another.
            made[node.name] = inputs
            end = Step(f"{name}/end", "NoOp", [], after + begin, [])
            end.after += [number for number, _ in inputs if number != ARGUMENT]
            ends[node.name] = schedule.add(end)
        else:
            step = _step(schedule, body, node, name, inputs)
            # What needs nothing still waits for the call that it is in.
            step.after = after if inputs else after + begin
            number = ends[node.name] = schedule.add(step)
            made[node.name] = [(number, i) for i in range(max(1, len(step.outputs)))]
    results = [tensor(reference) for reference in body.results]
    return results, [ends[name] for name in body.kept if name in ends]


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
    step = Step(name, node.op, inputs, [], [size or 0 for size in sizes], node)
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
        inner.results, _ = _append(inner, function, "", inner.arguments, [])
        schedule.unknown += [f"{node.name}/{each}" for each in inner.unknown]
        step.inner += (inner,)
    return step


def _sorted(body: Body) -> list[tf.compat.v1.NodeDef]:
    """Returns the nodes that run, each behind those that it needs."""
    live = {node.name: node for node in body.live()}
    done: set[str] = set()
    found = []
    for first in live.values():
        waiting = [] if first.name in done else [(first, iter(first.input))]
        done.add(first.name)
        while waiting:
            node, inputs = waiting[-1]
            for name in map(_plain, inputs):
                if name in live and name not in done:
                    done.add(name)
                    waiting.append((live[name], iter(live[name].input)))
                    break
            else:
                found.append(node)
                waiting.pop()
    return found


def _plain(text: str) -> str:
    return text.lstrip("^").split(":")[0]


def scratch_bytes(node: tf.compat.v1.NodeDef | None, inputs: list[int]) -> int:
    """Returns the bytes of the copies that an Einsum makes to multiply matrices.

    A factor is a matrix as it lies where the labels of the batch, those kept and those
    summed over follow one another.
    """
    if node is None or node.op != "Einsum":
        return 0
    equation = node.attr["equation"].s.decode().replace(" ", "")
    terms, _, result = equation.partition("->")
    factors = terms.split(",")
    if len(factors) != 2 or "..." in equation:
        return 0
    total = 0
    for factor, other, size in zip(factors, reversed(factors), inputs, strict=True):
        kinds = [
            "kept" if label not in other else "batch" if label in result else "summed"
            for label in factor
        ]
        runs = [kind for kind, _ in itertools.groupby(kinds)]
        is_matrix = len(runs) == len(set(runs)) and "batch" not in runs[1:]
        total += 0 if is_matrix else size
    return total


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
    """Returns the steps for a batch size, each buffer growing evenly with the batch.

    From plans of two different `sizes`; None where they don't run the same operations.
    """
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
        plan.add(dataclasses.replace(one, outputs=outputs, inner=tuple(inner)))
    plan.results = first.results
    return plan
