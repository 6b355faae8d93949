"""Gathers what the rules look at, and leaves the model as it was."""

import contextlib
import inspect
import random
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.lint.graph import Graph, leaf_name
from tfamp.numerics.lint.rule import Subject, parts_of
from tfamp.records.checks import first_line
from tfamp.stepping.arguments import first_batch
from tfamp.stepping.layer_marks import Marks
from tfamp.stepping.snapshots.names import optimizers_of

# Batches whose numbers are looked at, and how many of one input in one batch.
NUM_BATCHES = 8
_MAX_NUMBERS = 2**22


def look(
    model: keras.Model,
    *,
    loss: Any,
    optimizer: Any,
    dataset: tf.data.Dataset | None,
) -> Subject:
    """Returns what the rules look at.

    None for loss and optimizer takes those of `compile`.

    A model that is not built is built, if there are data. Nothing else of it changes,
    and no step is run.
    """
    missing: dict[str, str] = {}
    batch: Any = None
    x: Any = None
    leaves: tuple[np.ndarray, ...] = ()
    if dataset is None:
        missing["data"] = "no `data` were passed"
    else:
        batch, leaves = _read(dataset)
        x = _x_of(batch)
    graph = None
    with _random_states(), warnings.catch_warnings():
        # What a call warns of, it will warn of in training.
        warnings.simplefilter("ignore")
        if x is not None and not model.built:
            # As `fit` does; what fails is told when the call is traced.
            with contextlib.suppress(Exception), model.distribute_strategy.scope():
                model(x, training=False)
        if x is None and structure.graph_of(model) is not None:
            specs = [tf.TensorSpec(t.shape, t.dtype) for t in model.inputs]
            x = specs[0] if len(specs) == 1 else specs
        if x is None:
            missing["graph"] = (
                f"model {model.name!r} tells its inputs by its call only, and no "
                "`data` were passed"
            )
        else:
            try:
                graph = trace_call(model, x)
            except Exception as error:  # the user's own code, which may do anything
                why = f"{type(error).__name__}: {first_line(error)}"
                missing["graph"] = f"the model cannot be traced ({why})"
    loss = getattr(model, "loss", None) if loss is None else loss
    if loss is None:
        missing["loss"] = "no `loss` was passed, and the model has none"
    optimizers = tuple(optimizers_of(model))
    if optimizer is not None:
        optimizers = (keras.optimizers.get(optimizer),)
    if not optimizers:
        missing["optimizer"] = "no `optimizer` was passed, and the model has none"
    return Subject(
        model,
        parts_of(model),
        graph=graph,
        leaves=leaves,
        batch=batch,
        loss=loss,
        optimizers=optimizers,
        is_compiled=optimizer is None,
        missing=missing,
    )


def trace_call(model: keras.Model, x: Any) -> Graph:
    """Returns the graph of a call for training of a built model.

    `x` are inputs or their specifications, and nothing of it is run.
    """
    marks = Marks(model)
    flat = tf.nest.flatten(x)
    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype, name=leaf_name(index))
        if isinstance(leaf, (tf.Tensor, tf.TensorSpec))
        else tf.type_spec_from_value(leaf)
        for index, leaf in enumerate(flat)
    ]
    parameters = inspect.signature(model.call).parameters
    options = {"training": True} if "training" in parameters else {}
    losses: list[tuple[str, str]] = []

    @tf.autograph.experimental.do_not_convert
    def forward(*leaves: Any) -> Any:
        inputs = tf.nest.pack_sequence_as(x, leaves)
        # Layers keep the losses that they add, but not those of this call.
        with keras.StatelessScope(collect_losses=True):
            with tf.name_scope(marks.scope):
                outputs = model(inputs, **options)
            losses.extend(_added_losses(model))
        return outputs

    with model.distribute_strategy.scope(), marks.placed():
        concrete = tf.function(forward).get_concrete_function(*specs)
    return Graph(concrete, marks, losses=losses, leaves=len(flat))


def _added_losses(model: keras.Model) -> Iterator[tuple[str, str]]:
    """Yields (path, dtype) of each loss of a layer, innermost layers only."""
    rows = list(structure.walk(model))
    for path, layer, _ in rows:
        below = {id(x) for child in structure.children(layer) for x in child.losses}
        for loss in layer.losses:
            if id(loss) not in below:
                yield path, keras.backend.standardize_dtype(loss.dtype)


def _x_of(batch: Any) -> Any:
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    # Ragged and sparse tensors stay as they are.
    return tf.nest.map_structure(
        lambda leaf: leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), x
    )


def _read(dataset: tf.data.Dataset) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Returns the first batch, and the numbers of each input in the first batches."""
    first, rows = None, []
    for batch in dataset.take(NUM_BATCHES):
        first = batch if first is None else first
        rows.append([_as_rows(leaf) for leaf in tf.nest.flatten(_x_of(batch))])
    if first is None:
        # It raises what every function says of such a dataset.
        first_batch(dataset)
    return first, tuple(np.concatenate(leaves) for leaves in zip(*rows, strict=True))


def _as_rows(leaf: Any) -> np.ndarray:
    """Returns a tensor as (numbers, features), so that batches of any shape join.

    Of a large one every n-th row is taken; ragged and sparse ones have none.
    """
    if not isinstance(leaf, tf.Tensor):
        return np.zeros((0, 1))
    array = leaf.numpy()
    array = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    return array[:: 1 + array.size // _MAX_NUMBERS]


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Puts Python's and NumPy's random generators back."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
