"""Where the time of a step goes, from profiles, and policies side by side."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.records import checks
from tfamp.records.files import whole
from tfamp.trials.run_records import OperationTime
from tfamp.trials.storage import Job
from tfamp.trials.training import arguments

_PROTOBUF = "tensorflow.tsl.profiler.protobuf.xplane_pb2"
_PICOSECONDS = 1e12
# "StatefulPartitionedCall/model/dense/MatMul:MatMul", by the executor. Its other
# events have two colons, or none.
_OPERATION = re.compile(r"[^:]+:(?P<type>_?[A-Za-z]\w*)")
# "dot.12" and "MatMul_1.30.clone": XLA numbers instructions.
_NUMBERS = re.compile(r"(?:\.\d+|\.clone|_\d+)+$")
_DEVICE_PLANE = "/device:"
# Lines of a GPU's plane that tell the same kernels again, by step, module or scope.
_DERIVED_LINES = ("Steps", "XLA Modules", "TensorFlow ", "Source code", "Framework ")
_SUMS = "seconds_by_operation.json"


def seconds_by_type(directory: Path) -> dict[str, float]:
    """Returns the time in each type of operation of the newest profile, longest first.

    Operations run beside one another, so their times may add up to more than went by.
    Types are such as "MatMul"; oneDNN's begin with "_Mkl", fused ones are named after
    the product, XLA's after the instruction. With a GPU the host's time is that of
    launching, so that only the device's counts.
    """
    by_place: dict[bool, dict[str, float]] = {True: {}, False: {}}
    files = list(directory.rglob("*.xplane.pb"))
    newest = max(files, key=lambda file: file.stat().st_mtime, default=directory)
    # Of the newest profile there is a file for each host.
    for path in (each for each in files if each.parent == newest.parent):
        for plane in _load(path).planes:
            is_device = plane.name.startswith(_DEVICE_PLANE)
            own = by_place[is_device]
            for line in plane.lines:
                if is_device and line.name.startswith(_DERIVED_LINES):
                    continue
                for kind, seconds in _with_self_times(_operations(plane, line)):
                    own[kind] = own.get(kind, 0.0) + seconds
    found = by_place[True] or by_place[False]
    if not found:
        raise ValueError(
            f"The profile in {str(directory)!r} holds no operations; expected those of "
            "some steps."
        )
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _load(path: Path) -> Any:
    try:
        protobuf: Any = checks.require(
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


def _operations(plane: Any, line: Any) -> Iterator[tuple[int, int, str]]:
    """Yields start, duration in picoseconds and type of the operations of a line."""
    for event in line.events:
        metadata = plane.event_metadata[event.metadata_id]
        stats = {
            plane.stat_metadata[stat.metadata_id].name: _text(plane, stat)
            for stat in (*metadata.stats, *event.stats)
        }
        matched = _OPERATION.fullmatch(stats.get("tf_op") or metadata.name)
        if matched:
            yield event.offset_ps, event.duration_ps, matched["type"]
        elif "hlo_op" in stats:
            name = stats["hlo_op"] or metadata.name
            yield event.offset_ps, event.duration_ps, _NUMBERS.sub("", name)


def _text(plane: Any, stat: Any) -> str:
    """Returns the text of a stat, which may refer to one kept elsewhere."""
    if stat.WhichOneof("value") == "ref_value":
        return str(plane.stat_metadata[stat.ref_value].name)
    return str(stat.str_value)


def _with_self_times(
    events: Iterable[tuple[int, int, str]],
) -> Iterator[tuple[str, float]]:
    """Yields type and seconds of operations; one inside another is taken off that."""
    # Of two that begin together the longer one is around the other.
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    inside = [0] * len(ordered)
    around: list[int] = []
    for index, (start, duration, _) in enumerate(ordered):
        while around and start >= ordered[around[-1]][0] + ordered[around[-1]][1]:
            around.pop()
        if around:
            inside[around[-1]] += duration
        around.append(index)
    for (_, duration, kind), nested in zip(ordered, inside, strict=True):
        yield kind, max(0, duration - nested) / _PICOSECONDS


def profile(model: keras.Model, data: Any, *, job: Job, directory: Path) -> None:
    """Profiles some more training steps of a model that `fit` has trained.

    Steps run a few percent slower meanwhile. TensorBoard with its profile plug-in (`pip
    install xprof`) opens the directory too, where the seconds of a step in each type of
    operation lie. A profiler that runs already is a `tf.errors.OpError`.
    """
    given, _, _, steps_an_epoch = arguments(data, job)
    steps = min(job.profile_steps, steps_an_epoch or job.profile_steps)
    directory.mkdir(parents=True, exist_ok=True)
    with tf.profiler.experimental.Profile(str(directory)):
        model.fit(**given, epochs=1, steps_per_epoch=steps, verbose=0)
        tf.test.experimental.sync_devices()  # what still computes belongs to it
    seconds = {k: total / steps for k, total in seconds_by_type(directory).items()}
    with whole(directory / _SUMS) as beside:
        beside.write_text(json.dumps(seconds), encoding="utf-8")


def read(directory: Path) -> dict[str, float]:
    """Returns the seconds of a step in each type of operation, if it was profiled."""
    path = directory / _SUMS
    found: dict[str, float] = {}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def side_by_side(
    seconds: Mapping[str, Mapping[str, float]], reference: str
) -> dict[str, tuple[OperationTime, ...]]:
    """Returns the time of each type of operation of a step beside the reference's.

    By policy, the longest types first; nothing where one of the two has no profile.
    """
    before = seconds.get(reference, {})
    found = {}
    for policy, after in seconds.items():
        rows = [
            OperationTime(kind, before.get(kind, 0.0), after.get(kind, 0.0))
            for kind in {**before, **after}
        ]
        rows.sort(key=lambda row: -max(row.before_seconds, row.after_seconds))
        if policy != reference and before and after:
            found[policy] = tuple(rows)
    return found
