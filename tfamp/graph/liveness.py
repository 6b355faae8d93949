"""Runs a schedule without computing: which buffers live together, at the most."""

import collections
import dataclasses

from tfamp.graph.schedules import (
    ARGUMENT,
    GIVEN,
    IN_PLACE,
    LISTS,
    SHARING,
    TAKING,
    Schedule,
    Step,
    Tensor,
)


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer that lives when most memory is in use."""

    num_bytes: int
    name: str  # of the operation that made it
    op: str  # its type; "scratch" for what it holds only while it runs
    source: str = ""  # type of the operation that its first input comes from


@dataclasses.dataclass(frozen=True)
class Peak:
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

    Steps run as TensorFlow's executor starts them, as they become ready, and a buffer
    lives until its last reader has run. Operations that TensorFlow runs in place do;
    what a loop keeps for its gradient counts once for each of its runs.
    """
    return _Run(schedule).peak()


class _Run:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._buffers: dict[Tensor, _Buffer] = {}
        self._alive: dict[int, _Buffer] = {}
        self._total = self._peak = self._at = 0
        self._held: list[Held] = []
        self._uses = collections.Counter(
            [*(t for step in schedule.steps for t in step.inputs), *schedule.results]
        )

    def peak(self) -> Peak:
        steps = self._schedule.steps
        for tensor in self._schedule.arguments:
            self._buffers[tensor] = _Buffer(users=self._uses[tensor])
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
        return Peak(
            self._peak, tuple(self._held), steps[self._at].name if steps else ""
        )

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
    ) -> tuple[list[_Buffer], list[Held]]:
        """Returns the buffers of a step's outputs, and what it holds while it runs."""
        op, sizes = step.op, step.outputs
        if op in SHARING and given:
            return [given[0]], []
        if op in GIVEN or op in TAKING:
            return [_Buffer() for _ in sizes or (0,)], []
        if op in LISTS:
            sizes = [0]
        elif op == "TensorListFromTensor":
            sizes = [given[0].num_bytes]
        elif op in IN_PLACE:
            for buffer in given:
                if buffer.users == 1 and 0 < buffer.num_bytes == sizes[0]:
                    return [buffer], []
        if len(step.inner) == 1:
            return self._loop(number, step, given)
        made = [self._new(size, number) for size in sizes] or [_Buffer()]
        if step.inner:
            peaks = [_Run(each).peak() for each in step.inner]
            return made, [*max(peaks, key=lambda peak: peak.num_bytes).held]
        return made, []

    def _loop(
        self, number: int, step: Step, given: list[_Buffer]
    ) -> tuple[list[_Buffer], list[Held]]:
        """Runs a loop: one run of its body, with the lists that all runs fill."""
        (inner,) = step.inner
        once = _Run(inner).peak()
        pushed, popped = _pushed_and_popped(inner)
        made, grown = [], 0
        for index, result in enumerate(inner.results):
            if result == (ARGUMENT, index):
                made.append(given[index])
                continue
            size = step.outputs[index] if index < len(step.outputs) else 0
            if index in pushed:
                size = pushed[index] * step.trips
                grown += size
            made.append(self._new(size, number))
        held = [
            dataclasses.replace(each, name=f"{step.name}/{each.name}")
            for each in once.held
        ]
        # What was kept for the gradient goes as the loop takes it off its lists.
        drained = sum(given[i].num_bytes for i in popped if given[i].users == 1)
        if saved := min(drained, grown):
            held.append(Held(-saved, step.name, "scratch"))
        return made, held

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


def _pushed_and_popped(inner: Schedule) -> tuple[dict[int, int], list[int]]:
    """Returns the bytes that a run of a loop adds to each list, and what it empties."""
    pushed: dict[int, int] = {}
    popped = []
    counted: set[Tensor] = set()
    for index, (number, output) in enumerate(inner.results):
        # The operations on a list that lead from the argument to the result.
        while number != ARGUMENT:
            step = inner.steps[number]
            if not step.inputs or not (step.op == "Identity" or "List" in step.op):
                break
            if step.op == "TensorListPopBack":
                popped.append(index)
            if step.op in LISTS:
                pushed.setdefault(index, 0)
                root = _root(inner, step.inputs[-1], set())
                if root is not None and root not in counted:
                    counted.add(root)
                    pushed[index] += inner.bytes_of(step.inputs[-1])
            number, output = step.inputs[0]
    return pushed, popped


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
