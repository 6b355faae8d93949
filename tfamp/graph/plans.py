"""A traced graph as one list of steps: calls opened, loops and branches inside it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfamp.graph.bodies import Body, Reference, functions_of, read_bodies
from tfamp.graph.buffers import output_bytes
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

    Args:
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
    inner: tuple["Plan", ...] = ()
    trips: int = 1


class Plan:
    """The steps of a graph, or of a function that a loop or a condition runs.

    Args:
        argument_bytes: Bytes of what is passed to it.

    Attributes:
        steps: Each behind those that it needs.
        results: What it returns.
        unknown: Names of operations whose outputs' sizes the graph does not tell, and
            of loops whose number of runs it does not tell.
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


def read_plan(concrete: Any) -> Plan:
    """Returns the steps that one call of a traced function runs.

    Args:
        concrete: What `tf.function(...).get_concrete_function(...)` returned.

    Example:
        >>> double = tf.function(lambda x: tf.matmul(x, x))
        >>> plan = read_plan(double.get_concrete_function(tf.TensorSpec((2, 2))))
        >>> [(step.op, step.outputs) for step in plan.steps]
        [('Placeholder', [16]), ('MatMul', [16]), ('Identity', [16])]
    """
    plan = Plan()
    plan.results, _ = _Flattener(plan).add(read_bodies(concrete), "", [], [])
    return plan


class _Flattener:
    """Appends the nodes of functions to a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

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
                ends[node.name] = self._plan.add(end)
                continue
            # What needs nothing still waits for the call that it is in.
            step = self._step(body, node, name, inputs, after if inputs else begin)
            step.after += after if not inputs else []
            number = self._plan.add(step)
            made[node.name] = [(number, i) for i in range(max(1, len(step.outputs)))]
            ends[node.name] = number
        results = [tensor(reference) for reference in body.results]
        return results, [ends[name] for name in body.kept if name in ends]

    def _call(
        self, function: Body, name: str, inputs: list[Tensor], after: list[int]
    ) -> tuple[list[Tensor], int]:
        begin = self._plan.add(Step(f"{name}/begin", "NoOp", [], after, []))
        results, kept = self.add(function, f"{name}/", inputs, [begin])
        end = Step(f"{name}/end", "NoOp", [], [*kept, begin], [])
        return results, self._plan.add(end)

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
            self._plan.unknown.append(name)
        step = Step(name, node.op, inputs, list(after), [s or 0 for s in sizes], node)
        if node.op in _LOOPS:
            step.inner = self._inner(body, node, ("body",), inputs)
            trips = num_trips(body, node)
            step.trips = trips or 1
            if trips is None:
                self._plan.unknown.append(name)
        elif node.op in _BRANCHES:
            step.inner = self._inner(body, node, _BRANCHES[node.op], inputs[1:])
        return step

    def _inner(
        self,
        body: Body,
        node: tf.compat.v1.NodeDef,
        keys: tuple[str, ...],
        inputs: list[Tensor],
    ) -> tuple[Plan, ...]:
        references = body.inputs(node)[-len(inputs) :] if inputs else []
        found = []
        for key in keys:
            function = body.function(node.attr[key].func.name)
            if function is None:
                continue
            for index, reference in enumerate(references):
                function.argument_shapes.setdefault(index, body.shape(reference))
            plan = Plan(self._plan.bytes_of(tensor) for tensor in inputs)
            plan.results, _ = _Flattener(plan).add(function, "", plan.arguments, [])
            self._plan.unknown += [f"{node.name}/{name}" for name in plan.unknown]
            found.append(plan)
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
