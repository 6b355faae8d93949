"""Checks a model, turns what `fit` takes as data into batches, and builds the model."""

import itertools
import types
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.records import checks

# Batches that are read for shapes, as in Keras: sizes that differ stay open.
_NUM_PEEKED = 2
_FORMS = (
    "what `fit` takes: a `tf.data.Dataset` of batches, a `Pipeline`, a `PyDataset`, a "
    "generator of batches, or a tuple (x, y) of arrays"
)


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


def check_built(model: Any, verb: str) -> None:
    """Raises unless a model with weights was given; `verb` says what for."""
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Cannot {verb} {model!r}, of type {type(model).__name__}; expected a "
            "`keras.Model`. Wrap a layer: `keras.Sequential([keras.Input(shape), "
            "layer])`."
        )
    if not model.built:
        raise ValueError(
            f"Model {model.name!r} has no weights yet; expected a built one. Call it "
            "on a batch, or load its weights, first."
        )


def dataset_of(
    data: Any, batch_size: int = 32, *, needs_targets: bool = True, name: str = "data"
) -> tf.data.Dataset:
    """Returns a dataset of batches from anything that `fit` takes as data.

    Of arrays x alone will do unless it `needs_targets`. Each pass of a generator begins
    with the two batches that told its shapes, as in Keras.
    """
    is_pipeline = callable(getattr(data, "build", None))
    if is_pipeline and not isinstance(data, keras.layers.Layer):
        data = data.build()
    elif isinstance(data, keras.utils.PyDataset):
        data = _of_py_dataset(data)
    elif isinstance(data, types.GeneratorType):
        data = _of_generator(data)
    elif (arrays := arrays_of(data, needs_targets=needs_targets)) is not None:
        shapes = tuple(np.shape(leaf) for leaf in tf.nest.flatten(arrays))
        lengths = {shape[:1] for shape in shapes}
        if len(lengths) > 1 or () in lengths:
            raise ValueError(
                f"`{name}` holds arrays of shapes {shapes}; expected the same number "
                "of examples in each. Cut them to one length."
            )
        size = checks.positive_int("batch_size", batch_size)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(size)
    if not isinstance(data, tf.data.Dataset):
        advice = "Pass one batch as (x, y)."
        if hasattr(data, "__next__"):
            advice = f"An iterator would be used up: pass what it iterates. {advice}"
        raise TypeError(
            f"`{name}` is of type {type(data).__name__}; expected {_FORMS}. {advice}"
        )
    specs = tf.nest.flatten(data.element_spec)
    if any(getattr(spec, "shape", None) == () for spec in specs):
        raise ValueError(
            f"Elements {data.element_spec} hold a scalar, so they are single "
            "examples; expected batches, as `fit` takes them. Add `.batch(32)`."
        )
    return data


def arrays_of(data: Any, *, needs_targets: bool = True) -> tuple[Any, ...] | None:
    """Returns arrays as `fit` would see them, or None of something else."""
    least = 2 if needs_targets else 1
    if not needs_targets and (_is_array(data) or isinstance(data, dict)):
        data = (data,)
    if not isinstance(data, (tuple, list)) or not least <= len(data) <= 3:
        return None
    return _as_fit_takes_it(data, least)


def first_batch(dataset: tf.data.Dataset) -> Any:
    """Returns the first batch, or raises if there is none."""
    for batch in dataset.take(1):
        return batch
    raise _empty("dataset")


def batch_of(data: Any, *, name: str = "data") -> Any:
    """Returns one batch as `train_step` takes it: arrays as a whole, else the first."""
    arrays = arrays_of(data, needs_targets=False)
    if arrays is None:
        return first_batch(dataset_of(data, name=name))
    is_bare = isinstance(data, dict) or _is_array(data)
    return _tensors(arrays[0] if is_bare else arrays)


def build(model: keras.Model, batch: Any) -> None:
    """Builds weights and optimizers, or raises where only a train step can."""
    unbuilt: list[str] = []
    if type(model).call is keras.Model.call:
        unbuilt += [layer.name for layer in model.layers if not layer.built]
    else:
        call_once(model, batch)
    with model.distribute_strategy.scope():
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


def call_once(model: keras.Model, batch: Any) -> None:
    """Makes the weights of a model that has none yet, by a call on a batch."""
    if not model.built:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with model.distribute_strategy.scope():
            model(x, training=False)


def _of_py_dataset(data: keras.utils.PyDataset) -> tf.data.Dataset:
    """Returns a `PyDataset` as a dataset, read by as many threads as in `fit`."""
    number, workers = data.num_batches, max(1, data.workers)
    num_peeked = _NUM_PEEKED if number is None else min(_NUM_PEEKED, number)
    spec = _spec([_as_batch(data[i]) for i in range(num_peeked)])

    def one(index: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_generator(
            lambda i: iter([_as_batch(data[int(i)])]),
            args=(index,),
            output_signature=spec,
        )

    indices = tf.data.Dataset.range(2**62 if number is None else number)
    dataset = indices.interleave(
        one, cycle_length=workers, num_parallel_calls=workers, deterministic=True
    )
    if number is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(number))
    return dataset.prefetch(data.max_queue_size) if data.workers else dataset


def _of_generator(generator: Iterator[Any]) -> tf.data.Dataset:
    batches = map(_as_batch, generator)
    first = tuple(itertools.islice(batches, _NUM_PEEKED))
    num_read, has_ended = len(first), False

    def read() -> Iterator[Any]:
        nonlocal num_read, has_ended
        if has_ended:
            raise ValueError(
                f"The generator of `data` ended after {num_read} batches; expected one "
                "that goes on. Pass what can be read again, as a `tf.data.Dataset`."
            )
        yield from first
        for batch in batches:
            num_read += 1
            yield batch
        # What was read for shapes is all there is: that can be read again.
        has_ended = num_read > len(first)

    return tf.data.Dataset.from_generator(read, output_signature=_spec(first))


def _as_batch(batch: Any) -> Any:
    """Returns what a generator or `PyDataset` gave, as tensors."""
    if isinstance(batch, (tuple, list)):
        batch = _as_fit_takes_it(batch, 1)
    return _tensors(batch)


def _spec(batches: Any) -> Any:
    """Returns the spec that several batches fit: the sizes that differ are open."""

    def spec(*parts: Any) -> tf.TensorSpec:
        shapes = zip(*(tuple(part.shape) for part in parts), strict=True)
        sizes = [same[0] if len({*same}) == 1 else None for same in shapes]
        return tf.TensorSpec([None, *sizes[1:]] if sizes else [], parts[0].dtype)

    if not batches:
        raise _empty("data")
    return tf.nest.map_structure(spec, *batches)


def _as_fit_takes_it(data: Any, least: int) -> tuple[Any, ...]:
    parts = tuple(data)
    while len(parts) > least and parts[-1] is None:
        parts = parts[:-1]
    parts = tuple(tuple(part) if isinstance(part, list) else part for part in parts)
    return tuple(tf.nest.map_structure(_as_array, parts))


def _as_array(part: Any) -> Any:
    if part is None or tf.is_tensor(part):
        return part
    array = np.asarray(part)
    if array.dtype == np.float64:
        with np.errstate(over="ignore"):  # as `fit` makes inf of what is too large
            return array.astype(keras.config.floatx())
    return array


def _tensors(batch: Any) -> Any:
    def tensor(part: Any) -> Any:
        is_one = part is None or tf.is_tensor(part)
        return part if is_one else tf.constant(_as_array(part))

    return tf.nest.map_structure(tensor, batch)


def _is_array(data: Any) -> bool:
    return isinstance(data, np.ndarray) or tf.is_tensor(data)


def _empty(name: str) -> ValueError:
    return ValueError(
        f"`{name}` holds no batches; expected at least one. Look at its source: a "
        "wrong path, split or filter leaves nothing."
    )
