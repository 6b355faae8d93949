"""The shapes and dtypes of a batch that a model takes, for any batch size."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure

_HOW = "Pass a batch of yours as `data=(x, y)`; only its shapes are read."


def specs_of(model: keras.Model, data: Any, batch_size: int, *, training: bool) -> Any:
    """Returns a `tf.TensorSpec` for each tensor of a batch.

    Args:
        model: A Keras model.
        data: A dataset of batches, a batch (x, y), or None to ask the model.
        batch_size: Examples of the batch; the first dimension of each tensor.
        training: Whether targets are needed.

    Raises:
        TypeError: `data` is neither.
        ValueError: The model does not tell its inputs or targets.
    """
    if data is not None:
        return tf.nest.map_structure(
            lambda spec: _with_batch(spec.shape, spec.dtype, batch_size),
            _specs_of_data(data),
        )
    x = _inputs(model, batch_size)
    if not training:
        return (x,)
    return x, _targets(model, x)


def _specs_of_data(data: Any) -> Any:
    if callable(getattr(data, "build", None)):
        data = data.build()
    if isinstance(data, tf.data.Dataset):
        return data.element_spec
    if not isinstance(data, (tuple, list)) or not 1 <= len(data) <= 3:
        raise TypeError(
            f"`data` is of type {type(data).__name__}; expected a dataset of batches, "
            "a `Pipeline`, or a tuple (x, y) of arrays. Pass one batch as (x, y)."
        )

    def spec(array: Any) -> tf.TensorSpec:
        dtype = tf.as_dtype(getattr(array, "dtype", None) or keras.config.floatx())
        if dtype == tf.float64:
            dtype = tf.as_dtype(keras.config.floatx())
        return tf.TensorSpec(array.shape, dtype)

    return tf.nest.map_structure(spec, tuple(data))


def _inputs(model: keras.Model, batch_size: int) -> Any:
    graph = structure.graph_of(model)
    if graph is not None:
        return structure.map_structure(
            lambda x: _with_batch(x.shape, x.dtype, batch_size),
            structure.inputs_of(graph),
        )
    shapes = structure.built_shapes(model)
    if not shapes:
        raise ValueError(
            f"Model {model.name!r} does not tell the shapes of its inputs; expected a "
            f"Functional or Sequential model, or one that is built. {_HOW}"
        )
    found = [
        structure.map_shapes(
            lambda shape: _with_batch(shape, model.input_dtype, batch_size), shape
        )
        for shape in shapes.values()
    ]
    return found[0] if len(found) == 1 else tuple(found)


def _targets(model: keras.Model, x: Any) -> Any:
    """Returns targets that the compiled loss takes: classes as numbers, or outputs."""
    outputs = model.compute_output_spec(structure.map_structure(_symbolic, x))
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return {name: _target(outputs[name], loss.get(name)) for name in outputs}
    if isinstance(loss, (list, tuple)) and isinstance(outputs, (list, tuple)):
        return tuple(_target(y, each) for y, each in zip(outputs, loss, strict=True))
    return structure.map_structure(lambda y: _target(y, loss), outputs)


def _symbolic(spec: tf.TensorSpec) -> keras.KerasTensor:
    return keras.KerasTensor(spec.shape, spec.dtype.name)


def _target(output: keras.KerasTensor, loss: Any) -> tf.TensorSpec:
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    name = name or getattr(loss, "__name__", type(loss).__name__)
    if "sparse" in str(name).lower():
        return tf.TensorSpec(output.shape[:-1], tf.int32)
    return tf.TensorSpec(output.shape, tf.as_dtype(keras.config.floatx()))


def _with_batch(shape: Any, dtype: Any, batch_size: int) -> tf.TensorSpec:
    sizes = tuple(tf.TensorShape(shape).as_list()) if shape is not None else (None,)
    if None in sizes[1:]:
        raise ValueError(
            f"An input has the shape {sizes!r}, and sizes that are None may be any; "
            "expected one that is known but for the batch. Pass a batch of yours as "
            "`data=(x, y)`; only its shapes are read."
        )
    return tf.TensorSpec((batch_size, *sizes[1:]), tf.as_dtype(dtype))
