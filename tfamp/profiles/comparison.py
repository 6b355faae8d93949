"""`compare_times`: two profiles side by side, type by type."""

from collections.abc import Sequence

from tfamp._units import format_ratio, format_seconds
from tfamp.profiles.columns import in_columns
from tfamp.profiles.times import OperationTimes

_TOTAL = "all operations"


def compare_times(
    before: OperationTimes,
    after: OperationTimes,
    *,
    names: tuple[str, str] = ("before", "after"),
    limit: int = 15,
) -> str:
    """Returns a table of the time a step that each type of operation takes in both.

    The ratio is how much longer it takes after: a cast that was not there before has
    none, and what got faster lies below 1. Types of both are listed, so that what a
    policy adds is seen beside what it saves.

    Args:
        before: Such as that of float32.
        after: Such as that of a policy.
        names: What to call the two.
        limit: Rows at most, those that take longest in either; the rest is summed up.

    Raises:
        ValueError: One tells its steps and the other does not.

    Example:
        >>> from tfamp.profiles.times import OperationTime
        >>> def profile(**seconds):
        ...     found = [
        ...         OperationTime(type, "host", 1, taken, taken, 0.5)
        ...         for type, taken in seconds.items()
        ...     ]
        ...     return OperationTimes(tuple(found), (), {}, 1.0, steps=10)
        >>> print(compare_times(profile(MatMul=0.04), profile(MatMul=0.02, Cast=0.01)))
        type            where  before   after  ratio
        MatMul           host  4.0 ms  2.0 ms  0.50x
        Cast             host       -  1.0 ms      -
        all operations   host  4.0 ms  3.0 ms  0.75x
    """
    if (before.steps is None) != (after.steps is None):
        raise ValueError(
            f"`before` has {before.steps!r} steps, `after` has {after.steps!r}; "
            "expected a number in both or in neither. Pass `steps` to "
            "`operation_times`."
        )
    sides = [_by_type(before), _by_type(after)]
    keys = list(dict.fromkeys([*sides[0], *sides[1]]))
    keys.sort(key=lambda key: -max(side.get(key, 0.0) for side in sides))
    rows = [_row(*key, [side.get(key) for side in sides]) for key in keys[:limit]]
    if left := keys[limit:]:
        sums = [sum(side.get(key, 0.0) for key in left) for side in sides]
        rows.append(_row(f"{len(left)} more", "", sums))
    for where in dict.fromkeys(where for _, where in keys):
        sums = [sum(t for (_, w), t in side.items() if w == where) for side in sides]
        rows.append(_row(_TOTAL, where, sums))
    return in_columns([("type", "where", *names, "ratio"), *rows])


def _by_type(times: OperationTimes) -> dict[tuple[str, str], float]:
    """Returns the self time a step of each type and place."""
    steps = times.steps or 1
    return {
        (entry.type, entry.where): entry.self_seconds / steps for entry in times.by_type
    }


def _row(kind: str, where: str, seconds: Sequence[float | None]) -> tuple[str, ...]:
    before, after = seconds
    shown = ["-" if not value else format_seconds(value) for value in seconds]
    ratio = format_ratio(after, before) if before and after else "-"
    return kind, where, *shown, ratio
