"""A plan for another batch size, from the plans of two."""

import dataclasses

from tfamp.graph.schedules import Schedule


def scaled(
    first: Schedule, second: Schedule, sizes: tuple[int, int], size: int
) -> Schedule | None:
    """Returns the steps for a batch size, each buffer growing evenly with the batch.

    Args:
        first: Of the first batch size.
        second: Of the second one.
        sizes: Both, different from each other.
        size: The one that is wanted.

    Returns:
        None where the two don't run the same operations.
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
