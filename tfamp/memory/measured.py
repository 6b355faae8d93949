"""The memory of a training process, measured at two small sizes in fresh ones."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.memory.batch_search import policy_in_force, try_size
from tfamp.records import checks
from tfamp.trials import parcel
from tfamp.trials.tasks import Task

_STEPS = 3
# The larger of two sizes is four times the other.
_TIMES = 4


class Line(NamedTuple):
    """Peak bytes of two batch sizes, and of any other by the line through them."""

    sizes: tuple[int, int]
    peaks: tuple[int, int]

    def at(self, size: int) -> int:
        """Returns the peak of a batch size; memory never falls with the batch.

        Example:
            >>> Line((8, 16), (1000, 1080)).at(64)
            1560
        """
        (small, large), (low, high) = self.sizes, self.peaks
        slope = max(0.0, (high - low) / (large - small))
        return max(0, round(low + slope * (size - small)))


def measured_line(
    build: Callable[[], keras.Model], batch: Any, size: int, policy: str | None
) -> Line:
    """Trains some steps at two sizes, each in a fresh process; takes some 20 seconds.

    Args:
        build: Returns the compiled model; it goes to the processes.
        batch: Rows that are repeated to the sizes.
        size: The larger of them, which is to hold far more than processes differ by.
        policy: What to build under; None for what is in force.
    """
    checks.require("cloudpickle", extra="report", purpose="`measure=True`")
    checks.require("psutil", extra="report", purpose="`measure=True`")
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    small = max(1, round(size / _TIMES / replicas)) * replicas
    large = max(round(size / replicas) * replicas, 2 * small)
    peaks = []
    with tempfile.TemporaryDirectory(prefix="tfamp-memory-") as name:
        folder = Path(name)
        policy = policy or policy_in_force(folder)
        parcel.pack(folder, build, tf.data.Dataset.from_tensors(batch), None)
        for each in (small, large):
            # The rows of a batch are repeated, so that the data set no limit.
            task = Task(policy, steps=_STEPS, batch_size=each, data_batch_size=large)
            trial, _ = try_size(folder, task)
            if trial.peak_bytes is None:
                raise MemoryError(
                    f"A batch of {each} was to be measured, and its process ended by "
                    f"{trial.outcome!r}; expected it to fit. Pass a smaller "
                    "`batch_size`, or a policy of half precision."
                )
            peaks.append(trial.peak_bytes)
    return Line((small, large), (peaks[0], peaks[1]))


def rebuilding(model: keras.Model) -> Callable[[], keras.Model]:
    """Returns what gives a compiled model in another process, as Keras pickles it.

    A TypeError says that the model cannot be pickled.
    """
    pickle = checks.require("cloudpickle", extra="report", purpose="`measure=True`")
    try:
        pickle.loads(pickle.dumps(model))  # or it would fail where nobody sees why
    except Exception as error:  # of whatever objects the model holds
        raise TypeError(
            f"`model_or_build` is {model.name!r}, which cannot be taken to the process "
            f"that is measured ({checks.first_line(error)}); expected a model whose "
            "classes are registered (`keras.saving.register_keras_serializable`), or a "
            "function that returns it. Pass that function."
        ) from error
    return lambda: model
