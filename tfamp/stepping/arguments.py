"""Checks a model and a dataset, and builds what a measurement puts back."""

from typing import Any

import keras
import tensorflow as tf

from tfamp.stepping.snapshots.names import optimizers_of


def check_model(model: Any) -> None:
    """Raises unless `model` is a compiled Keras model."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"`model` is {model!r}, of type {type(model).__name__}; expected a "
            "compiled `keras.Model`. Pass the model first, then the dataset."
        )
    if not model.compiled:
        raise ValueError(
            f"Model {model.name!r} is not compiled; expected one that `fit` takes. "
            "Call `model.compile(optimizer, loss)` first."
        )


def checked_dataset(dataset: Any) -> tf.data.Dataset:
    """Returns a dataset of batches; a `Pipeline` is built."""
    if callable(getattr(dataset, "build", None)):
        dataset = dataset.build()
    if not isinstance(dataset, tf.data.Dataset):
        advice_text = (
            "It can be read once only and would be used up: pass what it iterates"
            if hasattr(dataset, "__next__")
            else "Wrap arrays by `tfamp.data.Pipeline.from_arrays(x, y).batch(32)`"
        )
        raise TypeError(
            f"`dataset` is of type {type(dataset).__name__}; expected a "
            f"`tf.data.Dataset` of batches, or a `Pipeline`. {advice_text}."
        )
    specs = tf.nest.flatten(dataset.element_spec)
    if any(getattr(spec, "shape", None) == () for spec in specs):
        raise ValueError(
            f"Elements {dataset.element_spec} hold a scalar, so they are single "
            "examples; expected batches, as `fit` takes them. Add `.batch(32)`."
        )
    return dataset


def first_batch(dataset: tf.data.Dataset) -> Any:
    """Returns the first batch, or raises if there is none."""
    for batch in dataset.take(1):
        return batch
    raise ValueError(
        "`dataset` holds no batches; expected at least one. Look at its source: a "
        "wrong path, split or filter leaves nothing."
    )


def build(model: keras.Model, batch: Any) -> None:
    """Builds weights and optimizers, so that there is something to put back.

    Args:
        model: A compiled model.
        batch: One batch of its data.

    Raises:
        ValueError: If the model holds an optimizer of its own that has no state yet,
            or if it is only a train step over layers without weights yet.
    """
    unbuilt: list[str] = []
    with model.distribute_strategy.scope():
        if not model.built and type(model).call is keras.Model.call:
            unbuilt += [layer.name for layer in model.layers if not layer.built]
        elif not model.built:
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            model(x, training=False)
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
    unbuilt += [o.name for o in optimizers_of(model) if not o.built]
    if unbuilt:
        raise ValueError(
            f"Model {model.name!r} holds {tuple(unbuilt)!r} without variables yet, and "
            "only its train step knows what they will be; expected layers and "
            "optimizers whose state can be put back. Build them by their `build`, or "
            "train a step first, as by `model.fit(dataset, steps_per_epoch=1)`."
        )
