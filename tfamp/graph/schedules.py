"""A traced graph as one list of steps, and which buffers live together at the most."""

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.graph import bodies
from tfamp.graph.bodies import LOOPS, Body, Reference

# The step that makes a tensor and which output of it; `ARGUMENT` for what is passed.
Tensor = tuple[int, int]
ARGUMENT = -1
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch"))
# Hand on the buffer of their first input.
_SHARING = frozenset(
    "Identity Reshape Squeeze ExpandDims StopGradient PreventGradient EnsureShape "
    "Bitcast ReadVariableOp CheckNumerics Snapshot".split()
)
# Write into an input of the same size that nobody else needs any more.
_IN_PLACE = frozenset(
    "Abs Add AddN AddV2 BiasAdd ClipByValue Div DivNoNan Elu EluGrad Erf Erfc Exp "
    "Expm1 Floor LeakyRelu LeakyReluGrad Log Log1p LogSoftmax LogicalAnd LogicalNot "
    "LogicalOr Maximum Minimum Mul MulNoNan Neg Pow RealDiv Reciprocal ReciprocalGrad "
    "Relu Relu6 Relu6Grad ReluGrad Round Rsqrt RsqrtGrad Select SelectV2 Selu SeluGrad "
    "Sigmoid SigmoidGrad Sign Softmax Softplus SoftplusGrad Sqrt SqrtGrad Square "
    "SquaredDifference Sub Tanh TanhGrad Xdivy Xlogy".split()
)
# Are there before the step, hold nothing of the host's memory, or give what a list
# holds already.
_GIVEN = frozenset(
    "Placeholder Const NoOp VarHandleOp AssignVariableOp AssignAddVariableOp "
    "AssignSubVariableOp TensorListPopBack TensorListGetItem".split()
)
_LISTS = frozenset(("TensorListPushBack", "TensorListSetItem"))
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
        self.arguments = [(ARGUMENT, i) for i, _ in enumerate(self.argument_bytes)]
        self.steps: list[Step] = []  # each behind those that it needs
        self.results: list[Tensor] = []
        # Operations whose sizes, and loops whose runs the graph does not tell.
        self.unknown: list[str] = []

    def bytes_of(self, tensor: Tensor) -> int:
        """Returns the size of a tensor."""
        step, output = tensor
        sizes = self.argument_bytes if step == ARGUMENT else self.steps[step].outputs
        return sizes[output] if output < len(sizes) else 0


def read_schedule(concrete: Any) -> Schedule:
    """Returns the steps that one call of a traced, concrete function runs."""
    schedule = Schedule()
    schedule.results = _append(schedule, bodies.read_bodies(concrete), "", [])
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
        called = (
            body.functions.get(node.attr["f"].func.name) if node.op in _CALLS else None
        )
        if called is not None:
            made[node.name] = _append(schedule, called, f"{name}/", inputs)
        elif node.op == "IdentityN":
            made[node.name] = inputs
        else:
            step = _step(schedule, body, node, name, inputs)
            schedule.steps.append(step)
            number = len(schedule.steps) - 1
            made[node.name] = [(number, i) for i in range(max(1, len(step.outputs)))]

    for node in body.live:
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
        _num_bytes(bodies.output_shape(node, index), dtype)
        for index, (_, dtype) in enumerate(bodies.outputs_of(node))
    ]
    step = Step(name, node.op, inputs, [size or 0 for size in sizes])
    keys = ("body",) if node.op in LOOPS else _BRANCHES.get(node.op, ())
    trips = body.num_trips(node) if node.op in LOOPS else 1
    step.trips = trips or 1
    if trips is None or (None in sizes and not any(bodies.functions_of(node))):
        schedule.unknown.append(name)
    if node.op in _BRANCHES:
        inputs = inputs[1:]
    references = body.inputs(node)[-len(inputs) :] if inputs else []
    functions = (body.functions.get(node.attr[key].func.name) for key in keys)
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

    if [step.op for step in first.steps] != [step.op for step in second.steps]:
        return None
    plan = Schedule(map(between, first.argument_bytes, second.argument_bytes))
    plan.results = first.results
    for one, other in zip(first.steps, second.steps, strict=True):
        pairs = zip(one.inner, other.inner, strict=True)
        inner = [scaled(low, high, sizes, size) for low, high in pairs]
        if None in inner or len(one.outputs) != len(other.outputs):
            return None
        outputs = list(map(between, one.outputs, other.outputs))
        known = tuple(each for each in inner if each is not None)
        plan.steps.append(dataclasses.replace(one, outputs=outputs, inner=known))
    return plan


class Held(NamedTuple):
    """A buffer that lives when most memory is in use."""

    num_bytes: int
    name: str  # of the operation that made it
    op: str  # its type
    source: str = ""  # type of the operation that its first input comes from


class Peak(NamedTuple):
    """The moment at which most memory is in use: bytes, buffers, the operation."""

    num_bytes: int
    held: tuple[Held, ...]
    at: str


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory that tensors share; `maker` is None for what was there before."""

    num_bytes: int = 0
    maker: int | None = None
    users: int = 0


def find_peak(schedule: Schedule) -> Peak:
    """Returns the most memory that a schedule needs, above what is there before.

    Steps run as they become ready, in place where TensorFlow does so, and a buffer
    lives until its last reader has run; what a loop keeps for its gradient counts once
    for each of its runs.
    """
    return _Run(schedule).peak()


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._uses = collections.Counter(
            [*(t for step in schedule.steps for t in step.inputs), *schedule.results]
        )
        self._buffers = {t: _Buffer(users=self._uses[t]) for t in schedule.arguments}
        self._alive: dict[int, _Buffer] = {}
        self._total = self._peak = self._at = 0
        self._held: list[Held] = []

    def peak(self) -> Peak:
        steps = self._schedule.steps
        waits, followers = list[int](), [list[int]() for _ in steps]
        for number, step in enumerate(steps):
            before = {n for n, _ in step.inputs if n != ARGUMENT}
            waits.append(len(before))
            for each in before:
                followers[each].append(number)
        ready = collections.deque(i for i, count in enumerate(waits) if not count)
        while ready:
            number = ready.popleft()
            self._run(number, steps[number])
            for follower in followers[number]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        at = steps[self._at].name if steps else ""
        return Peak(self._peak, tuple(self._held), at)

    def _run(self, number: int, step: Step) -> None:
        given = [self._buffers[tensor] for tensor in step.inputs]
        made, scratch = self._make(number, step, given)
        extra = sum(each.num_bytes for each in scratch)
        if self._total + extra > self._peak:
            self._peak, self._at = self._total + extra, number
            self._held = [*map(self._describe, self._alive.values()), *scratch]
        for output, buffer in enumerate(made):
            self._buffers[number, output] = buffer
            buffer.users += self._uses[number, output]
        for buffer in given:
            buffer.users -= 1
        for buffer in (*made, *given):
            if buffer.users <= 0 and self._alive.pop(id(buffer), None) is not None:
                self._total -= buffer.num_bytes

    def _make(
        self, number: int, step: Step, given: list[_Buffer]
    ) -> tuple[list[_Buffer], tuple[Held, ...]]:
        """Returns the buffers of a step's outputs, and what it holds while it runs."""
        op, sizes = step.op, step.outputs
        if op in _SHARING and given:
            return [given[0]], ()
        if op in _GIVEN:
            return [_Buffer() for _ in sizes or (0,)], ()
        if op == "TensorListFromTensor":
            sizes = [given[0].num_bytes]
        elif op in _IN_PLACE:
            for buffer in given:
                if buffer.users == 1 and 0 < buffer.num_bytes == sizes[0]:
                    return [buffer], ()
        is_loop = op in LOOPS and len(step.inner) == 1
        results = step.inner[0].results if is_loop else []
        pushed, made = _pushed(step.inner[0]) if is_loop else {}, []
        for index, size in enumerate(sizes):
            if results[index : index + 1] == [(ARGUMENT, index)]:  # is handed on
                made.append(given[index])
            else:
                grown = pushed.get(index, 0) * step.trips
                made.append(self._new(grown or size, number))
        peaks = [_Run(each).peak() for each in step.inner]
        dearest = max(peaks, key=lambda peak: peak.num_bytes, default=None)
        return made or [_Buffer()], dearest.held if dearest else ()

    def _new(self, num_bytes: int, maker: int) -> _Buffer:
        buffer = _Buffer(num_bytes, maker)
        self._alive[id(buffer)] = buffer
        self._total += num_bytes
        return buffer

    def _describe(self, buffer: _Buffer) -> Held:
        steps = self._schedule.steps
        step = steps[buffer.maker or 0]
        first = step.inputs[0][0] if step.inputs else ARGUMENT
        source = steps[first].op if first != ARGUMENT else ""
        return Held(buffer.num_bytes, step.name, step.op, source)


def _pushed(inner: Schedule) -> dict[int, int]:
    """Returns the bytes that a run of a loop adds to each list, by its place."""
    pushed: dict[int, int] = collections.defaultdict(int)
    counted: set[Tensor | None] = {None}
    for index, (number, _) in enumerate(inner.results):
        # The operations on a list that lead from the argument to the result.
        while number != ARGUMENT:
            step = inner.steps[number]
            if not step.inputs or not (step.op == "Identity" or "List" in step.op):
                break
            root = _root(inner, step.inputs[-1], set()) if step.op in _LISTS else None
            if root not in counted:
                counted.add(root)
                pushed[index] += inner.bytes_of(step.inputs[-1])
            number, _ = step.inputs[0]
    return pushed


def _root(inner: Schedule, tensor: Tensor, seen: set[int]) -> Tensor | None:
    """Returns the tensor whose buffer this one shares, None if all runs share it."""
    number, output = tensor
    if number == ARGUMENT:
        if inner.results[output : output + 1] == [tensor]:
            return None
        if output in seen or output >= len(inner.results):
            return tensor
        # The value of the run before.
        return _root(inner, inner.results[output], seen | {output})
    step = inner.steps[number]
    if step.op == "ReadVariableOp":
        return None
    if step.op in _SHARING and step.inputs:
        return _root(inner, step.inputs[0], seen)
    return tensor
