"""The memory of a step as XLA compiles it."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfamp.graph.compiled import find_program_peak
from tfamp.graph.liveness import Peak
from tfamp.records.checks import first_line


def program_peak(step: Callable[..., Any], specs: Any) -> tuple[Peak | None, str]:
    """Compiles a step and returns what its program holds, or why that is not known.

    Args:
        step: A model's `train_step` or `predict_step`.
        specs: A `tf.TensorSpec` for each tensor of a batch. The compiler takes
            tensors, so zeros of these shapes are made.
    """
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        return None, "XLA's program of a step on several replicas cannot be read"
    zeros = tf.nest.map_structure(lambda s: tf.zeros(s.shape, s.dtype), specs)
    function = tf.function(step, jit_compile=True)
    try:
        program = function.experimental_get_compiler_ir(zeros)
        return find_program_peak(program(stage="optimized_hlo")), ""
    except (tf.errors.OpError, ValueError, TypeError, NotImplementedError) as error:
        return None, f"XLA cannot compile this step ({first_line(error)})"
