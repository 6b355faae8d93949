"""A model's copy that predicts in float32, which every runtime's exporter takes."""

from typing import Any

import keras

from tfamp.keras_hooks import structure, trainer, variables
from tfamp.models import apply
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import check_built
from tfamp.stepping.unchanged import copied

# Steps up to which a recurrent layer is written out: LiteRT and OpenVINO have no loops
# over lists of tensors, and a graph of thousands of steps takes minutes to convert.
MAX_UNROLLED_STEPS = 64


def float32_copy(model: keras.Model) -> keras.Model:
    """Returns a copy that stores and computes everything in float32, not compiled.

    Exporters fail on casts to bfloat16, and write files that no runtime loads. What was
    rounded in a model in half precision stays rounded; its sums get more exact.

    Raises:
        TypeError: `model` is not a Keras model.
        ValueError: It has no weights yet, or cannot be copied.
    """
    check_built(model, "export")
    copy = copied(model, instead="export a model whose classes have one")
    own = {id(weight) for weight in model.weights}
    if own & {id(weight) for weight in copy.weights}:
        raise ValueError(
            f"Cannot copy model {model.name!r}: its copy holds weights of the original."
        )
    if structure.compute_dtypes(copy) & {*HALF}:
        apply(copy, "float32")
    trainer.forget_training(copy)
    with copy.distribute_strategy.scope():
        for weight in copy.weights:
            if weight.dtype in HALF:
                variables.store_in(weight, "float32")
    graph = structure.graph_of(copy)
    if graph is not None:
        structure.widen_inputs(graph)
    trainer.drop_traced_functions(copy)
    return copy


def unroll(model: keras.Model) -> tuple[str, ...]:
    """Has recurrent layers of few, known steps run without a loop, in place.

    The results are the same to the last bit.

    Returns:
        The paths of recurrent layers that still loop: of unknown or too many steps.
    """
    looping = []
    for path, layer, _ in structure.walk(model):
        if not isinstance(layer, keras.layers.RNN):
            continue
        steps = _steps(layer)
        if steps is not None and steps <= MAX_UNROLLED_STEPS:
            layer.unroll = True
        else:
            looping.append(path)
    return tuple(looping)


def _steps(layer: Any) -> int | None:
    """Returns the number of steps of a recurrent layer's input, None if unknown."""
    shapes = structure.built_shapes(layer)
    for shape in shapes.values():
        if isinstance(shape, (tuple, list)) and len(shape) >= 3:
            return None if shape[1] is None else int(shape[1])
    return None
