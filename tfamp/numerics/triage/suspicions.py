"""What speaks against the data, the weights, the optimizer or the update of a step."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import replaced
from tfamp.numerics.triage.first_nonfinite import Examined, examine
from tfamp.stepping.layer_calls import in_float32
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import unchanged

# An example so many times as large as the median one is an outlier.
_OUTLIER = 1e3
# A layer whose weights are so many times as large as initializers make them has
# exploded: they give outputs about as large as inputs.
_EXPLODED = 30.0
# A loss that one update makes so many times as large has left where it was, if it is
# beyond that of the other examples' targets, too: near 0 any number is many times it.
_JUMP = 100.0
_SMALL = 1e-3
# What a learning rate that is too high is multiplied by, until the loss falls.
_RATE_FACTORS = tuple(10.0**-n for n in range(1, 9))


class Suspicion(NamedTuple):
    """Something that is wrong ahead of the step.

    A sentence with the figure, and the layer it is about, if any.
    """

    layer: str | None
    sentence: str


def bad_data(batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence for each part of a batch that holds inf or NaN."""
    for name, values in named_parts(batch):
        if values.dtype.kind == "f":
            bad = ~np.isfinite(values)
            if bad.any():
                rows = sorted(set(np.argwhere(bad)[:, 0].tolist())) if bad.ndim else [0]
                shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
                yield Suspicion(
                    None,
                    f"`{name}` holds {int(bad.sum())} numbers that are inf or NaN, in "
                    f"{len(rows)} of {len(values) if bad.ndim else 1} examples "
                    f"(number {shown}).",
                )


def mended(batch: Any) -> Any:
    """Returns a batch with the mean of the others for each number not finite.

    Not with 0, which a root, a log or a quotient may not bear.
    """

    def finite(part: Any) -> Any:
        if part is None or not tf.convert_to_tensor(part).dtype.is_floating:
            return part
        tensor = tf.convert_to_tensor(part)
        is_good = tf.math.is_finite(tensor)
        others = tf.boolean_mask(tensor, is_good)
        mean = tf.reduce_mean(others) if len(others) else tf.ones((), tensor.dtype)
        return tf.where(is_good, tensor, mean)

    return tf.nest.map_structure(finite, batch)


def bad_labels(model: keras.Model, batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence where class numbers lie outside of the model's outputs."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    loss = getattr(model, "loss", None)
    name = loss if isinstance(loss, str) else type(loss).__name__
    if "sparse" not in str(name).lower() or y is None or tf.nest.is_nested(y):
        return
    shape = getattr(model, "output_shape", None) if model.built else None
    if not isinstance(shape, tuple) or not isinstance(shape[-1], int):
        return
    values = np.asarray(y)
    outside = (values < 0) | (values >= shape[-1])
    ignored = getattr(loss, "ignore_class", None)
    if ignored is not None:
        outside &= values != ignored
    if outside.any():
        yield Suspicion(
            None,
            f"`y` holds {int(outside.sum())} class numbers such as "
            f"{values[outside].flat[0]}, while the model gives {shape[-1]} classes.",
        )


def outliers(batch: Any) -> np.ndarray:
    """Returns which examples are far larger than the others, one bool for each."""
    found: np.ndarray | None = None
    for _, values in named_parts(batch):
        if values.ndim < 1 or values.dtype.kind != "f" or len(values) < 4:
            continue
        sizes = np.abs(values.reshape(len(values), -1)).max(axis=1).astype(np.float64)
        median = float(np.median(sizes))
        this = sizes > _OUTLIER * max(median, 1e-30)
        found = this if found is None or len(found) != len(this) else found | this
    return np.zeros(0, bool) if found is None else found


def without(batch: Any, left_out: np.ndarray) -> Any:
    """Returns a batch without some of its examples."""
    kept = np.flatnonzero(~left_out)

    def rows(part: Any) -> Any:
        return None if part is None else tf.gather(tf.convert_to_tensor(part), kept)

    return tf.nest.map_structure(rows, batch)


def _counted_bad(variable: Any) -> str:
    """Returns "3 of 8 numbers" of a variable that are inf or NaN, "" for none."""
    values = np.asarray(tf.cast(variable.value, tf.float32))
    bad = int(values.size - np.isfinite(values).sum())
    return f"{bad} of {values.size} numbers" if bad else ""


def bad_weights(model: keras.Model) -> Iterator[Suspicion]:
    """Yields a sentence for each layer with weights that are inf or NaN."""
    for path, layer, _ in structure.walk(model):
        for weight in structure.own_weights(layer):
            if bad := _counted_bad(weight):
                name = f"the weight {weight.path!r}"
                yield Suspicion(path, f"{bad} of {name} are inf or NaN already.")


def bad_slots(model: keras.Model) -> Iterator[Suspicion]:
    """Yields a sentence for each variable of an optimizer that is inf or NaN."""
    for optimizer in optimizers_of(model):
        # A loss-scale optimizer's own numbers may well be inf: it counts them.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        owners = {
            weight.path.replace("/", "_"): path
            for path, layer, _ in structure.walk(model)
            for weight in structure.own_weights(layer)
        }
        for variable in inner.variables:
            if "float" in str(variable.dtype) and (bad := _counted_bad(variable)):
                name = variable.path.rsplit("/", 1)[-1]
                # Slots bear the name of their weight and their own.
                weight = max((w for w in owners if name.startswith(w)), default="")
                yield Suspicion(
                    owners.get(weight),
                    f"{bad} of the optimizer's {variable.path!r} are inf or NaN "
                    "already.",
                )


def exploded(model: keras.Model) -> Iterator[Suspicion]:
    """Yields the layers whose weights are far too large, the worst one first."""
    found = []
    for path, layer, _ in structure.walk(model):
        for weight in structure.own_weights(layer):
            values = np.asarray(tf.cast(weight.value, tf.float32), np.float64)
            finite = values[np.isfinite(values)]
            if values.ndim < 2 or not weight.trainable or not finite.size:
                continue
            # A row of an embedding is looked up, and multiplies nothing.
            is_table = isinstance(layer, keras.layers.Embedding)
            fan_in = 1 if is_table else math.prod(values.shape[:-1])
            gain = float(np.sqrt(np.mean(np.square(finite)) * fan_in))
            if gain > _EXPLODED:
                does = "holds rows of numbers of" if is_table else "multiplies by"
                found.append((gain, path, f"{weight.path!r} {does} about {gain:.3g}"))
    for _, path, sentence in sorted(found, reverse=True):
        yield Suspicion(path, f"The weight {sentence}; initializers make that about 1.")


def named_parts(batch: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a batch with names such as "x", "x/age", "y"."""
    parts = zip(
        ("x", "y", "sample_weight"),
        keras.utils.unpack_x_y_sample_weight(batch),
        strict=True,
    )
    for name, part in parts:
        if part is None:
            continue
        for path, leaf in keras.tree.flatten_with_path(part):
            is_half = getattr(leaf, "dtype", None) in (tf.bfloat16, tf.float16)
            values = np.asarray(tf.cast(leaf, tf.float32) if is_half else leaf)
            yield "/".join([name, *map(str, path)]), values


class Softer(NamedTuple):
    """A learning rate that does no harm.

    A factor on the present one, and the loss after an update.
    """

    factor: float
    loss: float


class Update:
    """The update of the one optimizer that a model is compiled with.

    It is by the gradients of each trained variable at the learning rate of the step.
    """

    def __init__(
        self, model: keras.Model, batch: Any, gradients: list[tf.Tensor], rate: float
    ) -> None:
        self.rate = rate
        self._model, self._batch, self._gradients = model, batch, gradients

    @classmethod
    def of(
        cls, model: keras.Model, batch: Any, exact: Examined, rate: float | None
    ) -> "Update | None":
        """Returns the update of a float32 step, None where it has others or none."""
        trained = list(model.trainable_variables)
        found = {id(v): g for v, g in exact.step.gradients if g is not None}
        if rate is None or not {id(v) for v in trained} >= set(found):
            return None
        gradients = [found.get(id(v), tf.zeros_like(v.value)) for v in trained]
        return cls(model, batch, gradients, rate)

    def bad_weight(self) -> Suspicion | None:
        """Returns the first weight that the update makes inf or NaN."""
        with self._applied():
            found = next(bad_weights(self._model), None)
        if found is None:
            return None
        return found._replace(
            sentence="Loss and gradients are finite, and the update makes weights that "
            f"are not: {found.sentence.replace(' already', '')}"
        )

    def loss_after(self, rate_factor: float = 1.0) -> float | None:
        """Returns the loss of the batch after the update, None where it has none."""
        with self._applied(rate_factor), in_float32(self._model):
            after = examine(self._model, self._batch, loss_scale=1.0).step.loss
        return None if after is None else float(after)

    def is_jump(self, before: float, after: float) -> bool:
        """States whether an update has taken the loss far from where it was."""
        if self._is_runaway(before, after):
            return True
        if after <= before + _JUMP * max(abs(before), _SMALL):
            return False
        x, y, weight = keras.utils.unpack_x_y_sample_weight(self._batch)
        if y is None:
            return True
        others = tf.nest.map_structure(lambda part: tf.roll(part, 1, axis=0), y)
        batch = keras.utils.pack_x_y_sample_weight(x, others, weight)
        with unchanged(self._model), in_float32(self._model):
            guess = examine(self._model, batch, loss_scale=1.0).step.loss
        return guess is None or not after <= float(guess)

    def softer(self, before: float) -> Softer | None:
        """Returns a tenth of the largest learning rate that does not raise the loss.

        At the largest one training only just goes well: a range test, too, takes a rate
        an order below the one from which the loss rises.
        """
        for edge, factor in itertools.pairwise(_RATE_FACTORS):
            at_edge = self.loss_after(edge)
            if at_edge is None or not at_edge <= before:
                continue
            if not self._is_runaway(before, at_edge, edge):
                after = self.loss_after(factor)
                return None if after is None else Softer(factor, after)
        return None

    def _is_runaway(
        self, before: float, after: float, rate_factor: float = 1.0
    ) -> bool:
        """States whether an update has thrown a loss down that has no lowest value.

        A healthy update may lower such a loss by any factor, so the weights decide.
        """
        if after == -math.inf:
            return True
        if not before - after > _JUMP * max(abs(before), _SMALL):
            return False
        with self._applied(rate_factor):
            return next(exploded(self._model), None) is not None

    @contextlib.contextmanager
    def _applied(self, rate_factor: float = 1.0) -> Iterator[None]:
        optimizer = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        with (
            unchanged(self._model),
            replaced(inner, _learning_rate=self.rate * rate_factor),
        ):
            inner.apply(self._gradients, list(self._model.trainable_variables))
            yield
