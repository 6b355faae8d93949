"""The gate: whether an exported model answers as the float32 one it came from.

Both answer the same examples: only those on which the two differ tell anything.
"""

import bisect
import dataclasses
import math
import types
from collections.abc import Callable, Mapping, Sequence
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
Arrays = dict[str, np.ndarray]
# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
_BROKEN = 0.1
_MOST_EXAMPLES = 10**6  # that anybody labels to settle half a percent
_CONSTANT = 1e-6  # part of the magnitude by which a constant may differ


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


@dataclasses.dataclass(frozen=True)
class Speedup(Record):
    """How many times as fast as another model the exported one is, in turns."""

    against: str
    batch_size: int
    ratio: Interval  # of the median seconds of a call, over the turns


@dataclasses.dataclass(frozen=True)
class Parity(TableRecord):
    """An exported model against the float32 one it came from.

    "as good ..." is where the metric's drop is shown to be within the tolerance,
    "worse" where it is shown to be beyond, "undecided" where both are open.
    """

    verdict: Verdict
    reason: str
    num_examples: int
    metrics: tuple[MetricChange, ...] = ()  # one for each output
    speedups: tuple[Speedup, ...] = ()

    def timed(self, speedups: Sequence[Speedup]) -> "Parity":
        """Returns it with the speed: faster than all at a size, slower at none."""
        effects: dict[int, set[str]] = {}
        for each in speedups:
            effect = effect_of_ratio(each.ratio, more_is_better=True)
            effects.setdefault(each.batch_size, set()).add(effect)
        verdict, is_slower = self.verdict, "worse" in set().union(*effects.values())
        if verdict.startswith("as good") and {"better"} in effects.values():
            verdict = verdict if is_slower else "as good and faster"
        return dataclasses.replace(self, verdict=verdict, speedups=tuple(speedups))

    def table(self) -> str:
        """Returns what was compared, the speed and why, each in a sentence."""
        lines = [
            f"{x.name} of {x.output}: {x.reference:.5g} -> {x.exported:.5g}, worse by "
            f"{x.worsening:.3%}, at most {x.bound:.3%} (allowed: {x.tolerance:.3%}) on "
            f"{x.num_examples} examples; {x.flipped} predictions flipped, outputs off "
            f"by {x.difference:.2g} of their spread."
            for x in self.metrics
        ]
        lines += [
            f"Batch {x.batch_size}: {x.ratio.estimate:.2f} times {x.against} "
            f"[{x.ratio.low:.2f}, {x.ratio.high:.2f}]."
            for x in self.speedups
        ]
        return console.text_of(*lines, self.reason)


class Reference(NamedTuple):
    """Validation examples by batch, their labels, and what float32 answers."""

    inputs: list[Arrays]
    outputs: Arrays
    labels: Arrays  # of the outputs that have some
    losses: Mapping[str, Any]  # that the model was compiled with, by output


def reference_of(
    model: LoadedModel,
    dataset: tf.data.Dataset,
    by_name: Callable[[Any], Arrays],
    loss: Any = None,
) -> Reference:
    """Returns what a float32 model answers, read and predicted once."""
    names = [spec.name for spec in model.signature.outputs]
    inputs, answers, ys = [], [], []
    for batch in dataset:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        inputs.append(by_name(x))
        answers.append(model.run(inputs[-1]))
        if y is not None and not isinstance(y, dict):
            flat = tf.nest.flatten(y)
            y = dict(zip(names, flat, strict=True)) if len(flat) == len(names) else {}
        ys.append({name: np.asarray(value) for name, value in (y or {}).items()})
    if isinstance(loss, (list, tuple)):
        loss = dict(zip(names, loss, strict=False))
    losses = loss if isinstance(loss, dict) else dict.fromkeys(names, loss)
    outputs = {name: _joined([each[name] for each in answers]) for name in names}
    labels = {n: _joined([y[n] for y in ys]) for n in names if n in ys[0]}
    return Reference(inputs, outputs, labels, losses)


def check_parity(
    reference: Reference, candidate: LoadedModel, *, tolerance: float = 0.005
) -> Parity:
    """Compares an exported model with the float32 one it came from, but for speed.

    The tolerance is in points of a rate, and a part of float32's mean for a loss.
    """
    answers = [candidate.run(x) for x in reference.inputs]
    metrics, untold = [], []
    for name, exact in reference.outputs.items():
        exported = _joined([each[name] for each in answers])
        y, loss = reference.labels.get(name), reference.losses.get(name)
        found, why = _of_output(name, exact, exported, y, loss, tolerance)
        metrics.append(found)
        untold += [why] if why else []
    verdict, reason = judged(metrics, untold=untold)
    if not reference.labels:
        reason += " There are no labels: only outputs are compared."
    number = sum(len(next(iter(x.values()))) for x in reference.inputs)
    return Parity(verdict, reason, number, tuple(metrics))


def judged(
    metrics: Sequence[MetricChange], *, untold: Sequence[str] = ()
) -> tuple[Verdict, str]:
    """Returns the verdict of all outputs together, and why in a sentence."""
    broken = tuple(x.output for x in metrics if not math.isfinite(x.difference))
    if broken:
        told = "hold numbers that are not finite, or differ where float32's are alike"
        return "worse", f"Outputs {broken!r} {told}."
    worst = max(
        metrics, key=lambda x: (not x.low <= x.tolerance, x.bound - x.tolerance)
    )
    told = f"The {worst.name} of {worst.output!r} is worse by {worst.worsening:.3%}, "
    allowed = f"allowed are {worst.tolerance:.3%}."
    if not worst.low <= worst.tolerance:
        return "worse", f"{told}by more than {worst.low:.3%} with certainty; {allowed}"
    if untold:
        return "undecided", " ".join(untold)
    if worst.bound <= worst.tolerance:
        bounds = ", ".join(f"{each.name} at most {each.bound:.3%}" for each in metrics)
        return "as good, not faster", f"It is as good: worse in {bounds}."
    advice = "Pass labels, or another tolerance."
    if worst.num_needed is not None:
        advice = f"It needs {worst.num_needed} examples, if the others are alike."
    found = f"at most {worst.bound:.3%} on {worst.num_examples} examples"
    return "undecided", f"{told}{found}; {allowed} {advice}"


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
    number, flipped, off, why = len(exact), 0, difference(exported, exact), ""
    classes = _has_classes(exact, y)
    sides: list[np.ndarray] = []  # float32, the export, one answer for all
    if classes:
        middle = 0.0 if _are_logits(exact) else 0.5
        before, after = (classes_of(x, middle) for x in (exact, exported))
        flipped = int((before != after).sum())
        if y is not None:
            is_one_hot = y.shape == exact.shape and exact.shape[-1] > 1
            ids = (y.argmax(axis=-1) if is_one_hot else y).reshape(before.shape)
            values, counts = np.unique(ids, return_counts=True)
            answers = (before, after, values[counts.argmax()])
            sides = [(ids == x).reshape(number, -1).mean(axis=1) for x in answers]
    elif y is not None and loss:
        compiled: Any = types.SimpleNamespace(loss=loss, name="the exported model")
        mean = np.broadcast_to(exact.mean(axis=0), exact.shape)
        try:
            score = scores.score_of(compiled, None, exact, y)
            sides = [scores.values_of(score, y, x) for x in (exact, exported, mean)]
        except ValueError as error:  # one figure for all examples, or none
            why = f"The loss of {name!r} cannot be compared: {first_line(error)}"
    what = "accuracy" if classes else "loss"
    if sides:
        gain = (sides[0] - sides[2]) * (1 if classes else -1)
        if np.isfinite(gain).all() and not statistics.interval(gain).low > 0:
            first, last = float(np.mean(sides[0])), float(np.mean(sides[2]))
            why = f"The labels of {name!r} tell nothing: on them float32's {what} is "
            why += f"{first:.4g}, not shown to be better than the {last:.4g} of one "
            why += "answer for all. Look at their order, or pass more of all classes."
    # Without labels nobody knows what a difference beyond the tolerance costs, so it
    # counts as worse from `_BROKEN` on only. Predictions that flip bound what is lost.
    is_told = bool(sides) and not why
    if not is_told and not classes:  # one figure of all examples: nothing is counted
        what, low = "difference over spread", off if off > _BROKEN else 0.0
        figures = (math.nan, math.nan, off, low, off, tolerance)
        return MetricChange(what, name, *figures, number, difference=off), why
    if not is_told:
        what = "agreement with float32"
        same = (before == after).reshape(number, -1).mean(axis=1)
        sides = [np.ones(number), same]
    found = _change(what, name, sides[0], sides[1], classes, tolerance)
    if not is_told:
        low = found.low if found.low > _BROKEN else min(found.low, tolerance)
        found = dataclasses.replace(found, low=low, reference=math.nan)
    return dataclasses.replace(found, difference=off, flipped=flipped), why


def _change(
    name: str,
    output: str,
    exact: np.ndarray,
    exported: np.ndarray,
    is_rate: bool,
    tolerance: float,
) -> MetricChange:
    """Returns a metric's worsening with its bounds, from its values on each example.

    Those of a rate are the bounds of fractions: what was not seen may be there.
    """
    number, needed = len(exact), None
    means = float(np.mean(exact)), float(np.mean(exported))
    worsening = low = bound = math.inf
    if is_rate:
        worse = exact - exported
        worsening, bound = float(np.mean(worse)), statistics.change_limit(worse)
        low = -statistics.change_limit(-worse)
        if worsening < tolerance < bound:
            changed = worse[worse != 0]  # if all that are added are answered alike

            def shows(many: int) -> bool:
                alike = np.append(changed, np.zeros(many - len(changed)))
                return statistics.change_limit(alike) <= tolerance

            counts = range(number, _MOST_EXAMPLES)
            needed = number + bisect.bisect_left(counts, True, key=shows)
    elif np.isfinite(exported).all():
        between = statistics.interval((exported - exact) / max(abs(means[0]), 1e-12))
        worsening, low, bound = between.estimate, between.low, between.high
    figures = (*means, worsening, low, bound, tolerance)
    return MetricChange(name, output, *figures, number, needed)


def classes_of(outputs: np.ndarray, middle: float = 0.5) -> np.ndarray:
    """Returns the class that each answer names; of one class by its probability."""
    if outputs.shape[-1] > 1:
        return outputs.argmax(axis=-1)
    return (outputs[..., 0] > middle).astype(np.int64)


def _has_classes(outputs: np.ndarray, y: np.ndarray | None) -> bool:
    """States whether an output stands for classes, by labels or as probabilities."""
    if outputs.dtype.kind != "f" or outputs.ndim < 2:
        return False
    number, is_inside = outputs.shape[-1], not _are_logits(outputs)
    if y is None:
        return number > 1 and is_inside and np.allclose(outputs.sum(-1), 1, atol=1e-3)
    if y.dtype.kind not in "iub" and not (y == np.round(y)).all():
        return False
    if number == 1:
        return bool(np.isin(y, (0, 1)).all())
    is_one_hot = y.shape == outputs.shape and bool((y.sum(-1) == 1).all())
    return is_one_hot or (y.size * number == outputs.size and y.max(initial=0) < number)


def _are_logits(outputs: np.ndarray) -> bool:
    return bool((outputs < 0).any() or (outputs > 1).any())


def difference(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns how far numbers are off, as a root mean square over that of their spread.

    Of texts it is the part that differs; inf where the two are finite in other places.
    """
    if exact.dtype.kind not in "fiub":
        return float(np.mean(low.astype(str) != exact.astype(str))) if low.size else 0.0
    held = np.isfinite(exact)
    if (held != np.isfinite(low)).any():
        return math.inf
    low, exact = (np.where(held, x, 0.0).astype(np.float64) for x in (low, exact))
    around = exact - exact.mean(axis=0)
    error, spread, size = (
        math.sqrt(np.square(x).mean()) if x.size else 0.0
        for x in (low - exact, around, exact)
    )
    if len(exact) == 1 or spread <= _CONSTANT * size:
        spread = size
    return error / spread if spread else (math.inf if error else 0.0)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns batches as one array; sequences of several lengths lie flat."""
    if len({part.shape[1:] for part in parts}) > 1:
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return np.concatenate(parts)
