"""`operation_times`: where the time of a profile went, by operation and by type."""

import dataclasses
import os
from collections.abc import Iterable, Mapping

from tfamp import _checks
from tfamp.profiles.scopes import scope_of
from tfamp.profiles.xplane import Timed, read_operations
from tfamp.results import Record


@dataclasses.dataclass(frozen=True)
class OperationTime(Record):
    """The time of an operation, or of all operations of a type.

    Args:
        type: Type of the operation, such as "MatMul"; oneDNN's begin with "_Mkl",
            fused ones are named after the product, XLA's after the instruction.
        where: "host" or "device". With a GPU the host's time is that of launching.
        count: How often it ran.
        total_seconds: Time in it, with what ran inside it.
        self_seconds: Time in it alone.
        share: Its part of the time of all operations in the same place, in [0, 1].
        name: Name in the graph; "" for a type.
        layer: The scopes it stands in, those of its layer; "" for a type.
    """

    type: str
    where: str
    count: int
    total_seconds: float
    self_seconds: float
    share: float
    name: str = ""
    layer: str = ""


@dataclasses.dataclass(frozen=True)
class OperationTimes(Record):
    """Where the time of a profile went.

    Operations run beside one another, so their times may add up to more than went by.
    One that is cut up among threads counts once.

    Args:
        by_type: One entry for each type and place, the longest first.
        by_name: One for each operation, the longest first.
        by_layer: Self time of each layer in seconds, the longest first; "" is what
            stands in no scope. On the devices, where there are any besides the host.
        wall_seconds: From the first operation's start to the last one's end.
        steps: Training steps in the profile, None if not told.
    """

    by_type: tuple[OperationTime, ...]
    by_name: tuple[OperationTime, ...]
    by_layer: dict[str, float]
    wall_seconds: float
    steps: int | None = None


def operation_times(
    directory: str | os.PathLike[str], *, steps: int | None = None
) -> OperationTimes:
    """Returns where the time of the newest profile in a directory went.

    Args:
        directory: What `capture` wrote to.
        steps: Training steps in it, to tell times a step.

    Raises:
        FileNotFoundError: There is no profile.
        ValueError: It is damaged or holds no operation.
        ImportError: This TensorFlow lacks the means to read it.
    """
    if steps is not None:
        steps = _checks.positive_int("steps", steps)
    operations = read_operations(directory)
    if not operations:
        raise ValueError(
            f"The profile in {os.fspath(directory)!r} holds no operations; expected "
            "some steps. Run them inside `capture(directory)`, after a first one that "
            "traces."
        )
    layer_of = {run.name: "/".join(scope_of(run.name)) for run in operations}
    # With a GPU the host's time is that of launching, which no layer is judged by.
    has_device = any(run.where == "device" for run in operations)
    main = [run for run in operations if run.where == "device" or not has_device]
    by_layer: dict[str, float] = {}
    for run in main:
        layer = layer_of[run.name]
        by_layer[layer] = by_layer.get(layer, 0.0) + run.self_seconds
    longest = sorted(by_layer.items(), key=lambda item: -item[1])
    ends = [run.start_seconds + run.seconds for run in operations]
    return OperationTimes(
        by_type=_grouped(operations),
        by_name=_grouped(operations, layer_of),
        by_layer=dict(longest),
        wall_seconds=max(ends) - min(run.start_seconds for run in operations),
        steps=steps,
    )


def _grouped(
    operations: Iterable[Timed], layer_of: Mapping[str, str] | None = None
) -> tuple[OperationTime, ...]:
    """Returns the times of each type, or of each operation.

    Args:
        operations: All runs.
        layer_of: The layer of each name; None does without names.
    """
    groups: dict[tuple[str, str, str], list[Timed]] = {}
    places: dict[str, float] = {}
    for run in operations:
        name = "" if layer_of is None else run.name
        groups.setdefault((run.where, run.kind, name), []).append(run)
        places[run.where] = places.get(run.where, 0.0) + run.self_seconds
    found = [
        OperationTime(
            type=kind,
            where=where,
            count=len(runs),
            total_seconds=sum(run.seconds for run in runs),
            self_seconds=(own := sum(run.self_seconds for run in runs)),
            share=own / places[where] if places[where] else 0.0,
            name=name,
            layer="" if layer_of is None else layer_of[name],
        )
        for (where, kind, name), runs in groups.items()
    ]
    return tuple(sorted(found, key=lambda entry: -entry.self_seconds))
