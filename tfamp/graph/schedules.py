"""A traced graph as one list of steps: calls opened, loops and branches inside it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfamp.graph.bodies import Body, Reference, functions_of, read_bodies
from tfamp.graph.buffers import LISTS, SHARING, output_bytes
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


@dataclasses.dataclass(slots=True)
class Step:
    """One operation.

    Attributes:
        name: Its name, behind those of the calls it is in.
        op: Its type.
        inputs: What it reads.
        after: Steps that have to run before it, beside those that make its inputs.
        outputs: Bytes of what it gives; 0 where they are not known.
        node: As it is written down; None for the begin and the end of a call.
        inner: What a loop or the branches of a condition run.
        trips: How often a loop runs; 1 where data decide.
    """

    name: str
    op: str
    inputs: list[Tensor]
    after: list[int]
    outputs: list[int]
    node: tf.compat.v1.NodeDef | None = None
    inner: tuple["Schedule", ...] = ()
    trips: int = 1


class Schedule:
    """The steps of a graph, or of a function that a loop or a condition runs.

    Attributes:
        argument_bytes: Bytes of what is passed to it.
        steps: Each behind those that it needs.
        results: What it returns.
        unknown: Names of operations whose outputs' sizes the graph does not tell,
            and of loops whose number of runs it does not tell.
    """

    def __init__(self, argument_bytes: Iterable[int] = ()) -> None:
        self.argument_bytes = list(argument_bytes)
        self.steps: list[Step] = []
        self.results: list[Tensor] = []
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
    """Returns the steps that one call of a traced, concrete function runs.

    Example:
        >>> double = tf.function(lambda x: tf.matmul(x, x))
        >>> traced = double.get_concrete_function(tf.TensorSpec((2, 2)))
        >>> [(step.op, step.outputs) for step in read_schedule(traced).steps]
        [('Placeholder', [16]), ('MatMul', [16]), ('Identity', [16])]
    """
    schedule = Schedule()
    schedule.results, _ = _Flattener(schedule).add(read_bodies(concrete), "", [], [])
    return schedule


class _Flattener:
    """Appends the nodes of functions to a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def add(
        self, body: Body, prefix: str, arguments: list[Tensor], begin: list[int]
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
            if node.op in _CALLS:
                function = body.function(node.attr["f"].func.name)
                if function is not None:
                    made[node.name], ends[node.name] = self._call(
                        function, name, inputs, after + begin
                    )
                    continue
            if node.op == "IdentityN":
                # TensorFlow takes it apart: no output waits for the input of another.
                made[node.name] = inputs
                end = Step(f"{name}/end", "NoOp", [], after + begin, [])
                end.after += [number for number, _ in inputs if number != ARGUMENT]
                ends[node.name] = self._schedule.add(end)
                continue
            # What needs nothing still waits for the call that it is in.
            step = self._step(body, node, name, inputs, after if inputs else begin)
            step.after += after if not inputs else []
            number = self._schedule.add(step)
            made[node.name] = [(number, i) for i in range(max(1, len(step.outputs)))]
            ends[node.name] = number
        results = [tensor(reference) for reference in body.results]
        return results, [ends[name] for name in body.kept if name in ends]

    def _call(
        self, function: Body, name: str, inputs: list[Tensor], after: list[int]
    ) -> tuple[list[Tensor], int]:
        begin = self._schedule.add(Step(f"{name}/begin", "NoOp", [], after, []))
        results, kept = self.add(function, f"{name}/", inputs, [begin])
        end = Step(f"{name}/end", "NoOp", [], [*kept, begin], [])
        return results, self._schedule.add(end)

    def _step(
        self,
        body: Body,
        node: tf.compat.v1.NodeDef,
        name: str,
        inputs: list[Tensor],
        after: list[int],
    ) -> Step:
        sizes = output_bytes(node)
        if None in sizes and not any(functions_of(node)):
            self._schedule.unknown.append(name)
        step = Step(name, node.op, inputs, list(after), [s or 0 for s in sizes], node)
        if node.op in _LOOPS:
            step.inner = self._inner(body, node, ("body",), inputs)
            trips = num_trips(body, node)
            step.trips = trips or 1
            if trips is None:
                self._schedule.unknown.append(name)
        elif node.op in _BRANCHES:
            step.inner = self._inner(body, node, _BRANCHES[node.op], inputs[1:])
        return step

    def _inner(
        self,
        body: Body,
        node: tf.compat.v1.NodeDef,
        keys: tuple[str, ...],
        inputs: list[Tensor],
    ) -> tuple[Schedule, ...]:
        references = body.inputs(node)[-len(inputs) :] if inputs else []
        found = []
        for key in keys:
            function = body.function(node.attr[key].func.name)
            if function is None:
                continue
            for index, reference in enumerate(references):
                function.argument_shapes.setdefault(index, body.shape(reference))
            schedule = Schedule(self._schedule.bytes_of(tensor) for tensor in inputs)
            schedule.results, _ = _Flattener(schedule).add(
                function, "", schedule.arguments, []
            )
            self._schedule.unknown += [
                f"{node.name}/{name}" for name in schedule.unknown
            ]
            found.append(schedule)
        return tuple(found)


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


def pushed_and_popped(inner: Schedule) -> tuple[dict[int, int], list[int]]:
    """Returns the bytes that a run of a loop adds to each list, and lists it empties.

    What is the same in all runs, a variable for example, costs nothing, and what goes
    to several lists counts once.
    """
    pushed: dict[int, int] = {}
    popped = []
    counted: set[Tensor] = set()
    for index, result in enumerate(inner.results):
        chain = _chain(inner, result)
        if any(step.op == "TensorListPopBack" for step in chain):
            popped.append(index)
        elements = [step.inputs[-1] for step in chain if step.op in LISTS]
        if not elements:
            continue
        pushed[index] = 0
        for element in elements:
            root = _root(inner, element, set())
            if root is not None and root not in counted:
                counted.add(root)
                pushed[index] += inner.bytes_of(element)
    return pushed, popped


def _chain(inner: Schedule, tensor: Tensor) -> list[Step]:
    """Returns the operations on a list that lead from the argument to a result."""
    found: list[Step] = []
    while tensor[0] != ARGUMENT:
        step = inner.steps[tensor[0]]
        if not step.inputs or not (step.op == "Identity" or "TensorList" in step.op):
            return found
        found.append(step)
        tensor = step.inputs[0]
    return found


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
    if step.op in SHARING and step.inputs:
        return _root(inner, step.inputs[0], seen)
    return tensor
