"""`tfamp.freeze`: weights stored once in the dtype that a model computes in."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import backend, structure, trainer
from tfamp.models import apply
from tfamp.records import checks
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import check_built
from tfamp.stepping.unchanged import copied

_IN_PLACE = "pass `in_place=True` to freeze the model itself"


def freeze(
    model: keras.Model,
    dtype: str = "bfloat16",
    *,
    sample: Any = None,
    in_place: bool = False,
) -> keras.Model:
    """Returns a model for inference that stores its weights in half precision.

    Under a mixed policy weights are stored in float32 and cast at every call. A frozen
    model stores what the casts gave: its outputs are those of the mixed model to the
    last bit, it needs half the memory, and it cannot be trained. Weights that any layer
    reads in float32, such as those of a head, stay as they are.

    Args:
        model: A built Keras model. One that computes in `dtype` already keeps its
            dtypes; another gets those of `tfamp.apply(model, "mixed_<dtype>")`.
        dtype: "bfloat16" or "float16".
        sample: Inputs as `predict` takes them, which a subclassed model may need.
        in_place: Change `model` itself rather than a copy. It loses its optimizer.

    Returns:
        The frozen model, not compiled, which `tfamp.load_model` loads as it was where
        tfamp manages it, else with rounded weights in float32.

    Raises:
        ValueError: `model` is not built, cannot be copied or called, or a weight is
            beyond the range of `dtype`. It is as it was.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8),
        ...                           keras.layers.Dense(2)])
        >>> frozen = freeze(model)
        >>> [weight.dtype for weight in frozen.weights]
        ['bfloat16', 'bfloat16', 'float32', 'float32']
    """
    checks.choice("dtype", dtype, HALF)
    check_built(model, "freeze")
    most = float(tf.as_dtype(dtype).max)
    for weight in model.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            size = float(np.max(np.abs(np.asarray(weight, np.float64)), initial=0.0))
            if most < size < np.inf:
                told = f"Weight {weight.path!r} reaches {size:.4g}; expected at most "
                raise ValueError(f"{told}{most:.6g} for {dtype}. Freeze in bfloat16.")
    _reads(model, sample)  # raises where it cannot be called
    frozen = model if in_place else copied(model, instead=_IN_PLACE)
    if structure.compute_dtypes(frozen) & {*HALF} != {dtype}:
        apply(frozen, f"mixed_{dtype}")
    reads = _reads(frozen, sample)
    if frozen is not model and reads.keys() & {id(each) for each in model.weights}:
        raise ValueError(
            f"Cannot copy {model.name!r}: its copy reads weights of the original, to "
            f"which functions refer that it holds. Make them methods, or {_IN_PLACE}."
        )
    trainer.forget_training(frozen)
    with frozen.distribute_strategy.scope():
        for weight in frozen.weights:
            if reads.get(id(weight)) == {dtype} and weight.dtype != dtype:
                backend.store_in(weight, dtype)
    trainer.drop_traced_functions(frozen)
    return frozen


def _reads(model: keras.Model, sample: Any) -> dict[int, set[str]]:
    """Returns the dtypes in which inference reads each weight."""
    graph = structure.graph_of(model)
    if sample is not None:
        args = [structure.map_structure(tf.convert_to_tensor, sample)]
    elif graph is not None:
        args = [structure.inputs_of(graph)]
    else:
        tensor = functools.partial(keras.KerasTensor, dtype=model.input_dtype)
        shapes = structure.built_shapes(model).values()
        args = [structure.map_shapes(tensor, shape) for shape in shapes]
    with backend.noting_reads() as found:
        try:
            structure.trace_call(model, tuple(args), {"training": False})
        except Exception as error:
            if graph is not None or sample is not None:
                raise
            told = f"Cannot tell the inputs of {model.name!r}: {first_line(error)}."
            raise ValueError(f"{told} Pass some inputs as `sample=`.") from error
    return found
