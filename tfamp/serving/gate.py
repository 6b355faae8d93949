"""The gate: whether an exported model answers as the float32 one it came from.

Both answer the same examples, so each example is its own control: only those on which
the two differ tell anything.
"""

import bisect
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.records import console
from tfamp.records.checks import first_line
from tfamp.records.record import Record, TableRecord
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials import scores, statistics
from tfamp.trials.statistics import Interval, effect_of_ratio

Verdict = Literal["as good and faster", "as good, not faster", "worse", "undecided"]
Outputs = dict[str, np.ndarray]
# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
_BROKEN = 0.1
# Nobody labels more examples than this to settle half a percent.
_MOST_EXAMPLES = 10**6
# A mean that differs by less than this part of the magnitude is a constant.
_CONSTANT = 1e-6


@dataclasses.dataclass(frozen=True)
class MetricChange(Record):
    """A metric of an output under both models, example by example."""

    name: str
    output: str
    reference: float  # its mean in float32; NaN where there are no labels
    exported: float
    worsening: float  # in points of a rate, as a part of float32's mean for a loss
    low: float  # the true worsening is above, but for a chance of 5 %
    bound: float  # the true worsening is below, but for a chance of 5 %
    tolerance: float
    num_examples: int
    num_needed: int | None = None  # examples, alike, that would show it to hold
    difference: float = 0.0  # of the outputs, over their spread
    flipped: int = 0  # predicted classes that are others than float32's

    @property
    def holds(self) -> bool:
        """Whether the worsening is shown to be within the tolerance."""
        return self.bound <= self.tolerance

    @property
    def fails(self) -> bool:
        """Whether it is shown to be beyond the tolerance."""
        return not self.low <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Speedup(Record):
    """How many times as fast as another model the exported one is, in turns."""

    against: str
    batch_size: int
    ratio: Interval  # of the median seconds of a call, over the turns


@dataclasses.dataclass(frozen=True)
class Parity(TableRecord):
    """An exported model against the float32 one it came from.

    Args:
        verdict: "as good and faster" or "as good, not faster" where the metric's drop
            is shown to be within the tolerance; "worse" where it is shown to be beyond
            it; "undecided" where the examples leave both open.
        reason: Why, in a sentence or two.
        num_examples: Validation examples.
        metrics: One for each output.
        speedups: Against each other model, by batch size.
    """

    verdict: Verdict
    reason: str
    num_examples: int
    metrics: tuple[MetricChange, ...] = ()
    speedups: tuple[Speedup, ...] = ()

    def timed(self, speedups: Sequence[Speedup]) -> "Parity":
        """Returns it with how fast the model is, which the verdict then tells.

        It is faster where it is so against all others at some batch size, and slower
        than none at the other.
        """
        effects: dict[int, set[str]] = {}
        for each in speedups:
            effect = effect_of_ratio(each.ratio, more_is_better=True)
            effects.setdefault(each.batch_size, set()).add(effect)
        is_slower = any("worse" in each for each in effects.values())
        is_faster = {"better"} in effects.values() and not is_slower
        verdict = self.verdict
        if is_faster and verdict == "as good, not faster":
            verdict = "as good and faster"
        return dataclasses.replace(self, verdict=verdict, speedups=tuple(speedups))

    def table(self) -> str:
        """Returns what was compared, the speed and why, each in a sentence."""
        lines = [
            f"{each.name} of {each.output}: {each.reference:.5g} -> "
            f"{each.exported:.5g}, worse by {each.worsening:.3%}, at most "
            f"{each.bound:.3%} (allowed: {each.tolerance:.3%}) on "
            f"{each.num_examples} examples; {each.flipped} predictions flipped, "
            f"outputs off by {each.difference:.2g} of their spread."
            for each in self.metrics
        ]
        lines += [
            f"Batch {x.batch_size}: {x.ratio.estimate:.2f} times {x.against} "
            f"[{x.ratio.low:.2f}, {x.ratio.high:.2f}]."
            for x in self.speedups
        ]
        return console.text_of(*lines, self.reason)


class Reference(NamedTuple):
    """A float32 model, validation examples by batch, and all that it answers."""

    model: keras.Model
    batches: list[tuple[Any, Any]]
    outputs: Outputs


def reference_of(
    model: keras.Model, dataset: tf.data.Dataset, names: Sequence[str]
) -> Reference:
    """Returns what a float32 model answers, read and predicted once."""
    batches = []
    for batch in dataset:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        y = None if y is None else tf.nest.map_structure(np.asarray, y)
        batches.append((tf.nest.map_structure(np.asarray, x), y))
    if not batches:
        raise ValueError(
            "`validation` holds no batches; expected at least one. Look at its source: "
            "a wrong path, split or filter leaves nothing."
        )
    inputs = [(tf.nest.map_structure(tf.constant, x),) for x, _ in batches]
    answers = [_named(each, names) for each in scores.predict(model, inputs)]
    outputs = {name: _joined([each[name] for each in answers]) for name in names}
    return Reference(model, batches, outputs)


def check_parity(
    reference: Reference, candidate: LoadedModel, *, tolerance: float = 0.005
) -> Parity:
    """Compares an exported model with the float32 one it came from, but for speed.

    The tolerance is in points of a rate such as an accuracy (0.005 is half a percent),
    and a part of float32's mean for a loss.
    """
    model, batches, exact = reference
    names = list(exact)
    answers = [_named(candidate.predict(x), names) for x, _ in batches]
    labels = _labels([y for _, y in batches], names)
    metrics, untold = [], []
    for name in names:
        exported = _joined([each[name] for each in answers])
        if exact[name].shape != exported.shape:
            raise ValueError(
                f"Output {name!r} has shape {exact[name].shape} in float32 and "
                f"{exported.shape} in the exported model; expected the same. Compare "
                "it with the model that it was exported from."
            )
        loss = _loss_of(model, name, names)
        found, why = _of_output(
            name, exact[name], exported, labels.get(name), loss, tolerance
        )
        metrics.append(found)
        untold += [why] if why else []
    verdict, reason = judged(metrics, untold=untold)
    if not labels:
        reason += " There are no labels: only outputs are compared."
    number = sum(len(tf.nest.flatten(x)[0]) for x, _ in batches)
    return Parity(verdict, reason, number, tuple(metrics))


def judged(
    metrics: Sequence[MetricChange], *, untold: Sequence[str] = ()
) -> tuple[Verdict, str]:
    """Returns the verdict of all outputs together, and why in a sentence."""
    broken = [each.output for each in metrics if not np.isfinite(each.difference)]
    if broken:
        return "worse", (
            f"Outputs {tuple(broken)!r} hold numbers that are not finite, which are so "
            "in float32, or that differ where float32's are all alike."
        )
    for each in metrics:
        if each.fails:
            return "worse", (
                f"The {each.name} of {each.output!r} is worse by {each.worsening:.3%}, "
                f"and by more than {each.low:.3%} with certainty; allowed are "
                f"{each.tolerance:.3%}."
            )
    if untold:
        return "undecided", " ".join(untold)
    open_ones = [each for each in metrics if not each.holds]
    if not open_ones:
        bounds = ", ".join(f"{each.name} at most {each.bound:.3%}" for each in metrics)
        return "as good, not faster", f"It is as good: worse in {bounds}."
    found = max(open_ones, key=lambda each: each.bound)
    advice = "Pass labels, or another tolerance."
    if found.num_needed is not None:
        advice = f"It needs {found.num_needed} examples, if the others are alike."
    return "undecided", (
        f"The {found.name} of {found.output!r} is worse by {found.worsening:.3%}, at "
        f"most {found.bound:.3%} on {found.num_examples} examples; allowed are "
        f"{found.tolerance:.3%}. {advice}"
    )


def _of_output(
    name: str,
    exact: np.ndarray,
    exported: np.ndarray,
    y: np.ndarray | None,
    loss: Any,
    tolerance: float,
) -> tuple[MetricChange, str]:
    """Returns how an output changed, and why its labels tell nothing, "" if they do.

    Labels tell nothing where float32 is not shown to be better than one answer for all
    examples, as where they are in another order: any export is "as good" by them.
    """
    number, flipped, why = len(exact), 0, ""
    off = difference(exported, exact)
    classes = _has_classes(exact, y)
    if classes:
        logits = _are_logits(exact)
        before, after = (classes_of(x, are_logits=logits) for x in (exact, exported))
        flipped = int((before != after).sum())
    sides: list[np.ndarray] = []
    if y is not None and classes:
        is_one_hot = y.shape == exact.shape and exact.shape[-1] > 1
        ids = (y.argmax(axis=-1) if is_one_hot else y).reshape(before.shape)
        values, counts = np.unique(ids, return_counts=True)
        answers = (before, after, values[counts.argmax()])
        sides = [(ids == x).reshape(number, -1).mean(axis=1) for x in answers]
        what, gain = "accuracy", sides[0] - sides[2]
    elif y is not None and loss:
        compiled: Any = types.SimpleNamespace(loss=loss, name="the exported model")
        mean = np.broadcast_to(exact.mean(axis=0), exact.shape)
        try:
            score = scores.score_of(compiled, None, exact, y)
            sides = [scores.values_of(score, y, x) for x in (exact, exported, mean)]
            what, gain = "loss", sides[2] - sides[0]
        except ValueError as error:  # one figure for all examples, or none
            why = f"The loss of {name!r} cannot be compared: {first_line(error)}"
    if sides:
        if not np.isfinite(gain).all() or statistics.interval(gain).low > 0:
            found = _change(what, name, sides[0], sides[1], classes, tolerance)
            return dataclasses.replace(found, difference=off, flipped=flipped), ""
        why = (
            f"The labels of {name!r} tell nothing: on them float32's {what} is "
            f"{np.mean(sides[0]):.4g}, not shown to be better than the "
            f"{np.mean(sides[2]):.4g} of one answer for all examples. Look at their "
            "order and at that of the classes, train the model, or pass more examples, "
            "of all classes."
        )
    # Beyond the tolerance nobody knows what a difference costs, so it counts as worse
    # from `_BROKEN` on only.
    nan = math.nan
    if classes:  # predictions that flip bound what is lost
        same = (before == after).reshape(number, -1).mean(axis=1)
        what = "agreement with float32"
        found = _change(what, name, np.ones(number), same, True, tolerance)
        low = found.low if found.low > _BROKEN else min(found.low, tolerance)
        found = dataclasses.replace(
            found, low=low, reference=nan, difference=off, flipped=flipped
        )
    else:  # one figure of all examples: nothing is counted
        low = off if off > _BROKEN else 0.0
        figures = (nan, nan, off, low, off, tolerance, number)
        found = MetricChange("difference over spread", name, *figures, difference=off)
    return found, why


def _change(
    name: str,
    output: str,
    exact: np.ndarray,
    exported: np.ndarray,
    is_rate: bool,
    tolerance: float,
) -> MetricChange:
    """Returns a metric's worsening with its bounds, from its values on each example.

    Where each is a difference of two numbers in [0, 1], as those of an accuracy are,
    what was not seen may be there all the same: the bounds are those of fractions.
    """
    number, inf = len(exact), math.inf
    means = float(np.mean(exact)), float(np.mean(exported))
    found = MetricChange(name, output, *means, inf, inf, inf, tolerance, number)
    if not np.isfinite(exported).all():
        return found
    needed = None
    if not is_rate:
        worse = (exported - exact) / max(abs(means[0]), 1e-12)
        between = statistics.interval(worse)
        low, bound = between.low, between.high
    else:
        worse = exact - exported
        low, bound = -statistics.change_limit(-worse), statistics.change_limit(worse)
        if np.mean(worse) < tolerance < bound:
            # If all that are added are answered alike.
            changed = worse[worse != 0]

            def shows(many: int) -> bool:
                alike = np.zeros(many - len(changed))
                limit = statistics.change_limit(np.concatenate([changed, alike]))
                return limit <= tolerance

            counts = range(number, _MOST_EXAMPLES)
            needed = number + bisect.bisect_left(counts, True, key=shows)
    return dataclasses.replace(
        found, worsening=float(np.mean(worse)), low=low, bound=bound, num_needed=needed
    )


def classes_of(outputs: np.ndarray, *, are_logits: bool = False) -> np.ndarray:
    """Returns the class that each answer names; of one class by its probability."""
    if outputs.shape[-1] > 1:
        return outputs.argmax(axis=-1)
    return (outputs[..., 0] > (0.0 if are_logits else 0.5)).astype(np.int64)


def _has_classes(outputs: np.ndarray, y: np.ndarray | None) -> bool:
    """States whether an output stands for classes, by labels or as probabilities."""
    if outputs.dtype.kind != "f" or outputs.ndim < 2:
        return False
    number = outputs.shape[-1]
    if y is None:
        is_inside = number > 1 and not _are_logits(outputs)
        return is_inside and np.allclose(outputs.sum(-1), 1, atol=1e-3)
    if y.dtype.kind not in "iub" and not (y == np.round(y)).all():
        return False
    if number == 1:
        return bool(np.isin(y, (0, 1)).all())
    is_one_hot = y.shape == outputs.shape and bool((y.sum(-1) == 1).all())
    return is_one_hot or (y.size * number == outputs.size and y.max(initial=0) < number)


def _are_logits(outputs: np.ndarray) -> bool:
    """States whether numbers cannot be probabilities."""
    return bool((outputs < 0).any() or (outputs > 1).any())


def difference(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns how far numbers are off, relative to their spread over the batch.

    It is a root mean square; of texts the part that differs. inf where the two are not
    finite in the same places, or where one differs and all of `exact` is 0.

    Example:
        >>> exact = np.array([[999.0], [1001.0]])
        >>> difference(exact + 0.5, exact), difference(exact * np.inf, exact)
        (0.5, inf)
    """
    if exact.dtype.kind not in "fiub":
        return float(np.mean(low.astype(str) != exact.astype(str))) if low.size else 0.0
    low, exact = low.astype(np.float64), exact.astype(np.float64)
    held = np.isfinite(exact)
    if (held != np.isfinite(low)).any():
        return math.inf
    low, exact = np.where(held, low, 0.0), np.where(held, exact, 0.0)
    error, magnitude = _rms(low - exact), _rms(exact)
    spread = _rms(exact - exact.mean(axis=0)) if len(exact) > 1 else 0.0
    if spread <= _CONSTANT * magnitude:
        spread = magnitude
    return error / spread if spread else (math.inf if error else 0.0)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _loss_of(model: keras.Model, name: str, names: Sequence[str]) -> Any:
    """Returns the loss that a model was compiled with for an output; None without."""
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        return loss.get(name)
    if isinstance(loss, (list, tuple)):
        return loss[names.index(name)] if len(loss) == len(names) else None
    return loss


def _labels(ys: Sequence[Any], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the labels of each output that has some."""
    if any(y is None for y in ys):
        return {}
    if not isinstance(ys[0], dict):
        flat = [tf.nest.flatten(y) for y in ys]
        if len(flat[0]) != len(names):
            return {}
        ys = [dict(zip(names, each, strict=True)) for each in flat]
    return {n: _joined([y[n] for y in ys]) for n in names if n in ys[0]}


def _named(answer: Any, names: Sequence[str]) -> Outputs:
    """Returns what a model answered by names of outputs, in float32 or integers."""
    if isinstance(answer, Mapping) and {*answer} == {*names}:
        values = [answer[name] for name in names]
    else:
        values = tf.nest.flatten(answer)
    arrays = dict(zip(names, map(np.asarray, values), strict=True))
    return {
        name: x.astype(np.float32) if x.dtype.kind in "fV" else x
        for name, x in arrays.items()
    }


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns batches as one array; sequences of several lengths lie flat."""
    if len({part.shape[1:] for part in parts}) > 1:
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return np.concatenate(parts)
