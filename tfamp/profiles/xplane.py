"""Operations with their times, read from the files of TensorFlow's profiler.

A profile holds planes (the host, each GPU), these hold lines (threads, streams), these
hold events. Events of operations are told apart from the many others, and the time in
operations that ran inside one is taken off it.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tfamp import _checks

_PROTOBUF = "tensorflow.tsl.profiler.protobuf.xplane_pb2"
_PICOSECONDS = 1e12
# "StatefulPartitionedCall/model/dense/MatMul:MatMul", by the executor. Its other
# events have two colons, or none.
_OPERATION = re.compile(r"(?P<name>[^:]+):(?P<kind>_?[A-Za-z]\w*)")
# "dot.12" and "MatMul_1.30.clone": XLA numbers instructions.
_NUMBERS = re.compile(r"(?:\.\d+|\.clone|_\d+)+$")
_DEVICE_PLANE = "/device:"
# Lines of a GPU's plane that tell the same kernels again, by step, module or scope.
_DERIVED_LINES = ("Steps", "XLA Modules", "TensorFlow ", "Source code", "Framework ")


class Timed(NamedTuple):
    """One run of an operation.

    Attributes:
        name: As in the graph; of XLA the instruction's.
        kind: Type of the operation, such as "MatMul".
        where: "host" or "device".
        start_seconds: When it began, from some moment on.
        seconds: How long it took.
        self_seconds: Less the operations that ran inside it on the same line.
    """

    name: str
    kind: str
    where: str
    start_seconds: float
    seconds: float
    self_seconds: float


def read_operations(directory: str | os.PathLike[str]) -> list[Timed]:
    """Returns every run of every operation in the newest profile of a directory.

    Args:
        directory: What `capture` or TensorBoard's callback wrote to.

    Raises:
        FileNotFoundError: There is no profile.
        ValueError: It is damaged.
        ImportError: This TensorFlow lacks the means to read it.
    """
    operations: list[Timed] = []
    for path in _newest(Path(directory)):
        for plane in _load(path).planes:
            operations += _of_plane(plane)
    return operations


def _newest(directory: Path) -> list[Path]:
    """Returns the files of the newest profile, one for each host."""
    files = sorted(
        directory.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime
    )
    if not files:
        raise FileNotFoundError(
            f"`directory` is {str(directory)!r}, which holds no profile; expected "
            "'*.xplane.pb' somewhere in it. Run a few steps inside "
            "`capture(directory)` first."
        )
    return [file for file in files if file.parent == files[-1].parent]


def _load(path: Path) -> Any:
    try:
        protobuf: Any = _checks.require(
            _PROTOBUF, extra=None, purpose="Reading a profile"
        )
    except ImportError as error:
        raise ImportError(
            f"TensorFlow here has no {_PROTOBUF!r}; expected TensorFlow 2.19 to 2.21. "
            "Install one of these, or look at the profile with xprof.",
            name=_PROTOBUF,
        ) from error
    space = protobuf.XSpace()
    try:
        space.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own class differs by its version
        raise ValueError(
            f"The profile {str(path)!r} is damaged ({error}); expected what the "
            "profiler wrote. Capture it again, with room on the disk."
        ) from error
    return space


def _of_plane(plane: Any) -> Iterator[Timed]:
    where = "device" if plane.name.startswith(_DEVICE_PLANE) else "host"
    names = {key: _Names(plane, data) for key, data in plane.event_metadata.items()}
    for line in plane.lines:
        if where == "device" and line.name.startswith(_DERIVED_LINES):
            continue
        found = []
        for event in line.events:
            named = names[event.metadata_id].of(event)
            if named is not None:
                start = 1000 * line.timestamp_ns + event.offset_ps
                found.append((start, event.duration_ps, *named))
        yield from _with_self_times(found, where)


class _Names:
    """What the events of one kind are called.

    Args:
        plane: Where texts are kept.
        metadata: What its events share.
    """

    def __init__(self, plane: Any, metadata: Any) -> None:
        self._plane = plane
        own = {
            plane.stat_metadata[stat.metadata_id].name: _text(plane, stat)
            for stat in metadata.stats
        }
        text = own.get("tf_op") or metadata.name
        matched = _OPERATION.fullmatch(text)
        self._known = (matched["name"], matched["kind"]) if matched else None
        self._instruction = metadata.name

    def of(self, event: Any) -> tuple[str, str] | None:
        """Returns name and kind of an event, None if it is no operation."""
        if self._known is not None:
            return self._known
        for stat in event.stats:
            stat_name = self._plane.stat_metadata[stat.metadata_id].name
            if stat_name == "tf_op":
                matched = _OPERATION.fullmatch(_text(self._plane, stat))
                if matched:
                    return matched["name"], matched["kind"]
            elif stat_name == "hlo_op":
                name = _text(self._plane, stat) or self._instruction
                return name, _NUMBERS.sub("", name)
        return None


def _text(plane: Any, stat: Any) -> str:
    """Returns the text of a stat, which may refer to one kept elsewhere."""
    if stat.WhichOneof("value") == "ref_value":
        return str(plane.stat_metadata[stat.ref_value].name)
    return str(stat.str_value)


def _with_self_times(
    events: Iterable[tuple[int, int, str, str]], where: str
) -> Iterator[Timed]:
    """Yields the operations of a line; one inside another is taken off that.

    Args:
        events: Start and duration in picoseconds, name and kind.
        where: Where they ran.
    """
    # Of two that begin together the longer one is around the other.
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    inside = [0] * len(ordered)
    around: list[int] = []
    for index, (start, duration, *_) in enumerate(ordered):
        while around and start >= ordered[around[-1]][0] + ordered[around[-1]][1]:
            around.pop()
        if around:
            inside[around[-1]] += duration
        around.append(index)
    for (start, duration, name, kind), nested in zip(ordered, inside, strict=True):
        yield Timed(
            name=name,
            kind=kind,
            where=where,
            start_seconds=start / _PICOSECONDS,
            seconds=duration / _PICOSECONDS,
            self_seconds=max(0, duration - nested) / _PICOSECONDS,
        )
