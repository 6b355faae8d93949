"""What speaks against the data, the weights or the optimizer of a step, ahead of it."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.stepping.eager_step import Call, Observer, run_step, tapped
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import unchanged

# An example so many times as large as the median one is an outlier.
_OUTLIER = 1e3
# A layer whose weights are so many times as large as initializers make them has
# exploded: they give outputs about as large as inputs.
_EXPLODED = 30.0
# No number of data is as large as this: its third power is beyond float32.
_HUGE = 1e12
# How an operation on a CPU says that nothing stands for an id or a label.
_WITHOUT_A_ROW = re.compile(
    r"indices\S* = -?\d+ is not in \[0, \d+\)"
    r"|label value of -?\d+ which is outside the valid range of \[0, \d+\)"
)


class Suspicion(NamedTuple):
    """Something that is wrong ahead of the step.

    A sentence with the figure, and the layer it is about, if any.
    """

    layer: str | None
    sentence: str


def bad_data(batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence for each part of a batch that holds inf or NaN in float32."""
    for name, values in named_parts(batch):
        if values.dtype.kind == "f":
            bad = ~np.isfinite(values)
            if bad.any():
                numbers = f"{int(bad.sum())} numbers that are inf or NaN"
                yield Suspicion(None, f"`{name}` holds {numbers}, in {_examples(bad)}.")
                continue
            beyond = np.abs(values) > np.finfo(np.float32).max
            if beyond.any():
                such = f"such as {values[beyond].flat[0]:.3g}"
                numbers = (
                    f"{int(beyond.sum())} numbers that float32 cannot hold, {such}"
                )
                where = _examples(beyond)
                yield Suspicion(None, f"`{name}` holds {numbers}, in {where}.")


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
    for name, values in named_parts(batch):
        if (largest := _largest(values)) > _HUGE:
            yield Suspicion(
                None,
                f"`{name}` reaches {largest:.3g}; with numbers of size one there the "
                "step is finite.",
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


def bad_ids(model: keras.Model, batch: Any) -> list[Suspicion]:
    """Returns a sentence for each embedding that is asked for rows it does not have.

    A CPU raises an error there; a GPU gives rows of zeros, and says nothing.
    """
    layers = [layer for _, layer, _ in structure.walk(model)]
    if not any(isinstance(layer, keras.layers.Embedding) for layer in layers):
        return []
    seen = _Ids()
    with (
        unchanged(model),
        tapped(model, seen, only=lambda s: isinstance(s.layer, keras.layers.Embedding)),
        contextlib.suppress(tf.errors.InvalidArgumentError),
    ):
        run_step(model, batch)
    return list(seen.found.values())


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


def without_a_row(error: Exception) -> Suspicion | None:
    """Returns what an error says of an id or label that nothing stands for, if so."""
    found = _WITHOUT_A_ROW.search(str(error))
    if found is None:
        return None
    return Suspicion(None, f"The step raises an error: {found[0]}.")


def bad_labels(model: keras.Model, batch: Any) -> Iterator[Suspicion]:
    """Yields a sentence where class numbers lie outside of the model's outputs."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    shapes = getattr(model, "output_shape", None) if model.built else None
    for name, labels, loss, shape in _heads(y, getattr(model, "loss", None), shapes):
        kind = loss if isinstance(loss, str) else type(loss).__name__
        if "sparse" not in str(kind).lower() or not isinstance(shape, tuple):
            continue
        if not isinstance(shape[-1], int):
            continue
        values = np.asarray(labels)
        outside = (values < 0) | (values >= shape[-1])
        ignored = getattr(loss, "ignore_class", None)
        if ignored is not None:
            outside &= values != ignored
        if outside.any():
            such = values[outside].flat[0]
            yield Suspicion(
                None,
                f"`{name}` holds {int(outside.sum())} class numbers such as {such}, "
                f"while the model gives {shape[-1]} classes.",
            )


def _heads(y: Any, losses: Any, shapes: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yields name, targets, loss and shape of each output, as far as they are known."""
    if y is None:
        return
    if isinstance(y, dict):
        for name, part in y.items():
            one = losses.get(name) if isinstance(losses, dict) else losses
            shape = shapes.get(name) if isinstance(shapes, dict) else None
            yield f"y/{name}", part, one, shape
    elif isinstance(y, (list, tuple)):
        for i, part in enumerate(y):
            several = isinstance(losses, (list, tuple)) and len(losses) == len(y)
            known = isinstance(shapes, list) and len(shapes) == len(y)
            one = losses[i] if several else losses
            yield f"y/{i}", part, one, shapes[i] if known else None
    elif not isinstance(losses, (dict, list, tuple)):
        yield "y", y, losses, shapes


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


class Large(NamedTuple):
    """A weight that is far larger than initializers make it.

    `gain` is what it multiplies its inputs by; initializers make that about 1.
    """

    gain: float
    path: str
    weight: Any
    is_table: bool

    @property
    def sentence(self) -> str:
        """The weight and the figure."""
        does = "holds rows of numbers of" if self.is_table else "multiplies by"
        return (
            f"The weight {self.weight.path!r} {does} about {self.gain:.3g}; "
            "initializers make that about 1."
        )


def large_weights(model: keras.Model) -> list[Large]:
    """Returns the weights that are far too large, the worst first.

    They are no fault by themselves: of sparse inputs a weight of size one is right.
    """
    found = []
    for path, layer, _ in structure.walk(model):
        # A row of an embedding is looked up, and multiplies nothing.
        is_table = isinstance(layer, keras.layers.Embedding)
        for weight in structure.own_weights(layer):
            gain = _gain(weight, is_table=is_table) if weight.trainable else 0.0
            if gain > _EXPLODED:
                found.append(Large(gain, path, weight, is_table))
    return sorted(found, key=lambda each: -each.gain)


def _gain(weight: Any, *, is_table: bool) -> float:
    """Returns by how much a matrix multiplies inputs, 0 where it is none."""
    values = _values_of(weight)
    finite = values[np.isfinite(values)]
    if values.ndim < 2 or not finite.size:
        return 0.0
    fan_in = 1 if is_table else math.prod(values.shape[:-1])
    return float(np.sqrt(np.mean(np.square(finite)) * fan_in))


def _values_of(weight: Any) -> np.ndarray:
    return np.asarray(tf.cast(weight.value, tf.float32), np.float64)


@contextlib.contextmanager
def tamed(model: keras.Model) -> Iterator[None]:
    """Gives weights that are too large, or not finite, the size of fresh ones.

    That is inside the block; what stands for numbers that are lost is drawn anew.
    """
    random = np.random.default_rng(0)
    with unchanged(model):
        for _, layer, _ in structure.walk(model):
            is_table = isinstance(layer, keras.layers.Embedding)
            for weight in structure.own_weights(layer):
                if "float" not in str(weight.dtype):
                    continue
                values = _values_of(weight)
                bad = ~np.isfinite(values)
                size = _gain(weight, is_table=is_table)
                if values.ndim < 2 and not bad.all():
                    size = float(np.abs(values[~bad]).max())
                if not bad.any() and not (weight.trainable and size > _EXPLODED):
                    continue
                if size > _EXPLODED:
                    values /= size
                spread = 0.0
                if values.ndim > 1:
                    fan_in = 1 if is_table else math.prod(values.shape[:-1])
                    spread = fan_in**-0.5
                values[bad] = spread * random.normal(size=int(bad.sum()))
                weight.assign(values.astype(np.float32))
        yield


def bad_losses(model: keras.Model) -> Suspicion | None:
    """Returns the innermost layer of which a loss that it adds is not finite."""
    found = None
    for path, layer, _ in structure.walk(model):
        if layer is model:
            continue
        losses = [np.asarray(tf.cast(each, tf.float32)) for each in layer.losses]
        if not all(np.isfinite(each).all() for each in losses):
            found = Suspicion(
                path,
                f"The losses that {path!r} adds, such as its regularizers, are not "
                "finite in float32, while all that the layers give is.",
            )
    return found


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
