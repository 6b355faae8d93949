"""What speaks for a cause of a failing step: its first bad number, and what is odd."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.exact_values import unrounded
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.patches import replaced
from tfamp.stepping.eager_step import Call, Step, floats, run_step, tapped
from tfamp.stepping.layer_calls import Recorded, Recorder, in_float32
from tfamp.stepping.unchanged import unchanged

# A layer whose weights are so many times as large as initializers make them, which is
# so that they give outputs about as large as inputs, has exploded.
_EXPLODED = 30.0
# No number of data is as large as this: its third power is beyond float32.
_HUGE = 1e12
CUT = "Go back to weights from before and cut the learning rate{}; or warm it up."
# A loss that one update makes so many times as large has left where it was.
_JUMP, _SMALL = 100.0, 1e-2


class NoRowError(Exception):
    """Raised where an embedding is asked for rows it does not have; says which."""


class Origin(NamedTuple):
    """The layer or operation a bad number came from, and on which way."""

    path: str
    layer: Any
    way: Literal["forward", "backward"]


class Examined(NamedTuple):
    """A replay of a step, and where a bad number came from.

    `harmless` are the paths of what made numbers that are not finite of which a later
    call made good ones again, as a softmax does of -inf for what it is to leave out.
    """

    step: Step
    calls: list[Recorded]
    origin: Origin | None = None
    harmless: frozenset[str] = frozenset()

    @property
    def loss(self) -> float | None:
        """The loss without a scale, None where the step told none."""
        return None if self.step.loss is None else float(self.step.loss)

    def largest(self, path: str, way: str) -> float:
        """Returns the largest finite output of a layer, or gradient by one."""
        own = [call for call in self.calls if call.site.path == path]
        given = [g for call in own for g in call.output_gradients if g is not None]
        if way == "forward":
            given = [output for call in own for output in floats(call.outputs)]
        values = [np.abs(np.asarray(tf.cast(each, tf.float32))) for each in given]
        return max((float(v[np.isfinite(v)].max(initial=0)) for v in values), default=0)


class _Calls(Recorder):
    """Keeps every call, with logits as in the step itself, and ids without a row.

    A CPU raises an error for such an id; a GPU gives rows of zeros, and says nothing.
    """

    keeps_logits = True

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""

    def on_call(self, call: Call) -> None:
        """Keeps what goes in."""
        super().on_call(call)
        if isinstance(call.site.layer, keras.layers.Embedding):
            given = (*call.args, *call.kwargs.values())[0]
            ids = np.asarray(getattr(given, "values", given))  # of a sparse tensor
            count = call.site.layer.input_dim
            outside = (ids < 0) | (ids >= count)
            if outside.any():
                self.lost = self.lost or (
                    f"{call.site.path!r} has rows 0 to {count - 1} and is asked for "
                    f"{int(outside.sum())} others, such as "
                    f"{int(ids[outside].flat[0])}, in {examples(outside)}."
                )


def examples(bad: np.ndarray) -> str:
    """Returns "2 of 16 examples (number 5, 9)" of where something is bad."""
    rows = sorted(set(np.argwhere(bad)[:, 0].tolist())) if bad.ndim else [0]
    shown = ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
    return f"{len(rows)} of {len(bad) if bad.ndim else 1} examples (number {shown})"


def examine(
    model: keras.Model,
    batch: Any,
    *,
    loss_scale: float = 1.0,
    is_exact: bool = False,
    harmless: frozenset[str] = frozenset(),
) -> Examined:
    """Runs the train step with every layer watched; those `harmless` are at no fault.

    Where it `is_exact`, in float32, no gradient becomes bad by being handed on. A
    `NoRowError` says that ids have no row.
    """
    seen = _Calls()
    try:
        with tapped(model, seen):
            step = run_step(model, batch, loss_scale=loss_scale)
    except tf.errors.InvalidArgumentError:
        if not seen.lost:
            raise
    if seen.lost:
        raise NoRowError(seen.lost)
    inside = {id(child) for call in seen.calls for child in call.inside}
    outermost = [call for call in seen.calls if id(call) not in inside]
    made: list[Origin] = []
    taken_up: list[Origin] = []
    for call in outermost:
        _judge(call, made, taken_up)
    at_fault = (m for m in made if m not in taken_up and m.path not in harmless)
    origin = next(at_fault, None)
    has_bad_loss = step.loss is not None and not bool(tf.math.is_finite(step.loss))
    if origin is None and not step.is_finite and not has_bad_loss:
        origin = _backward(model, step, seen.calls, outermost if is_exact else [])
    return Examined(step, seen.calls, origin, frozenset(m.path for m in taken_up))


def _judge(call: Recorded, made: list[Origin], taken_up: list[Origin]) -> None:
    """Notes a call that made bad numbers of good ones; the calls inside come first."""
    num_before, outputs = len(made), floats(call.outputs)
    for child in call.inside:
        _judge(child, made, taken_up)
    inside = made[num_before:]
    inputs_are_finite = _are_finite(call.float_inputs)
    if _are_finite(outputs):
        taken_up += inside if inputs_are_finite or not outputs else made
    elif inputs_are_finite and all(each in taken_up for each in inside):
        made.append(Origin(call.site.path, call.site.layer, "forward"))


def _backward(
    model: keras.Model, step: Step, calls: list[Recorded], outermost: list[Recorded]
) -> Origin | None:
    """Returns where the first bad gradient came from, None for the loss.

    That is the last call with good gradients by its outputs and bad ones by its inputs,
    else the layer around the call whose outputs it came to, else the last layer with a
    bad gradient of a weight.
    """
    for call in reversed(calls):  # inner ones ahead of those around them
        if _are_finite(call.output_gradients) and not _are_finite(call.input_gradients):
            return Origin(call.site.path, call.site.layer, "backward")
    for call, around in _from_the_last(outermost, None):
        if not _are_finite(call.output_gradients):
            site = None if around is None else around.site
            return None if site is None else Origin(site.path, site.layer, "backward")
    bad = {id(variable) for variable, g in step.gradients if not _are_finite([g])}
    found = None
    for path, layer, _ in structure.walk(model):
        if any(id(weight) in bad for weight in structure.own_weights(layer)):
            found = Origin(path, layer, "backward")
    return found


def _from_the_last(
    calls: list[Recorded], around: Recorded | None
) -> Iterator[tuple[Recorded, Recorded | None]]:
    """Yields calls with the one around each, as gradients come to their outputs."""
    for call in reversed(calls):
        yield call, around
        yield from _from_the_last(call.inside, call)


def _are_finite(tensors: list[Any]) -> bool:
    """States whether tensors, but for None, are finite, or were ahead of rounding.

    Who takes numbers in half precision spoils them, not who hands them over.
    """
    return all(
        bool(tf.reduce_all(tf.math.is_finite(unrounded(tensor))))
        for tensor in tensors
        if tensor is not None
    )


class Suspicion(NamedTuple):
    """A sentence with the figure, and the layer it is about, if any."""

    sentence: str
    layer: str | None = None


def bad_data(batch: Any) -> tuple[list[Suspicion], Any]:
    """Returns a sentence for each part of a batch with numbers that no data has.

    With them comes the batch with the mean of the others for what is not finite, since
    a root or a quotient may not bear 0, and with huge ones at size one.
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
        bad, count = ~is_good, int((~is_good).sum())
        what = f"{'is' if count == 1 else 'are'} inf or NaN"
        if np.isfinite(values).all() and bad.any():
            what = f"float32 cannot hold, such as {values[bad].flat[0]:.3g}"
        text = f"holds {count} number{'' if count == 1 else 's'} that {what}"
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
    """Yields a layer's path, a weight, and its fan-in."""
    for path, layer, _ in structure.walk(model):
        is_table = isinstance(layer, keras.layers.Embedding)
        for weight in structure.own_weights(layer):
            if "float" in str(weight.dtype):
                yield path, weight, 1 if is_table else math.prod(weight.shape[:-1])


def _values(variable: Any) -> np.ndarray:
    return np.array(tf.cast(variable.value, tf.float32), np.float64)


def _bad(variable: Any, whose: str, layer: str | None) -> list[Suspicion]:
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
    # A loss-scale optimizer's own numbers may well be inf: it counts them.
    inner = [getattr(each, "inner_optimizer", each) for each in optimizers_of(model)]
    for slot in (slot for each in inner for slot in each.variables):
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
    found = []
    for path, weight, fan_in in _weights_of(model):
        gain = _gain(_values(weight), fan_in)
        if weight.trainable and len(weight.shape) > 1 and gain > _EXPLODED:
            text = f"The weight {weight.path!r} multiplies by about {gain:.3g}; "
            text += "initializers make that about 1."
            found.append((-gain, weight.path, Suspicion(text, path)))
    return {path: suspicion for _, path, suspicion in sorted(found)}


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

    None where that is not what trains all, or cannot be made anew, as for `is_fresh`.
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
    is_up = is_jump or not after <= before
    at_tenth = loss_after(0.1) if is_up else math.nan
    return Update(None, False, before, after, at_tenth, is_jump)


def rate_of(model: keras.Model) -> float:
    """Returns the learning rate of this step; inside of `unchanged` it is another."""
    if model.optimizer is None:
        return 0.0
    return float(tf.convert_to_tensor(model.optimizer.learning_rate))


def words_of_jump(update: Update, rate: float) -> tuple[str, str]:
    """Returns what an update that throws the loss does, and how far to cut the rate."""
    text = f"One update takes the loss from {update.before:.4g} to {update.after:.4g}."
    cut = f" from {rate:.3g} to {rate / 10:.3g}"
    cut += "" if -math.inf < update.at_tenth <= update.before else " or less"
    cut += f", at which one update takes the loss to {update.at_tenth:.4g}"
    return text, CUT.format(cut)
