"""Where the time of a step goes under each policy, side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from tfamp import profiles
from tfamp.compare.job import Job
from tfamp.compare.training import arguments
from tfamp.evidence import OperationTime
from tfamp.profiles import OperationTimes


def profile(model: keras.Model, data: Any, *, job: Job, directory: Path) -> None:
    """Profiles some more training steps of a model that `fit` has trained.

    TensorBoard with its profile plug-in opens the directory too.

    Args:
        model: Trained, so that nothing is traced meanwhile.
        data: Its training data.
        job: The settings; `profile_steps` is how many.
        directory: Where the profile goes, and `operations.json` with its sums.
    """
    given, _, _, steps_an_epoch = arguments(data, job)
    steps = min(job.profile_steps, steps_an_epoch or job.profile_steps)
    with profiles.capture(directory):
        model.fit(**given, epochs=1, steps_per_epoch=steps, verbose=0)
    times = profiles.operation_times(directory, steps=steps)
    times.to_json(directory / "operations.json")


def read(directory: Path) -> OperationTimes | None:
    """Returns the sums of a profile, None where none was taken."""
    path = directory / "operations.json"
    return OperationTimes.from_json(path) if path.is_file() else None


def side_by_side(
    times: Mapping[str, OperationTimes], reference: str
) -> dict[str, tuple[OperationTime, ...]]:
    """Returns for each policy the time of each type of operation beside the reference.

    On the device where there is one, else on the host; the longest types first.

    Args:
        times: Policy -> its profile.
        reference: One of them, or there is nothing to show.
    """
    if reference not in times:
        return {}
    found = {}
    before = _by_type(times[reference])
    for policy, profiled in times.items():
        if policy == reference:
            continue
        after = _by_type(profiled)
        rows = [
            OperationTime(kind, before.get(kind, 0.0), after.get(kind, 0.0))
            for kind in dict.fromkeys([*before, *after])
        ]
        rows.sort(key=lambda row: -max(row.before_seconds, row.after_seconds))
        found[policy] = tuple(rows)
    return found


def _by_type(times: OperationTimes) -> dict[str, float]:
    """Returns the seconds a step of each type of operation."""
    places = {entry.where for entry in times.by_type}
    place = "device" if "device" in places else "host"
    found: dict[str, float] = {}
    for entry in times.by_type:
        if entry.where == place:
            seconds = entry.self_seconds / (times.steps or 1)
            found[entry.type] = found.get(entry.type, 0.0) + seconds
    return found
