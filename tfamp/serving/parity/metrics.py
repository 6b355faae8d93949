"""The metrics of two models' answers, with labels or without, and what they show.

Each example counts as its own control: both models answered it, so only examples on
which they differ tell anything.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.serving.parity import answers
from tfamp.serving.parity.result import MetricChange, OutputDifference
from tfamp.trials import statistics
from tfamp.trials.statistics import ERROR_RATE
from tfamp.tuning import scores
from tfamp.tuning.scores import Score

# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
_BROKEN = 0.1
# Nobody labels more examples than this to settle half a percent.
_MOST_EXAMPLES = 10**6


def compared(
    reference: Any,
    batches: Sequence[tuple[Any, Any]],
    exact: Sequence[answers.Outputs],
    exported: Sequence[answers.Outputs],
    metric: Any,
    tolerance: float,
) -> tuple[list[OutputDifference], list[MetricChange], list[str], list[str]]:
    """Returns differences and metrics of each output, and what could not be taken.

    The last are sentences on labels that tell nothing, since float32 is no better on
    them than one answer for all examples: their outputs are compared alone.
    """
    whole, low = answers.joined(exact), answers.joined(exported)
    for name, values in whole.items():
        if values.shape != low[name].shape:
            raise ValueError(
                f"Output {name!r} has shape {values.shape} in float32 and "
                f"{low[name].shape} in the exported model; expected the same. Compare "
                "it with the model that it was exported from."
            )
    labels = _labels([y for _, y in batches], list(whole))
    notes = [] if any(labels.values()) else ["No labels: only outputs are compared."]
    differences, metrics, untold = [], [], []
    for name, values in whole.items():
        ys = labels[name]
        y = answers.in_one(ys) if ys else None
        loss = _loss_of(reference, name, list(whole))
        classes = answers.has_classes(loss, values, y)
        found = answers.difference(name, low[name], values, classes=classes)
        differences.append(found)
        compiled = types.SimpleNamespace(loss=loss, name=reference.name)
        score = _score(compiled, metric, classes, values, exact[0][name], ys)
        if score is None or ys is None:
            metrics.append(_of_outputs(found, low[name], values, tolerance))
            continue
        of_each = [
            [scores.values_of(score, y, b[name]) for y, b in zip(ys, side, strict=True)]
            for side in (exact, exported)
        ]
        before, after = map(np.concatenate, of_each)
        why = at_chance(score, name, ys, [batch[name] for batch in exact], before)
        if why:
            untold.append(why)
            metrics.append(_of_outputs(found, low[name], values, tolerance))
            continue
        metrics.append(change(score, name, before, after, tolerance))
    return differences, metrics, notes, untold


def at_chance(
    score: Score,
    output: str,
    ys: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    values: np.ndarray,
) -> str:
    """Returns why labels tell nothing about a model, "" where they do.

    They don't where the model's answers are not shown to be better than one answer
    for all examples: the most frequent class, or the mean of what the model gives.
    Labels in another order than the examples or than the outputs do that, and so does
    a metric that a rare class hardly moves. Any export is "as good" by them.

    Args:
        score: What labels are scored by.
        output: The name of the output.
        ys: Labels by batch.
        outputs: What the float32 model gave, by batch.
        values: The score of each example.
    """
    if score.more_is_better is None or len({each.shape[1:] for each in outputs}) > 1:
        return ""
    same = np.concatenate(outputs).mean(axis=0)
    if score.name == "accuracy":
        number = same.shape[-1]
        pairs = zip(ys, outputs, strict=True)
        ids = np.concatenate([class_ids(y, each.shape).ravel() for y, each in pairs])
        classes, counts = np.unique(ids, return_counts=True)
        most = int(classes[counts.argmax()])
        one = np.where(np.arange(number) == most, 1.0, -1.0)
        same = np.broadcast_to(one if number > 1 else 2.0 * most - 1.0, same.shape)
    constant = [
        scores.values_of(score, y, np.broadcast_to(same, each.shape).astype("float32"))
        for y, each in zip(ys, outputs, strict=True)
    ]
    other = np.concatenate(constant)
    if not (np.isfinite(other).all() and np.isfinite(values).all()):
        return ""
    if mean_interval(score.worsening(other, values))[1] > 0:
        return ""
    return (
        f"The labels of {output!r} tell nothing: on them float32's {score.name} is "
        f"{np.mean(values):.4g}, not shown to be better than the {np.mean(other):.4g} "
        "of one answer for all examples. Look at their order and at that of the "
        "classes, train the model, or pass more examples, of all classes."
    )


def _loss_of(reference: Any, name: str, names: Sequence[str]) -> Any:
    """Returns the loss that a model was compiled with for an output; None without."""
    loss = getattr(reference, "loss", None)
    if isinstance(loss, dict):
        return loss.get(name)
    if isinstance(loss, (list, tuple)):
        return loss[names.index(name)] if len(loss) == len(names) else None
    return loss


def _score(
    compiled: Any,
    metric: Any,
    classes: bool,
    values: np.ndarray,
    first: np.ndarray,
    ys: Sequence[np.ndarray] | None,
) -> Score | None:
    """Returns what labels are scored by; None where only outputs can be compared."""
    if ys is None:
        return None
    if metric in (None, "accuracy", "acc") and classes:
        return accuracy(are_logits=answers.are_logits(values))
    if metric is None and not compiled.loss:
        return None
    return scores.score_of(compiled, metric, first, ys[0])


def _of_outputs(
    found: OutputDifference,
    exported: np.ndarray,
    exact: np.ndarray,
    tolerance: float,
) -> MetricChange:
    """Returns what outputs alone say: predictions that flip bound what is lost.

    Beyond the tolerance nobody knows what a difference costs, so it counts as worse
    from `_BROKEN` on only.
    """
    number = len(exact)
    if found.num_answers:
        logits = answers.are_logits(exact)
        of_each = [answers.classes_of(o, are_logits=logits) for o in (exact, exported)]
        same = (of_each[0] == of_each[1]).reshape(number, -1).mean(axis=1)
        score = Score("agreement with float32", np.equal, True, False)
        whole = change(score, found.name, np.ones(number), same, tolerance)
        low = whole.low if whole.low > _BROKEN else min(whole.low, tolerance)
        return dataclasses.replace(whole, low=low, reference=math.nan)
    # One figure of all examples: there is nothing to be counted.
    off = found.relative
    return MetricChange(
        name="difference over spread",
        output=found.name,
        reference=math.nan,
        exported=math.nan,
        worsening=off,
        low=off if off > _BROKEN else 0.0,
        bound=off,
        tolerance=tolerance,
        num_examples=number,
    )


def _labels(ys: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the labels of each output by batch, None where there are none."""
    none = dict.fromkeys(names)
    if any(y is None for y in ys):
        return none
    first = ys[0]
    if isinstance(first, dict):
        return none | {n: [y[n] for y in ys] for n in names if n in first}
    flat = [tf.nest.flatten(y) for y in ys]
    if len(flat[0]) != len(names):
        return none
    return {n: [each[i] for each in flat] for i, n in enumerate(names)}


def accuracy(*, are_logits: bool) -> Score:
    """Returns the score of classes: the share of right ones in each example."""

    def is_right(y: Any, outputs: Any) -> np.ndarray:
        outputs = np.asarray(outputs)
        found = answers.classes_of(outputs, are_logits=are_logits)
        y = class_ids(y, outputs.shape)
        return np.asarray(y.reshape(found.shape) == found)

    return Score("accuracy", is_right, True, False)


def class_ids(y: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns labels as numbers of classes; those of the outputs' shape are one-hot.

    Example:
        >>> class_ids([[0, 1], [1, 0]], (2, 2)).tolist(), class_ids([1], (1, 2))
        ([1, 0], array([1]))
    """
    y = np.asarray(y)
    is_one_hot = y.shape == tuple(shape) and shape[-1] > 1
    return y.argmax(axis=-1) if is_one_hot else y


def change(
    score: Score,
    output: str,
    exact: np.ndarray,
    exported: np.ndarray,
    tolerance: float,
) -> MetricChange:
    """Returns a metric's worsening with its bounds, from its values on each example."""
    with np.errstate(invalid="ignore"):
        worse = score.worsening(exported, exact)
    reference = float(np.mean(exact))
    if not np.isfinite(worse).all():
        inf = math.inf
        nan = float(np.mean(exported))
        return MetricChange(
            *(score.name, output, reference, nan, inf, inf, inf, tolerance, len(worse))
        )
    is_rate = not score.is_relative and bool(
        all(((v >= 0) & (v <= 1)).all() for v in (exact, exported))
    )
    low = lower_bound(worse, is_rate=is_rate)
    bound = upper_bound(worse, is_rate=is_rate)
    needed = None
    if bound > tolerance >= low:
        needed = examples_needed(worse, tolerance, is_rate=is_rate)
    means = float(np.mean(exported)), float(np.mean(worse))
    return MetricChange(
        *(score.name, output, reference, *means),
        *(low, bound, tolerance, len(worse), needed),
    )


def upper_bound(worsening: np.ndarray, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is below, but for a chance of 5 %.

    Args:
        worsening: Of each example, at least one.
        is_rate: Whether each is a difference of two numbers in [0, 1], as those of an
            accuracy are: then what was not seen may be there all the same. Where
            examples are lost, kept or won, it is the limit of the difference of their
            fractions (`tfamp.trials.statistics.change_limit`).

    Example:
        >>> round(upper_bound(np.zeros(360), is_rate=True), 4)
        0.0083
        >>> won_and_lost = np.array([1.0] * 4 + [-1.0] * 4 + [0.0] * 992)
        >>> 0 < upper_bound(won_and_lost, is_rate=True) < 0.008
        True
    """
    if is_rate:
        return statistics.change_limit(worsening)
    return mean_interval(worsening)[2]


def lower_bound(worsening: np.ndarray, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is above, but for a chance of 5 %."""
    if is_rate:
        return -statistics.change_limit(-worsening)
    return mean_interval(worsening)[1]


def examples_needed(
    worsening: np.ndarray, tolerance: float, *, is_rate: bool
) -> int | None:
    """Returns how many examples would show a metric to be within a tolerance.

    Those that are added count as answered alike where examples are lost or won, and as
    scattered as those that are there otherwise.

    Returns:
        A number above `len(worsening)`; None where what was seen is beyond the
        tolerance, so that more would show the opposite.

    Example:
        >>> one_lost = np.eye(1, 360)[0]
        >>> [examples_needed(each, 0.005, is_rate=True) for each
        ...  in (np.zeros(360), one_lost)]
        [598, 947]
        >>> examples_needed(np.ones(360), 0.005, is_rate=True) is None
        True
    """
    mean = float(np.mean(worsening))
    if mean > tolerance or not math.isfinite(mean):
        return None
    if not is_rate:
        spread = float(np.std(worsening, ddof=1)) if len(worsening) > 1 else math.inf
        room = tolerance - mean
        if not (room > 0 and math.isfinite(spread)):
            return None
        return max(
            len(worsening) + 1,
            math.ceil(
                (statistics.student_quantile(ERROR_RATE, 1000) * spread / room) ** 2
            ),
        )

    def shows(number: int) -> bool:
        alike = np.zeros(number - len(worsening))
        joined = np.concatenate([worsening, alike])
        return upper_bound(joined, is_rate=True) <= tolerance

    return _first(shows, len(worsening))


def _first(holds: Callable[[int], bool], low: int) -> int | None:
    """Returns the first number above `low` from which on something holds."""
    high = 2 * low
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST_EXAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def mean_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Returns the mean of values and its t-interval, without end where one is known."""
    found = statistics.interval(values)
    return found.estimate, found.low, found.high
