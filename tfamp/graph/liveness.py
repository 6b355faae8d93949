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
    scratch_bytes,
)


@dataclasses.dataclass(frozen=True)
class Held:
    """A buffer that lives when most memory is in use.

    Attributes:
        num_bytes: Its size.
        name: The operation that made it.
        op: Its type; "scratch" for what an operation holds only while it runs.
        source: Type of the operation that its first input comes from, "" for none.
    """

    num_bytes: int
    name: str
    op: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use: bytes, buffers, the operation."""

    num_bytes: int
    held: tuple[Held, ...]
    at: str


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory that tensors share; `maker` is None for what was there before."""

    num_bytes: int
    maker: int | None
    users: int = 0


def find_peak(schedule: Schedule, *, emulated: frozenset[str] = frozenset()) -> Peak:
    """Returns the most memory that a schedule needs, above what is there before.

    Steps run as TensorFlow's executor starts them: in the order in which they become
    ready. A buffer lives until its last reader has run. Operations that TensorFlow runs
    in place do; what a loop keeps for its gradient counts once for each of its runs.
    Products of `emulated` dtypes are computed in float32.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.graph.schedules import read_schedule
        >>> spec = tf.TensorSpec((256, 256))
        >>> twice = tf.function(lambda x: tf.transpose(tf.exp(tf.transpose(x))))
        >>> schedule = read_schedule(twice.get_concrete_function(spec))
        >>> find_peak(schedule).num_bytes / 2**10
        512.0
    """
    return _Run(schedule, emulated).peak()


class _Run:
    def __init__(self, schedule: Schedule, emulated: frozenset[str]) -> None:
        self._schedule, self._emulated = schedule, emulated
        self._buffers: dict[Tensor, _Buffer] = {}
        self._alive: dict[int, _Buffer] = {}
        self._total = 0
        self._peak, self._at = 0, 0
        self._held: list[_Buffer] = []
        self._scratch: tuple[Held, ...] = ()
        self._uses = collections.Counter(
            [*(t for step in schedule.steps for t in step.inputs), *schedule.results]
        )

    def peak(self) -> Peak:
        steps = self._schedule.steps
        waits, followers = _order(steps)
        for tensor in self._schedule.arguments:
            self._buffers[tensor] = buffer = _Buffer(0, None)
            buffer.users = self._uses[tensor]
        ready = collections.deque(i for i, count in enumerate(waits) if not count)
        while ready:
            number = ready.popleft()
            self._run(number, steps[number])
            for follower in followers[number]:
                waits[follower] -= 1
                if not waits[follower]:
                    ready.append(follower)
        held = [self._describe(buffer) for buffer in self._held]
        at = steps[self._at].name if steps else ""
        return Peak(self._peak, (*held, *self._scratch), at)

    def _run(self, number: int, step: Step) -> None:
        given = [self._buffers[tensor] for tensor in step.inputs]
        made, scratch = self._make(number, step, given)
        extra = sum(each.num_bytes for each in scratch)
        if self._total + extra > self._peak:
            self._peak, self._at = self._total + extra, number
            self._held, self._scratch = list(self._alive.values()), scratch
        for output, buffer in enumerate(made):
            self._buffers[number, output] = buffer
            buffer.users += self._uses[number, output]
        for buffer in made:
            self._free_unused(buffer)
        for buffer in given:
            buffer.users -= 1
            self._free_unused(buffer)

    def _make(
        self, number: int, step: Step, given: list[_Buffer]
    ) -> tuple[list[_Buffer], tuple[Held, ...]]:
        """Returns the buffers of a step's outputs, and what it holds while it runs."""
        op, sizes = step.op, step.outputs
        if op in SHARING and given:
            return [given[0]], ()
        if op in GIVEN:
            return [_Buffer(0, None)], ()
        if op in IN_PLACE:
            for buffer in given:
                if buffer.users == 1 and 0 < buffer.num_bytes == sizes[0]:
                    return [buffer], ()
            return [self._new(sizes[0], number)], ()
        if op in LISTS:
            return [self._new(0, number)], ()
        if op in TAKING:
            return [_Buffer(0, None) for _ in sizes], ()
        if op == "TensorListFromTensor":
            return [self._new(given[0].num_bytes, number)], ()
        if len(step.inner) == 1:
            return self._loop(number, step, given)
        if step.inner:
            peaks = [_Run(each, self._emulated).peak() for each in step.inner]
            dearest = max(peaks, key=lambda peak: peak.num_bytes)
            made = [self._new(size, number) for size in sizes]
            return made, dearest.held
        made = [self._new(size, number) for size in sizes]
        extra = 0
        if step.node is not None:
            read = [self._schedule.bytes_of(tensor) for tensor in step.inputs]
            extra = scratch_bytes(step.node, read, sizes, emulated=self._emulated)
        held = (Held(extra, step.name, "scratch"),) if extra else ()
        return made or [_Buffer(0, None)], held

    def _loop(
        self, number: int, step: Step, given: list[_Buffer]
    ) -> tuple[list[_Buffer], tuple[Held, ...]]:
        """Runs a loop: one run of its body, with the lists that all runs fill."""
        (inner,) = step.inner
        once = _Run(inner, self._emulated).peak()
        pushed, popped = _pushed_and_popped(inner)
        drained = sum(
            given[index].num_bytes for index in popped if given[index].users == 1
        )
        made = []
        grown = 0
        for index, result in enumerate(inner.results):
            if result == (ARGUMENT, index):
                made.append(given[index])
                continue
            size = step.outputs[index] if index < len(step.outputs) else 0
            if index in pushed:
                size = pushed[index] * step.trips
                grown += size
            made.append(self._new(size, number))
        # What was kept for the gradient goes as the loop takes it off its lists.
        saved = min(drained, grown)
        held = tuple(
            dataclasses.replace(each, name=f"{step.name}/{each.name}")
            for each in once.held
        )
        if saved:
            held += (Held(-saved, step.name, "scratch"),)
        return made, held

    def _new(self, num_bytes: int, maker: int) -> _Buffer:
        buffer = _Buffer(num_bytes, maker)
        self._alive[id(buffer)] = buffer
        self._total += num_bytes
        return buffer

    def _free_unused(self, buffer: _Buffer) -> None:
        if buffer.users <= 0 and self._alive.pop(id(buffer), None) is not None:
            self._total -= buffer.num_bytes

    def _describe(self, buffer: _Buffer) -> Held:
        steps = self._schedule.steps
        step = steps[buffer.maker or 0]
        first = step.inputs[0][0] if step.inputs else ARGUMENT
        source = steps[first].op if first != ARGUMENT else ""
        return Held(buffer.num_bytes, step.name, step.op, source)


def _order(steps: list[Step]) -> tuple[list[int], list[list[int]]]:
    """Returns how many steps each waits for, and which ones wait for it."""
    waits, followers = [0] * len(steps), [list[int]() for _ in steps]
    for number, step in enumerate(steps):
        before = {made for made, _ in step.inputs if made != ARGUMENT} | {*step.after}
        waits[number] = len(before)
        for each in before:
            followers[each].append(number)
    return waits, followers


def _pushed_and_popped(inner: Schedule) -> tuple[dict[int, int], list[int]]:
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
            break
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
