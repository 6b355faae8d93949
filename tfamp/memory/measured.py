"""The memory of a training process, measured at two small sizes in fresh ones."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure, trainer
from tfamp.memory.batch_search import policy_in_force, try_size
from tfamp.records import checks
from tfamp.trials import parcel
from tfamp.trials.tasks import Task

_PURPOSE = "`tfamp.estimate_memory(..., measure=True)`"
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

    Raises:
        ImportError: A package of `tfamp[report]` is not installed.
        MemoryError: One of the sizes does not fit.
        RuntimeError: A process failed, and not for want of memory.
        TypeError: The model cannot be taken to another process.
    """
    for module in ("cloudpickle", "psutil"):
        checks.require(module, extra="report", purpose=_PURPOSE)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    small = max(1, round(size / _TIMES / replicas)) * replicas
    large = max(round(size / replicas) * replicas, 2 * small)
    peaks = []
    with tempfile.TemporaryDirectory(prefix="tfamp-memory-") as name:
        folder = Path(name)
        # The rows of a batch are repeated, so that the data set no limit.
        policy = policy or policy_in_force(folder)
        parcel.pack(folder, build, tf.data.Dataset.from_tensors(batch), None)
        for each in (small, large):
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
    """Returns what builds a compiled model anew in another process, without weights.

    Raises:
        TypeError: The model does not tell how.
    """
    arguments = trainer.compile_arguments(model)
    optimizer = arguments.pop("optimizer", None) or model.optimizer
    if not isinstance(optimizer, str):
        optimizer = (type(optimizer), optimizer.get_config())
    classes = {
        type(layer).__name__: type(layer)
        for _, layer, _ in structure.walk(model)
        if not type(layer).__module__.startswith("keras.")
    }
    try:
        build = functools.partial(
            _built, type(model), model.get_config(), classes, optimizer, arguments
        )
        build()  # or it would fail where nobody sees why
    except Exception as error:  # of whatever objects the model holds
        raise TypeError(
            f"`model_or_build` is {model.name!r}, which cannot be built anew in the "
            f"process that is measured ({checks.first_line(error)}); expected a model "
            "whose `get_config` has all that it is made of, or a function that returns "
            "it. Pass that function."
        ) from error
    return build


def _built(
    kind: type[keras.Model],
    config: Mapping[str, Any],
    classes: Mapping[str, type],
    optimizer: Any,
    arguments: Mapping[str, Any],
) -> keras.Model:
    with keras.saving.custom_object_scope(dict(classes)):
        model = kind.from_config(dict(config))
    if not isinstance(optimizer, str):
        optimizer = optimizer[0].from_config(optimizer[1])
    model.compile(optimizer=optimizer, **arguments)
    return model
