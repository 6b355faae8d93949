"""FLOPs of a training step and the peak of the devices it runs on."""

import collections
from typing import Any

import keras
import tensorflow as tf

from tfamp.graph.operations import forward_flops
from tfamp.keras_hooks import structure
from tfamp.machine.speeds import peak_flops

# A backward pass computes a product for the inputs and one for the weights.
# Source: Kaplan et al., Scaling Laws for Neural Language Models, 2020, section 2.1.
TRAINING_OVER_FORWARD = 3


def flops_of_example(model: keras.Model, element_spec: Any) -> tuple[float | None, str]:
    """Returns the FLOPs of training on one example, and why not where they are None.

    Traces the model once.

    Args:
        model: A built model.
        element_spec: What a batch is like.
    """
    specs = _input_specs(model, element_spec)
    if specs is None:
        return None, "the size of an example is not fixed"
    try:
        forward = forward_flops(model, specs)
    except Exception as error:  # a `call` that does without some shapes or values
        return None, f"counting failed ({type(error).__name__})"
    return float(TRAINING_OVER_FORWARD * forward), ""


def peak_of_devices(model: keras.Model) -> tuple[float | None, str]:
    """Returns the peak FLOPs a second of what trains a model, or None and why.

    Args:
        model: A compiled model.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return None, "the peak of a CPU is not known"
    names = {
        tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for gpu in gpus
    }
    if len(names) > 1:
        return None, f"the GPUs differ: {', '.join(sorted(names))}"
    name, dtype = names.pop(), compute_dtype_of(model)
    peak = peak_flops(name, dtype)
    if peak is None:
        return None, f"the peak of {name} in {dtype} is not in the table"
    return peak * model.distribute_strategy.num_replicas_in_sync, ""


def compute_dtype_of(model: keras.Model) -> str:
    """Returns the dtype that most of a model's weights are multiplied in.

    "tfloat32" where TensorFlow runs float32 products in that.

    Args:
        model: A built model.
    """
    sizes: collections.Counter[str] = collections.Counter()
    for _, layer, _ in structure.walk(model):
        below = sum(child.count_params() for child in structure.children(layer))
        sizes[layer.compute_dtype] += layer.count_params() - below
    dtype = sizes.most_common(1)[0][0] if sizes else "float32"
    if (
        dtype == "float32"
        and tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        return "tfloat32"
    return dtype


def _input_specs(model: keras.Model, element_spec: Any) -> Any:
    """Returns what one example is like, as a batch of 1; None where that varies."""
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    if not all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(inputs)):
        # Batches cut up for replicas; a graph of layers knows its inputs.
        if not isinstance(getattr(model, "inputs", None), list):
            return None
        inputs = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec(tensor.shape, tensor.dtype), model.input
        )
    for spec in tf.nest.flatten(inputs):
        if not spec.shape.rank or None in spec.shape.as_list()[1:]:
            return None
    return tf.nest.map_structure(
        lambda spec: tf.TensorSpec([1, *spec.shape[1:]], spec.dtype), inputs
    )
