"""What the rules of the linter look at: layers, a traced call, the first batches."""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.lint.graph import Graph, trace_call
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping.arguments import first_batch
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import seeds_put_back

# Batches whose numbers are looked at, and how many of one input in one batch.
_NUM_BATCHES = 8
_MAX_NUMBERS = 2**22


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with all that its rules look at.

    `layers` are the model and every layer in it by path; `traced` is a call for
    training, if it could be traced; `leaves` are the values of each input in a few
    batches. Loss and optimizers were passed or are those of `compile`. `missing` says
    why a need of rules cannot be met, by its name.
    """

    layers: dict[str, keras.layers.Layer]
    traced: Graph | None
    leaves: tuple[np.ndarray, ...]
    loss: Any
    optimizers: tuple[Any, ...]
    missing: dict[str, str]

    @property
    def graph(self) -> Graph:
        """The traced call; a `CannotTellError` where there is none."""
        if self.traced is None:
            raise CannotTellError(self.missing["graph"])
        return self.traced

    @property
    def computing(self) -> dict[str, keras.layers.Layer]:
        """The layers that compute something themselves, by path."""
        layers = self.layers.items()
        return {p: each for p, each in layers if structure.graph_of(each) is None}

    @property
    def half_dtypes(self) -> set[str]:
        """The dtypes of half precision that layers compute in."""
        return {each.compute_dtype for each in self.computing.values()} & {*HALF}

    def stored_in(self, dtype: str) -> list[str]:
        """Returns the paths of the layers with trainable weights of a dtype."""
        return [
            path
            for path, layer in self.layers.items()
            for weights in [structure.own_weights(layer)]
            if any(w.trainable and w.dtype == dtype for w in weights)
        ]


class CannotTellError(Exception):
    """Raised by a rule that could not look; its text is the reason."""


def look(
    model: keras.Model,
    *,
    loss: Any,
    optimizer: Any,
    dataset: tf.data.Dataset | None,
) -> Subject:
    """Returns what the rules look at; None for loss or optimizer takes `compile`'s.

    A model that is not built is built, if there are data. Nothing else of it changes,
    and no step is run.
    """
    missing: dict[str, str] = {}
    x: Any = None
    leaves: tuple[np.ndarray, ...] = ()
    if dataset is None:
        missing["data"] = "no `data` were passed"
    else:
        x, leaves = _read(dataset)
    graph = None
    with seeds_put_back(), warnings.catch_warnings():
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
    if loss is None:
        loss = getattr(model, "loss", None)
    optimizers = optimizers_of(model)
    if optimizer is not None:
        optimizers = [keras.optimizers.get(optimizer)]
    if loss is None:
        missing["loss"] = "no `loss` was passed, and the model has none"
    layers = {path: layer for path, layer, _ in structure.walk(model)}
    return Subject(layers, graph, leaves, loss, tuple(optimizers), missing)


def _read(dataset: tf.data.Dataset) -> tuple[Any, tuple[np.ndarray, ...]]:
    """Returns the first inputs, and the numbers of each input in the first batches."""
    x: Any = None
    rows = []
    for inputs in _inputs(dataset):
        x = inputs if x is None else x
        rows.append([_as_rows(leaf) for leaf in tf.nest.flatten(inputs)])
    return x, tuple(np.concatenate(leaves) for leaves in zip(*rows, strict=True))


def _inputs(dataset: tf.data.Dataset) -> Iterator[Any]:
    first_batch(dataset)  # or it raises what every function says of an empty one
    for batch in dataset.take(_NUM_BATCHES):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        # Ragged and sparse tensors stay as they are.
        yield tf.nest.map_structure(
            lambda leaf: leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf), x
        )


def _as_rows(leaf: Any) -> np.ndarray:
    """Returns a tensor as (numbers, features), so that batches of any shape join.

    Of a large one every n-th row is taken; ragged and sparse ones have none.
    """
    if not isinstance(leaf, tf.Tensor):
        return np.zeros((0, 1))
    array = leaf.numpy()
    array = array.reshape(-1, array.shape[-1] if array.ndim > 1 else 1)
    return array[:: 1 + array.size // _MAX_NUMBERS]
