"""What half precision saves on each layer: of a step's time, of memory, of the size."""

from typing import Any, Literal

import keras

from tfamp.graph.operations import read_operations
from tfamp.graph.products import flops_of, is_product
from tfamp.keras_hooks import structure
from tfamp.machine import devices
from tfamp.stepping.costs import Roofline, computing, num_bytes
from tfamp.stepping.step_traces import trace_step

Objective = Literal["time", "memory", "size"]


def savings_of(
    model: keras.Model,
    dataset: Any,
    dtype: str,
    *,
    objective: Objective = "time",
    training: bool = True,
) -> dict[str, float]:
    """Returns path -> the share of the whole that half precision saves on a layer.

    Time is that of a roofline, whose shares order layers and foretell no speed; memory
    counts what operations hand on; the size counts weights.

    Args:
        model: A compiled model that computes in float32.
        dataset: Its batches.
        dtype: "float16" or "bfloat16".
        objective: What is to be saved.
        training: Whether a training step is meant, not a prediction.
    """
    if objective == "size":
        return _of_weights(model)
    trace = trace_step(model, dataset, training=training, jit_compile=False)
    roofline = Roofline(computing(devices.devices()))
    ratio = roofline.flops_per_byte(dtype)
    total = 0.0
    saved = {path: 0.0 for path, _, _ in structure.walk(model)}
    for operation in read_operations(trace.concrete):
        path = trace.marks.layer_of(operation.name)
        moved = float(num_bytes(operation))
        if objective == "memory":
            exact, low = moved, moved / 2
        else:
            exact, low = roofline.cost(operation, "float32"), moved / 2
            if is_product(operation):
                low = max(low, (flops_of(operation) or 0) / ratio)
        total += exact * operation.count
        if path in saved:
            saved[path] += max(exact - low, 0.0) * operation.count
    return {path: value / max(total, 1.0) for path, value in saved.items()}


def _of_weights(model: keras.Model) -> dict[str, float]:
    total = max(structure.bytes_of(model.weights), 1)
    return {
        path: structure.bytes_of(structure.own_weights(layer)) / 2 / total
        for path, layer, _ in structure.walk(model)
    }
