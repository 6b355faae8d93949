"""Where the time of a step goes under each policy, side by side."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfamp.records.files import whole
from tfamp.trials.job import Job
from tfamp.trials.run.training import arguments
from tfamp.trials.run.xplane import seconds_by_type
from tfamp.trials.run_records import OperationTime

_SUMS = "seconds_by_operation.json"


def profile(model: keras.Model, data: Any, *, job: Job, directory: Path) -> None:
    """Profiles some more training steps of a model that `fit` has trained.

    Steps run a few percent slower meanwhile. TensorBoard with its profile plug-in
    (`pip install xprof`) opens the directory too.

    Args:
        model: Trained, so that nothing is traced meanwhile.
        data: Its training data.
        job: The settings; `profile_steps` is how many.
        directory: Where the profile goes, and the seconds of a step in each type of
            operation.

    Raises:
        tf.errors.OpError: A profiler is running already, or the disk is full.
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
    """Returns for each policy the time of each type of operation beside the reference.

    The longest types come first.

    Args:
        seconds: Policy -> seconds of a step in each type of operation.
        reference: One of them, or there is nothing to show.
    """
    before = seconds.get(reference, {})
    found = {}
    for policy, after in seconds.items():
        rows = [
            OperationTime(kind, before.get(kind, 0.0), after.get(kind, 0.0))
            for kind in {**before, **after}
        ]
        rows.sort(key=lambda row: -max(row.before_seconds, row.after_seconds))
        if policy != reference and before:
            found[policy] = tuple(rows)
    return found
