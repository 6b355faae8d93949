"""What each run of a loop adds to the lists that its gradient takes from."""

from tfamp.graph.buffers import LISTS, SHARING
from tfamp.graph.plans import ARGUMENT, Plan, Step, Tensor


def pushed_and_popped(inner: Plan) -> tuple[dict[int, int], list[int]]:
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


def _chain(inner: Plan, tensor: Tensor) -> list[Step]:
    """Returns the operations on a list that lead from the argument to a result."""
    found: list[Step] = []
    while tensor[0] != ARGUMENT:
        step = inner.steps[tensor[0]]
        if not step.inputs or not (step.op == "Identity" or "TensorList" in step.op):
            return found
        found.append(step)
        tensor = step.inputs[0]
    return found


def _root(inner: Plan, tensor: Tensor, seen: set[int]) -> Tensor | None:
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
