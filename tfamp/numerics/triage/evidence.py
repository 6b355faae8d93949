"""What speaks against the data, the weights, the optimizer or the update of a step."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import replaced
from tfamp.numerics.triage.first_nonfinite import Examined, examine
from tfamp.stepping.eager_step import Call, Observer, run_step, tapped
from tfamp.stepping.layer_calls import in_float32
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import unchanged

# A layer whose weights are so many times as large as initializers make them, which is
# so that they give outputs about as large as inputs, has exploded.
_EXPLODED = 30.0
# No number of data is as large as this: its third power is beyond float32.
_HUGE = 1e12
# A loss that one update makes so many times as large has left where it was, if it is
# beyond that of the other examples' targets, too: near 0 any number is many times it.
_JUMP, _SMALL = 100.0, 1e-3
# A large weight that an update makes so many times as large runs away.
_GREW = 10.0
# How an operation on a CPU says that nothing stands for an id or a label.
_WITHOUT_A_ROW = re.compile(
    r"indices\S* = -?\d+ is not in \[0, \d+\)"
    r"|label value of -?\d+ which is outside the valid range of \[0, \d+\)"
)


class Suspicion(NamedTuple):
    """A sentence with the figure, and the layer it is about, if any."""

    layer: str | None
    sentence: str


def bad_data(batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence for each part of a batch that float32 cannot hold."""
    for name, values in _named_parts(batch):
        if values.dtype.kind != "f":
            continue
        bad = ~np.isfinite(values)
        what = "are inf or NaN"
        if not bad.any():
            bad = np.abs(values) > np.finfo(np.float32).max
            such = f"such as {values[bad].flat[0]:.3g}" if bad.any() else ""
            what = f"float32 cannot hold, {such}"
        if bad.any():
            text = f"`{name}` holds {int(bad.sum())} numbers that {what}, in "
            yield Suspicion(None, f"{text}{_examples(bad)}.")


def _examples(bad: np.ndarray) -> str:
    """Returns "2 of 16 examples (number 5, 9)" of where something is bad."""
    rows = sorted(set(np.argwhere(bad)[:, 0].tolist())) if bad.ndim else [0]
    shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"{len(rows)} of {len(bad) if bad.ndim else 1} examples (number {shown})"


def mended(batch: Any) -> Any:
    """Returns a batch with the mean of the others for each number not finite.

    Not with 0, which a root, a log or a quotient may not bear.
    """

    def finite(part: Any) -> Any:
        if part is None or not tf.convert_to_tensor(part).dtype.is_floating:
            return part
        tensor = tf.convert_to_tensor(part)
        if tensor.dtype == tf.float64:  # what float32 cannot hold is inf to the model
            tensor = tf.cast(tensor, tf.float32)
        is_good = tf.math.is_finite(tensor)
        others = tf.boolean_mask(tensor, is_good)
        mean = tf.reduce_mean(others) if len(others) else tf.ones((), tensor.dtype)
        return tf.where(is_good, tensor, mean)

    return tf.nest.map_structure(finite, batch)


def huge(batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence for each part of a batch with numbers that no data has."""
    for name, values in _named_parts(batch):
        if (largest := _largest(values)) > _HUGE:
            where = _examples(np.abs(values) > _HUGE)
            yield Suspicion(
                None,
                f"`{name}` reaches {largest:.3g}, in {where}; with numbers of size one "
                "there the step is finite.",
            )


def shrunk(batch: Any) -> Any:
    """Returns a batch with numbers of size one in parts where no data is so large."""

    def small(part: Any) -> Any:
        if part is None or (largest := _largest(np.asarray(part))) <= _HUGE:
            return part
        return tf.cast(tf.cast(part, tf.float64) / largest, tf.float32)

    return tf.nest.map_structure(small, batch)


def _largest(values: np.ndarray) -> float:
    """Returns the largest magnitude of numbers, 0 of anything else."""
    if values.dtype.kind not in "fiu" or not values.size:
        return 0.0
    return float(np.abs(values.astype(np.float64)).max())


class _Ids(Observer):
    """Looks at the ids that embeddings get."""

    def __init__(self) -> None:
        self.found: dict[str, Suspicion] = {}

    def on_call(self, call: Call) -> None:
        """Notes ids without a row."""
        given = (*call.args, *call.kwargs.values())[0]
        ids = np.asarray(getattr(given, "values", given))  # of a sparse tensor
        count = call.site.layer.input_dim
        outside = (ids < 0) | (ids >= count)
        if outside.any():
            self.found[call.site.path] = Suspicion(
                None,
                f"{call.site.path!r} has rows 0 to {count - 1} and is asked for "
                f"{int(outside.sum())} others, such as {int(ids[outside].flat[0])}, in "
                f"{_examples(outside)}.",
            )


def bad_ids(model: keras.Model, batch: Any) -> list[Suspicion]:
    """Returns a sentence for each embedding that is asked for rows it does not have.

    A CPU raises an error there; a GPU gives rows of zeros, and says nothing.
    """
    tables = [each for _, each, _ in structure.walk(model) if _is_table(each)]
    seen = _Ids()
    if tables:
        with (
            unchanged(model),
            tapped(model, seen, only=lambda site: _is_table(site.layer)),
            contextlib.suppress(tf.errors.InvalidArgumentError),
        ):
            run_step(model, batch)
    return list(seen.found.values())


def _is_table(layer: Any) -> bool:
    return isinstance(layer, keras.layers.Embedding)


def without_a_row(error: Exception) -> Suspicion | None:
    """Returns what an error says of an id or label that nothing stands for, if so."""
    found = _WITHOUT_A_ROW.search(str(error))
    return found and Suspicion(None, f"The step raises an error: {found[0]}.")


def bad_labels(model: keras.Model, batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence where class numbers lie outside of the model's outputs."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    shapes = getattr(model, "output_shape", None) if model.built else None
    losses = getattr(model, "loss", None)
    parts = {"y": (y, losses, shapes)}
    if isinstance(y, (dict, list, tuple)):
        parts = {
            f"y/{name}": (part, _at(losses, name), _at(shapes, name))
            for name, part in (y if isinstance(y, dict) else dict(enumerate(y))).items()
        }
    for name, (labels, loss, shape) in parts.items():
        kind = loss if isinstance(loss, str) else type(loss).__name__
        if labels is None or "sparse" not in str(kind).lower():
            continue
        if not isinstance(shape, tuple) or not isinstance(shape[-1], int):
            continue
        values = np.asarray(labels)
        outside = (values < 0) | (values >= shape[-1])
        ignored = getattr(loss, "ignore_class", None)
        if ignored is not None:
            outside &= values != ignored
        if outside.any():
            yield Suspicion(
                None,
                f"`{name}` holds {int(outside.sum())} class numbers such as "
                f"{values[outside].flat[0]}, while the model gives {shape[-1]} "
                "classes.",
            )


def _at(of_each: Any, name: Any) -> Any:
    if isinstance(of_each, list):
        return of_each[name] if isinstance(name, int) and name < len(of_each) else None
    return of_each.get(name) if isinstance(of_each, dict) else of_each


def _counted_bad(variable: Any) -> str:
    """Returns "3 of 8 numbers" of a variable that are inf or NaN, "" for none."""
    values = np.asarray(tf.cast(variable.value, tf.float32))
    bad = int(values.size - np.isfinite(values).sum())
    return f"{bad} of {values.size} numbers" if bad else ""


def bad_weights(model: keras.Model) -> Iterator[Suspicion]:
    """Yields a sentence for each layer with weights that are inf or NaN."""
    for path, weight, _ in _weights_of(model):
        if bad := _counted_bad(weight):
            text = f"{bad} of the weight {weight.path!r} are inf or NaN already."
            yield Suspicion(path, text)


def _weights_of(model: keras.Model) -> Iterator[tuple[str, Any, bool]]:
    """Yields path, weight, and whether it is a table, whose rows multiply nothing."""
    for path, layer, _ in structure.walk(model):
        for weight in structure.own_weights(layer):
            yield path, weight, _is_table(layer)


def bad_slots(model: keras.Model) -> Iterator[Suspicion]:
    """Yields a sentence for each variable of an optimizer that is inf or NaN."""
    owners = {w.path.replace("/", "_"): path for path, w, _ in _weights_of(model)}
    for optimizer in optimizers_of(model):
        # A loss-scale optimizer's own numbers may well be inf: it counts them.
        for variable in getattr(optimizer, "inner_optimizer", optimizer).variables:
            if "float" in str(variable.dtype) and (bad := _counted_bad(variable)):
                # Slots bear the name of their weight and their own.
                name = variable.path.rsplit("/", 1)[-1]
                weight = max((w for w in owners if name.startswith(w)), default="")
                text = f"{bad} of the optimizer's {variable.path!r} are inf or NaN"
                yield Suspicion(owners.get(weight), f"{text} already.")


def large_weights(model: keras.Model) -> dict[str, tuple[float, Suspicion]]:
    """Returns by how much weights that are far too large multiply inputs, by path.

    They are no fault by themselves: of sparse inputs a weight of size one is right.
    """
    found = {}
    for path, weight, is_table in _weights_of(model):
        gain = _gain(weight, is_table=is_table) if weight.trainable else 0.0
        if gain > _EXPLODED:
            does = "holds rows of numbers of" if is_table else "multiplies by"
            text = f"The weight {weight.path!r} {does} about {gain:.3g}; initializers "
            found[weight.path] = gain, Suspicion(path, f"{text}make that about 1.")
    return dict(sorted(found.items(), key=lambda each: -each[1][0]))


def _gain(weight: Any, *, is_table: bool) -> float:
    """Returns by how much a matrix multiplies inputs, 0 where it is none."""
    values = np.asarray(tf.cast(weight.value, tf.float32), np.float64)
    finite = values[np.isfinite(values)]
    if values.ndim < 2 or not finite.size:
        return 0.0
    fan_in = 1 if is_table else math.prod(values.shape[:-1])
    return float(np.sqrt(np.mean(np.square(finite)) * fan_in))


@contextlib.contextmanager
def tamed(model: keras.Model) -> Iterator[None]:
    """Gives weights that are too large, or not finite, the size of fresh ones.

    That is inside the block; what stands for numbers that are lost is drawn anew.
    """
    random = np.random.default_rng(0)
    with unchanged(model):
        for _, weight, is_table in _weights_of(model):
            if "float" not in str(weight.dtype):
                continue
            values = np.asarray(tf.cast(weight.value, tf.float32), np.float64).copy()
            bad = ~np.isfinite(values)
            size = _gain(weight, is_table=is_table)
            if values.ndim < 2 and not bad.all():
                size = float(np.abs(values[~bad]).max())
            is_large = size > _EXPLODED
            if is_large:
                values /= size
            spread = 0.0
            if values.ndim > 1:
                spread = (1 if is_table else math.prod(values.shape[:-1])) ** -0.5
            values[bad] = spread * random.normal(size=int(bad.sum()))
            if bad.any() or (is_large and weight.trainable):
                weight.assign(values.astype(np.float32))
        yield


def bad_losses(model: keras.Model) -> Suspicion | None:
    """Returns the innermost layer of which a loss that it adds is not finite."""
    found = None
    for path, layer, _ in structure.walk(model):
        losses = [] if layer is model else layer.losses
        if not all(np.isfinite(tf.cast(x, tf.float32)).all() for x in losses):
            found = Suspicion(
                path,
                f"The losses that {path!r} adds, such as its regularizers, are not "
                "finite in float32, while all that the layers give is.",
            )
    return found


def _named_parts(batch: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a batch with names such as "x", "x/age", "y"."""
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=True):
        leaves = [] if part is None else keras.tree.flatten_with_path(part)
        for path, leaf in leaves:
            is_half = getattr(leaf, "dtype", None) in (tf.bfloat16, tf.float16)
            values = np.asarray(tf.cast(leaf, tf.float32) if is_half else leaf)
            yield "/".join([name, *map(str, path)]), values


class Update:
    """The update of the one optimizer that a model is compiled with.

    It is by the gradients of a float32 step at the learning rate of the step.
    """

    def __init__(
        self, model: keras.Model, batch: Any, exact: Examined, rate: float
    ) -> None:
        self.rate = rate
        self._model, self._batch = model, batch
        found = {id(v): g for v, g in exact.step.gradients if g is not None}
        self._trained = list(model.trainable_variables)
        self.is_all = {id(v) for v in self._trained} >= set(found)
        self._gradients = [
            found.get(id(v), tf.zeros_like(v.value)) for v in self._trained
        ]
        self._optimizer: Any = getattr(
            model.optimizer, "inner_optimizer", model.optimizer
        )

    def begin_anew(self) -> bool:
        """Takes an optimizer without slots; states whether one could be made."""
        try:
            with self._model.distribute_strategy.scope():
                kind = type(self._optimizer)
                self._optimizer = kind.from_config(self._optimizer.get_config())
                self._optimizer.build(self._trained)
        except Exception:  # of an optimizer of the user's own
            return False
        return True

    def bad_weight(self) -> Suspicion | None:
        """Returns the first weight that the update makes inf or NaN."""
        with self._applied():
            found = next(bad_weights(self._model), None)
        if found is None:
            return None
        text = "Loss and gradients are finite, and the update makes weights that are "
        text += f"not: {found.sentence.replace(' already', '')}"
        return found._replace(sentence=text)

    def bad_constraint(self) -> Suspicion | None:
        """Returns the weight that a constraint alone makes inf or NaN, if any."""
        held = [(v, v.constraint) for v in self._trained if v.constraint is not None]
        try:
            for variable, _ in held:
                variable.constraint = None
            if not held or self.bad_weight() is not None:
                return None
        finally:
            for variable, constraint in held:
                variable.constraint = constraint
        with self._applied():
            for path, weight, _ in _weights_of(self._model):
                if weight.constraint is not None and _counted_bad(weight):
                    kind = type(weight.constraint).__name__
                    return Suspicion(
                        path,
                        f"The constraint {kind} of the weight {weight.path!r} makes "
                        "numbers that are inf or NaN of what the update leaves, which "
                        "is finite.",
                    )
        return None

    def loss_after(self, rate_factor: float = 1.0) -> float | None:
        """Returns the loss of the batch after the update, None where it has none."""
        with self._applied(rate_factor), in_float32(self._model):
            return examine(self._model, self._batch).loss

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
            guess = examine(self._model, batch).loss
        return guess is None or not after <= guess

    def softer(self, before: float) -> tuple[float, float] | None:
        """Returns a learning rate's factor that does no harm, and the loss after it.

        It is a tenth of the largest power of ten that does not raise the loss: at that
        one training only just goes well.
        """
        for edge, factor in itertools.pairwise(10.0**-n for n in range(1, 9)):
            at_edge = self.loss_after(edge)
            if at_edge is None or not at_edge <= before:
                continue
            if not self._is_runaway(before, at_edge, edge):
                after = self.loss_after(factor)
                return None if after is None else (factor, after)
        return None

    def _is_runaway(
        self, before: float, after: float, rate_factor: float = 1.0
    ) -> bool:
        """States whether an update has thrown a loss down that has no lowest value.

        A healthy update may lower such a loss by any factor, so what it does to the
        weights decides: those that were large ahead of it say nothing.
        """
        if after == -math.inf:
            return True
        if not before - after > _JUMP * max(abs(before), _SMALL):
            return False
        gains = {path: gain for path, (gain, _) in large_weights(self._model).items()}
        with self._applied(rate_factor):
            return any(
                gain > _GREW * gains.get(path, 0.0)
                for path, (gain, _) in large_weights(self._model).items()
            )

    @contextlib.contextmanager
    def _applied(self, rate_factor: float = 1.0) -> Iterator[None]:
        optimizer = self._optimizer
        # Slots too, of one that no model holds.
        held = [(each, np.asarray(each.value).copy()) for each in optimizer.variables]
        try:
            with (
                unchanged(self._model),
                replaced(optimizer, _learning_rate=self.rate * rate_factor),
            ):
                optimizer.apply(self._gradients, self._trained)
                yield
        finally:
            for variable, values in held:
                variable.assign(values)
