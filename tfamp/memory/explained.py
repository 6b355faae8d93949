"""What is said of an error of memory: what the model holds, and what to do."""

import functools

import keras

from tfamp.keras_hooks import structure
from tfamp.machine.memory import machine_memory
from tfamp.machine.out_of_memory import explain
from tfamp.memory.estimator import estimate_memory


def text(error: Exception, model: keras.Model, *, training: bool) -> str:
    """Returns what explains an error of memory in a run of a model."""
    dtypes = structure.compute_dtypes(model)
    optimizer = getattr(model, "optimizer", None) if training else None
    held = {"weights": structure.bytes_of(model.weights)}
    if optimizer is not None:
        held["optimizer slots"] = structure.bytes_of(optimizer.variables)
    return explain(
        str(error),
        held=held,
        memory=machine_memory(),
        training=training,
        computes_in=dtypes.pop() if len(dtypes) == 1 else "",
        largest_batch=functools.partial(_largest_batch, model) if training else None,
    )


def _largest_batch(model: keras.Model, limit_bytes: int) -> int:
    """Returns how many examples of a training step fit into a memory, by its trace."""
    replicas = model.distribute_strategy.num_replicas_in_sync
    return int(estimate_memory(model, 32 * replicas).largest_batch(limit_bytes))
