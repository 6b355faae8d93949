"""Runs chosen layers of a float32 model in half precision, and measures the harm.

It shares nothing with tfamp but how layers are listed: a layer is lowered as Keras
does it, by its dtype policy, and an operation of a Functional graph by casting what it
gets. What stays float32 gives float32. What a layer of Keras is made of goes with it.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.stepping.unchanged import same_draws

# Loss scales that are tried before the gradients count as spoilt.
SCALES = {"float16": (1.0, 2.0**8, 2.0**15), "bfloat16": (1.0,)}
# A layer's gradient below this share of the usual one is noise around a true zero, as
# that of a bias before BatchNormalization.
_NEGLIGIBLE = 1e-3


@dataclasses.dataclass(frozen=True)
class Unit:
    """What is lowered as one: a layer with what Keras made it of, or an operation."""

    path: str
    layers: tuple[Any, ...]
    operation: Any = None


@dataclasses.dataclass(frozen=True)
class Harm:
    """How far a run is from float32: 0 is equal, 1 is the size of the thing itself.

    Attributes:
        output: Root mean square error over the spread over the batch; that of the
            loss, where layers add to it, over its size.
        gradient: Largest error of a layer's gradient over its norm.
    """

    output: float
    gradient: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.output, self.gradient)

    def is_within(self, limit: "Harm") -> bool:
        """Whether neither is above that of `limit`."""
        return self.output <= limit.output and self.gradient <= limit.gradient


def units(model: keras.Model) -> list[Unit]:
    """Returns what of a model can be lowered; it covers all that computes in it.

    Functional and Sequential models only hold others. Dropout is left out: it works in
    the dtype of what it gets.
    """
    found: list[Unit] = []
    inside: str | None = None
    for path, layer, _ in structure.walk(model):
        if inside is not None and path.startswith(inside):
            found[-1] = dataclasses.replace(
                found[-1], layers=(*found[-1].layers, layer)
            )
            continue
        inside = None
        if structure.graph_of(layer) is not None:
            prefix = "" if layer is model else f"{path}/"
            found += [
                Unit(prefix + operation.name, (), operation)
                for operation in structure.operations_of(layer)
            ]
            continue
        if isinstance(layer, keras.layers.Dropout):
            continue
        found.append(Unit(path, (layer,)))
        if type(layer).__module__.startswith("keras."):
            inside = f"{path}/"
    return found


@contextlib.contextmanager
def lowered(all_units: Sequence[Unit], low: set[str], dtype: str) -> Iterator[None]:
    """Has the units named in `low` compute in a dtype, all others in float32."""
    changed: list[Any] = []
    dropouts = [child for unit in all_units for child in _dropouts(unit)]
    try:
        for dropout in dropouts:
            dropout.autocast = False
        for unit in all_units:
            own = dtype if unit.path in low else "float32"
            if unit.operation is not None:
                changed.append((unit.operation, None))
                unit.operation.call = _cast_before(type(unit.operation).call, unit, own)
            elif own != "float32":
                for layer in unit.layers:
                    changed.append((layer, layer.dtype_policy))
                    layer.dtype_policy = keras.DTypePolicy(f"mixed_{own}")
        yield
    finally:
        for dropout in dropouts:
            dropout.autocast = True
        for item, policy in changed:
            if policy is None:
                del item.call
            else:
                item.dtype_policy = policy


def _dropouts(unit: Unit) -> list[Any]:
    """Returns the dropout layers right inside a user's layer."""
    if len(unit.layers) != 1:
        return []
    children = structure.children(unit.layers[0])
    return [child for child in children if isinstance(child, keras.layers.Dropout)]


@contextlib.contextmanager
def comparable() -> Iterator[None]:
    """Has random numbers drawn alike in every dtype, and losses added in float32.

    Keras adds up no losses of several dtypes.
    """
    stock_add_loss = keras.layers.Layer.add_loss

    def add_loss(self: Any, loss: Any) -> None:
        stock_add_loss(self, tf.cast(loss, "float32"))

    keras.layers.Layer.add_loss = add_loss
    try:
        with same_draws():
            yield
    finally:
        keras.layers.Layer.add_loss = stock_add_loss


def _cast_before(call: Any, unit: Unit, dtype: str) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, tf.Tensor) and x.dtype.is_floating:
            return tf.cast(x, dtype)
        return x

    def cast_call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = structure.map_structure(cast, (args, kwargs))
        return call(unit.operation, *args, **kwargs)

    return cast_call


class Subject:
    """A model with its batches, and what it gives in float32.

    Args:
        model: A compiled float32 model.
        data: Batches `(x, y)` or `(x, y, sample_weight)`.
    """

    def __init__(self, model: keras.Model, data: Sequence[Any]) -> None:
        self.model, self.data = model, list(data)
        self.units = units(model)
        self.paths = [unit.path for unit in self.units]
        self._state = [variable.numpy() for variable in model.variables]
        self._reference = [self._run(batch, 1.0) for batch in self.data]

    def harm(self, low: set[str], dtype: str, scale: float = 1.0) -> Harm:
        """Returns the largest harm over the batches of lowering some units."""
        found = []
        with lowered(self.units, low, dtype):
            for batch, reference in zip(self.data, self._reference, strict=True):
                outputs, gradients = self._run(batch, scale)
                found.append(
                    Harm(
                        output_error(outputs, reference[0]),
                        gradient_error(gradients, reference[1]),
                    )
                )
                if found[-1].worst == np.inf:
                    break
        return Harm(max(h.output for h in found), max(h.gradient for h in found))

    def least_harm(self, low: set[str], dtype: str, *, enough: Harm) -> Harm:
        """Returns the harm at the best loss scale, the first that does enough."""
        found = []
        for scale in SCALES[dtype]:
            found.append(self.harm(low, dtype, scale))
            # No scale acts on the outputs.
            if found[-1].is_within(enough) or found[-1].output > enough.output:
                break
        return min(found, key=lambda harm: harm.worst)

    def harm_of_rounded_inputs(self, dtype: str) -> Harm:
        """Returns the harm of rounding the inputs once and computing in float32."""
        found = []
        for (x, *rest), reference in zip(self.data, self._reference, strict=True):
            rounded = structure.map_structure(
                lambda v: (
                    tf.cast(tf.cast(v, dtype), "float32")
                    if np.issubdtype(v.dtype, np.floating)
                    else v
                ),
                x,
            )
            outputs, gradients = self._run((rounded, *rest), 1.0)
            found.append(
                Harm(
                    output_error(outputs, reference[0]),
                    gradient_error(gradients, reference[1]),
                )
            )
        return max(found, key=lambda harm: harm.worst)

    def _run(self, batch: Any, scale: float) -> tuple[list[Any], dict[str, Any]]:
        """Returns the outputs and each unit's gradient; the state stays as it was."""
        x, y, *weight = batch
        with tf.GradientTape() as tape, comparable():
            predicted = self.model(x, training=True)
            loss = self.model.compute_loss(
                x=x, y=y, y_pred=predicted, sample_weight=weight[0] if weight else None
            )
            scaled = tf.cast(loss, "float32") * scale
        variables = self.model.trainable_variables
        gradients = tape.gradient(scaled, [v.value for v in variables])
        for variable, value in zip(self.model.variables, self._state, strict=True):
            if not variable.trainable:
                variable.assign(value)
        by_unit: dict[str, list[np.ndarray]] = {}
        owner = {
            id(weight): unit.path
            for unit in self.units
            for layer in unit.layers
            for weight in structure.own_weights(layer)
        }
        for variable, gradient in zip(variables, gradients, strict=True):
            if gradient is not None:
                flat = np.ravel(tf.convert_to_tensor(gradient)).astype("float64")
                by_unit.setdefault(owner[id(variable)], []).append(flat / scale)
        outputs = [np.asarray(v, "float64") for v in structure.flatten(predicted)]
        if self.model.losses:
            outputs.append(np.asarray(loss, "float64"))
        return outputs, {key: np.concatenate(v) for key, v in by_unit.items()}


def output_error(outputs: Sequence[Any], reference: Sequence[Any]) -> float:
    """Returns the root mean square error over the spread over the batch."""
    worst = 0.0
    for value, true in zip(outputs, reference, strict=True):
        if not np.isfinite(value).all():
            return np.inf
        middle = true.mean(axis=0) if true.ndim else 0.0
        spread = np.sqrt(np.mean((true - middle) ** 2))
        error = np.sqrt(np.mean((value - true) ** 2))
        worst = max(worst, float(error / max(spread, 1e-30)))
    return worst


def gradient_error(gradients: dict[str, Any], reference: dict[str, Any]) -> float:
    """Returns the largest error of a layer's gradient over its norm."""
    norms = {path: np.linalg.norm(value) for path, value in reference.items()}
    least = _NEGLIGIBLE * float(np.median(list(norms.values()) or [0.0]))
    worst = 0.0
    for path, true in reference.items():
        if not np.isfinite(gradients[path]).all():
            return np.inf
        if norms[path] > least:
            error = np.linalg.norm(gradients[path] - true) / norms[path]
            worst = max(worst, float(error))
    return worst
