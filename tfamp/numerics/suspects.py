"""What speaks against the data, the weights, the optimizer or the update of a step."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.patches import replaced
from tfamp.numerics.first_bad import Examined, examine, examples
from tfamp.stepping.layer_calls import in_float32
from tfamp.stepping.snapshots import optimizers_of
from tfamp.stepping.unchanged import unchanged

# A layer whose weights are so many times as large as initializers make them, which is
# so that they give outputs about as large as inputs, has exploded.
_EXPLODED = 30.0
# No number of data is as large as this: its third power is beyond float32.
_HUGE = 1e12
# A loss that one update makes so many times as large has left where it was; near 0 any
# number is many times it.
_JUMP, _SMALL = 100.0, 1e-2


class Suspicion(NamedTuple):
    """A sentence with the figure, and the layer it is about, if any."""

    sentence: str
    layer: str | None = None


def bad_data(batch: Any) -> tuple[list[Suspicion], Any]:
    """Returns a sentence for each part of a batch with numbers that no data has.

    With them comes the batch with the mean of the others for each number that is not
    finite, since a root or a quotient may not bear 0, and with huge ones at size one.
    """
    found, mended = [], []
    parts = keras.utils.unpack_x_y_sample_weight(batch)
    for (at, *path), part in keras.tree.flatten_with_path(parts):
        name = "/".join([("x", "y", "sample_weight")[at], *map(str, path)])
        mended.append(part)
        is_tensor = isinstance(part, tf.Tensor)
        if not is_tensor or not (part.dtype.is_floating or part.dtype.is_integer):
            continue
        values = np.asarray(tf.cast(part, tf.float64))
        with np.errstate(over="ignore"):
            is_good = np.isfinite(values.astype(np.float32))
        largest = float(np.abs(values[is_good]).max(initial=0.0))
        bad, what = ~is_good, "are inf or NaN"
        if np.isfinite(values).all() and bad.any():
            what = f"float32 cannot hold, such as {values[bad].flat[0]:.3g}"
        text = f"holds {int(bad.sum())} numbers that {what}"
        if is_good.all():
            bad, text = np.abs(values) > _HUGE, f"reaches {largest:.3g}"
        if bad.any():
            found.append(Suspicion(f"`{name}` {text}, in {examples(bad)}."))
            mean = values[is_good].mean() if is_good.any() else 1.0
            values = np.where(is_good, values, mean)
            values = values / largest if largest > _HUGE else values
            mended[-1] = tf.cast(values, tf.float32)
    x, y, weight = keras.tree.pack_sequence_as(parts, mended)
    return found, keras.utils.pack_x_y_sample_weight(x, y, weight)


def bad_labels(model: keras.Model, batch: Any) -> Suspicion | None:
    """Returns a sentence where class numbers lie outside of the model's outputs."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    labels, outputs = keras.tree.flatten(y), getattr(model, "outputs", None) or ()
    losses = keras.tree.flatten(model.loss)
    losses = losses * len(labels) if len(losses) == 1 else losses
    for values, loss, output in zip(labels, losses, outputs, strict=False):
        kind = loss if isinstance(loss, str) else type(loss).__name__
        count = output.shape[-1] if output.shape else None
        if values is None or count is None or "sparse" not in str(kind).lower():
            continue
        values = np.asarray(values)
        config: Any = getattr(loss, "get_config", dict)()
        outside = (values < 0) | (values >= count)
        outside &= values != config.get("ignore_class")
        if outside.any():
            text = f"`y` holds {int(outside.sum())} class numbers such as "
            text += f"{values[outside].flat[0]}, while the model gives {count} classes."
            return Suspicion(text)
    return None


def _weights_of(model: keras.Model) -> Iterator[tuple[str, Any, float]]:
    """Yields path, weight, and what keeps outputs as large as inputs: its fan-in."""
    for path, layer, _ in structure.walk(model):
        for weight in structure.own_weights(layer):
            if "float" in str(weight.dtype):
                is_table = isinstance(layer, keras.layers.Embedding)
                yield path, weight, 1 if is_table else math.prod(weight.shape[:-1])


def _values(variable: Any) -> np.ndarray:
    return np.array(tf.cast(variable.value, tf.float32), np.float64)


def _bad(variable: Any, whose: str, layer: str | None) -> list[Suspicion]:
    """Returns a sentence on a variable that is inf or NaN in a part."""
    values = _values(variable)
    bad = int(values.size - np.isfinite(values).sum())
    text = f"{bad} of {values.size} numbers of {whose} {variable.path!r} are inf or NaN"
    return [Suspicion(f"{text} already.", layer)] if bad else []


def bad_weights(model: keras.Model) -> list[Suspicion]:
    """Returns a sentence for each weight that is inf or NaN in a part."""
    weights = _weights_of(model)
    return [each for path, w, _ in weights for each in _bad(w, "the weight", path)]


def bad_slots(model: keras.Model) -> list[Suspicion]:
    """Returns a sentence for each variable of an optimizer that is inf or NaN."""
    found = []
    owners = {w.path.replace("/", "_"): path for path, w, _ in _weights_of(model)}
    for optimizer in optimizers_of(model):
        # A loss-scale optimizer's own numbers may well be inf: it counts them.
        for slot in getattr(optimizer, "inner_optimizer", optimizer).variables:
            if "float" in str(slot.dtype):
                # Slots bear the name of their weight and their own.
                name = slot.path.rsplit("/", 1)[-1]
                weight = max((w for w in owners if name.startswith(w)), default="")
                found += _bad(slot, "the optimizer's", owners.get(weight))
    return found


def bad_added_loss(model: keras.Model) -> Suspicion | None:
    """Returns the innermost layer of which a loss that it adds is not finite."""
    found = None
    for path, layer, _ in structure.walk(model):
        losses = [] if layer is model else layer.losses
        if not all(np.isfinite(tf.cast(x, tf.float32)).all() for x in losses):
            text = f"The losses that {path!r} adds, such as its regularizers, are not "
            found = Suspicion(f"{text}finite in float32.", path)
    return found


def large_weights(model: keras.Model) -> dict[str, Suspicion]:
    """Returns a sentence for each weight that is far too large, by path, worst first.

    They are no fault by themselves: of sparse inputs a weight of size one is right.
    """
    found = {}
    for path, weight, fan_in in _weights_of(model):
        gain = _gain(_values(weight), fan_in)
        if weight.trainable and len(weight.shape) > 1 and gain > _EXPLODED:
            text = f"The weight {weight.path!r} multiplies by about {gain:.3g}; "
            text += "initializers make that about 1."
            found[weight.path] = gain, Suspicion(text, path)
    worst_first = sorted(found.items(), key=lambda each: -each[1][0])
    return {path: suspicion for path, (_, suspicion) in worst_first}


def _gain(values: np.ndarray, fan_in: float) -> float:
    """Returns by how much weights multiply inputs; how large they are, of vectors."""
    finite = np.abs(values[np.isfinite(values)])
    if values.ndim < 2 or not finite.size:
        return float(finite.max(initial=0.0))
    return float(np.sqrt(np.mean(finite**2) * fan_in))


@contextlib.contextmanager
def tamed(model: keras.Model) -> Iterator[None]:
    """Gives weights that are too large, or not finite, the size of fresh ones.

    That is inside the block; what stands for numbers that are lost is drawn anew.
    """
    random = np.random.default_rng(0)
    with unchanged(model):
        for _, weight, fan_in in _weights_of(model):
            values = _values(weight)
            gain, bad = _gain(values, fan_in), ~np.isfinite(values)
            if gain > _EXPLODED and weight.trainable:
                values /= gain
            spread = fan_in**-0.5 if values.ndim > 1 else 0.0
            values[bad] = spread * random.normal(size=int(bad.sum()))
            weight.assign(values.astype(np.float32))
        yield


class Update(NamedTuple):
    """What one update comes to, in float32 at the learning rate of the step.

    The first weight that it makes bad, and whether that is by a constraint; the loss
    ahead of it, after it, and after one at a tenth of the rate, NaN where a step has
    no loss; whether it takes the loss far from where it was.
    """

    bad: Suspicion | None = None
    is_by_constraint: bool = False
    before: float = math.nan
    after: float = math.nan
    at_tenth: float = math.nan
    is_jump: bool = False

    @property
    def rises(self) -> bool:
        """Whether the loss is at least doubled, and less so at a tenth of the rate."""
        rise = self.after - self.before
        return rise > max(abs(self.before), 1e-3) and self.at_tenth < self.after


def one_update(
    model: keras.Model,
    batch: Any,
    exact: Examined,
    rate: float,
    *,
    is_fresh: bool = False,
) -> Update | None:
    """Returns what the optimizer of `compile` does with gradients of a float32 step.

    None where that is not what trains everything, or, where it is to begin without
    slots, `is_fresh`, where it cannot be made anew.
    """
    if model.optimizer is None:
        return None
    trained = list(model.trainable_variables)
    found = {id(v): g for v, g in exact.step.gradients if g is not None}
    optimizer: Any = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    if is_fresh:
        try:
            with model.distribute_strategy.scope():
                optimizer = type(optimizer).from_config(optimizer.get_config())
                optimizer.build(trained)
        except Exception:  # of an optimizer of the user's own
            return None
    if not {id(v) for v in trained} >= set(found):
        return None
    gradients = [found.get(id(v), tf.zeros_like(v.value)) for v in trained]

    @contextlib.contextmanager
    def applied(factor: float = 1.0) -> Iterator[None]:
        # Slots too, of one that no model holds.
        held = [(each, np.asarray(each.value).copy()) for each in optimizer.variables]
        try:
            with unchanged(model), replaced(optimizer, _learning_rate=rate * factor):
                optimizer.apply(gradients, trained)
                yield
        finally:
            for variable, values in held:
                variable.assign(values)

    def loss_after(factor: float) -> float:
        with applied(factor), in_float32(model):
            loss = examine(model, batch).loss
        return math.nan if loss is None else loss

    large = large_weights(model)
    with applied():
        bad = next(iter(bad_weights(model)), None)
        has_run_away = bool(large_weights(model).keys() - large.keys())
    if bad is not None:
        with contextlib.ExitStack() as stack:
            for variable in trained:
                stack.callback(setattr, variable, "constraint", variable.constraint)
                variable.constraint = None
            with applied():
                return Update(bad, is_by_constraint=not bad_weights(model))
    if exact.loss is None:
        return Update()
    before, after = exact.loss, loss_after(1.0)
    limit = _JUMP * max(abs(before), _SMALL)
    # A healthy update may lower a loss that has no lowest value by any factor.
    is_jump = not before - limit < after <= before + limit
    is_jump &= has_run_away or not -math.inf < after < before
    return Update(None, False, before, after, loss_after(0.1), is_jump)
