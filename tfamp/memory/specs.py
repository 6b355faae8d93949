"""The shapes and dtypes of a batch that a model takes, for any batch size."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.stepping.arguments import dataset_of

_HOW = "Pass an example as `data`, x alone or (x, y), of which only the shapes are read"


def specs_of(
    model: keras.Model,
    data: Any,
    batch_size: int,
    sequence_length: int | None,
    *,
    training: bool,
) -> Any:
    """Returns a `tf.TensorSpec` for each tensor of a batch.

    Shapes are those of `data`, None asks the model; sizes that they leave open become
    `sequence_length`, None allows none.

    Raises:
        TypeError: `data` is nothing that `fit` takes.
        ValueError: The model does not tell its inputs or targets.
    """
    given = _inputs(model) if data is None else _specs_of_data(data)
    open_sizes = [
        f"{repr(spec.name) if spec.name else 'an input'} {tuple(spec.shape)}"
        for spec in tf.nest.flatten(given)
        if None in _sizes(spec)
    ]
    if open_sizes and sequence_length is None:
        whose = f"Model {model.name!r}" if data is None else "`data`"
        raise ValueError(
            f"{whose} leaves sizes of its inputs open: {', '.join(open_sizes)}; "
            f"expected sizes that are known but for the batch. {_HOW}; or one length "
            "for them as `sequence_length` (`--sequence_length` of `tfamp memory`)."
        )

    def known(spec: Any) -> tf.TensorSpec:
        sizes = [sequence_length if n is None else n for n in _sizes(spec)]
        return tf.TensorSpec((batch_size, *sizes), spec.dtype)

    specs = tf.nest.map_structure(known, given)
    if data is not None and not _is_x_alone(data):
        return specs
    # Without a loss `data` tell all that a `train_step` takes.
    has_targets = data is None or getattr(model, "loss", None) is not None
    return (specs, _targets(model, specs)) if training and has_targets else (specs,)


def _is_x_alone(data: Any) -> bool:
    """Returns whether data are inputs without targets, not in a tuple or dataset."""
    is_array = hasattr(data, "shape") and not callable(getattr(data, "build", None))
    return is_array or isinstance(data, dict)


def _sizes(spec: Any) -> list[int | None]:
    """Returns the sizes of a tensor beside the batch."""
    return [] if spec.shape.rank is None else spec.shape.as_list()[1:]


def _specs_of_data(data: Any) -> Any:
    is_batch = isinstance(data, (tuple, list)) and 1 <= len(data) <= 3
    if not is_batch and not _is_x_alone(data):
        return dataset_of(data).element_spec
    floatx = keras.config.floatx()

    def spec(array: Any) -> tf.TensorSpec:
        dtype = tf.as_dtype(getattr(array, "dtype", None) or floatx)
        return tf.TensorSpec(array.shape, floatx if dtype == tf.float64 else dtype)

    return tf.nest.map_structure(spec, tuple(data) if is_batch else data)


def _inputs(model: keras.Model) -> Any:
    graph = structure.graph_of(model)
    if graph is not None:
        return structure.map_structure(
            lambda x: tf.TensorSpec(x.shape, x.dtype, name=x.name),
            structure.inputs_of(graph),
        )
    shapes = structure.built_shapes(model)
    if not shapes:
        raise ValueError(
            f"Model {model.name!r} does not tell the shapes of its inputs; expected a "
            f"Functional or Sequential model, or one that is built. {_HOW}."
        )
    found = [
        structure.map_shapes(lambda s: tf.TensorSpec(s, model.input_dtype), shape)
        for shape in shapes.values()
    ]
    return found[0] if len(found) == 1 else found


def _targets(model: keras.Model, x: Any) -> Any:
    """Returns targets that the compiled loss takes: classes as numbers, or outputs."""

    def target(output: keras.KerasTensor, loss: Any) -> tf.TensorSpec:
        name = loss if isinstance(loss, str) else getattr(loss, "name", None)
        name = name or getattr(loss, "__name__", type(loss).__name__)
        if "sparse" in str(name).lower():
            return tf.TensorSpec(output.shape[:-1], tf.int32)
        return tf.TensorSpec(output.shape, keras.config.floatx())

    inputs = structure.map_structure(
        lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), x
    )
    outputs, loss = model.compute_output_spec(inputs), getattr(model, "loss", None)
    if isinstance(loss, dict) and isinstance(outputs, dict):
        return {name: target(outputs[name], loss.get(name)) for name in outputs}
    if isinstance(loss, (list, tuple)) and isinstance(outputs, (list, tuple)):
        return tuple(target(y, each) for y, each in zip(outputs, loss, strict=True))
    return structure.map_structure(lambda y: target(y, loss), outputs)
