"""The gate: whether an exported model answers as the float32 one it came from.

Both answer the same examples, so each example is its own control: only those on which
the two differ tell anything.
"""

import bisect
import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.serving.parity import MetricChange, Parity, Verdict
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.trials import scores, statistics
from tfamp.trials.scores import Score

Outputs = dict[str, np.ndarray]
# How far a row of probabilities may be off a sum of 1.
_SUM_IS_OFF = 1e-3
# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
_BROKEN = 0.1
# Nobody labels more examples than this to settle half a percent.
_MOST_EXAMPLES = 10**6
# A mean that differs by less than this part of the magnitude is a constant.
_CONSTANT = 1e-6


class Reference(NamedTuple):
    """A float32 model, validation examples by batch, and what it answers to them."""

    model: keras.Model
    batches: list[tuple[Any, Any]]
    outputs: list[Outputs]


def reference_of(
    model: keras.Model, dataset: tf.data.Dataset, names: Sequence[str]
) -> Reference:
    """Returns what a float32 model answers, read and predicted once."""
    batches = []
    for batch in dataset:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        x, y = (x, y) if y is None else tf.nest.map_structure(np.asarray, (x, y))
        batches.append((tf.nest.map_structure(np.asarray, x), y))
    if not batches:
        raise ValueError(
            "`validation` holds no batches; expected at least one. Look at its source: "
            "a wrong path, split or filter leaves nothing."
        )
    inputs = [(tf.nest.map_structure(tf.constant, x),) for x, _ in batches]
    answers = scores.predict(model, inputs)
    return Reference(model, batches, [_named(each, names) for each in answers])


def check_parity(
    reference: Reference,
    candidate: LoadedModel,
    *,
    metric: Any = None,
    tolerance: float = 0.005,
) -> Parity:
    """Compares an exported model with the float32 one it came from, but for speed.

    Arguments are as for `tfamp.export`; the tolerance is in points of a rate such as an
    accuracy (0.005 is half a percent), and a part of float32's mean for a loss.
    """
    model, batches, exact = reference
    names = list(exact[0])
    exported = [_named(candidate.predict(x), names) for x, _ in batches]
    labels = _labels([y for _, y in batches], names)
    metrics, untold = [], []
    for name in names:
        sides = [[batch[name] for batch in side] for side in (exact, exported)]
        before, after = map(_joined, sides)
        if before.shape != after.shape:
            raise ValueError(
                f"Output {name!r} has shape {before.shape} in float32 and "
                f"{after.shape} in the exported model; expected the same. Compare "
                "it with the model that it was exported from."
            )
        ys = labels[name]
        loss = _loss_of(model, name, names)
        classes = has_classes(loss, before, None if ys is None else _joined(ys))
        found = _of_outputs(name, before, after, classes, tolerance)
        score = ys and _score(model, loss, metric, classes, before, sides[0][0], ys[0])
        if score:
            values = [_values(score, ys, side) for side in sides]
            if why := at_chance(score, name, ys, sides[0], values[0]):
                untold.append(why)
            else:
                change = change_of(score, name, values[0], values[1], tolerance)
                found = dataclasses.replace(
                    change, difference=found.difference, flipped=found.flipped
                )
        metrics.append(found)
    verdict, reason = judged(metrics, untold=untold)
    is_labelled = any(y is not None for y in labels.values())
    return Parity(
        *(verdict, reason, candidate.runtime),
        num_examples=sum(len(tf.nest.flatten(x)[0]) for x, _ in batches),
        metrics=tuple(metrics),
        notes=() if is_labelled else ("No labels: only outputs are compared.",),
    )


def judged(
    metrics: Sequence[MetricChange], *, untold: Sequence[str] = ()
) -> tuple[Verdict, str]:
    """Returns the verdict of all outputs together, and why in a sentence.

    `untold` says of which outputs labels tell nothing, and why: by them nothing is "as
    good", and only outputs that are far off show it to be "worse".
    """
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
    advice = "Pass labels, a metric, or another tolerance."
    if found.num_needed is not None:
        advice = f"It needs {found.num_needed} examples, if the others are alike."
    return "undecided", (
        f"The {found.name} of {found.output!r} is worse by {found.worsening:.3%}, at "
        f"most {found.bound:.3%} on {found.num_examples} examples; allowed are "
        f"{found.tolerance:.3%}. {advice}"
    )


def has_classes(loss: Any, outputs: np.ndarray, y: Any) -> bool:
    """States whether the numbers of a float32 model's output stand for classes.

    Labels say it where there are any, else the loss that the model was compiled with
    for this output, else whether the numbers are probabilities.
    """
    if outputs.dtype.kind != "f" or outputs.ndim < 2:
        return False
    number = outputs.shape[-1]
    if y is not None:
        is_whole = y.dtype.kind in "iub" or bool((y == np.round(y)).all())
        if number == 1:
            return is_whole and bool(np.isin(y, (0, 1)).all())
        is_one_hot = y.shape == outputs.shape and bool((y.sum(-1) == 1).all())
        is_id = y.size * number == outputs.size and bool(y.max(initial=0) < number)
        return is_whole and (is_one_hot or is_id)
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    if "crossentropy" in str(name or getattr(loss, "__name__", "")):
        return True
    inside = number > 1 and bool((outputs >= 0).all() and (outputs <= 1).all())
    return inside and bool(np.abs(outputs.sum(-1) - 1).max() <= _SUM_IS_OFF)


def classes_of(outputs: np.ndarray, *, are_logits: bool = False) -> np.ndarray:
    """Returns the class that each answer names; of one class by its probability.

    Example:
        >>> classes_of(np.array([[0.2, 0.8], [0.9, 0.1]])).tolist()
        [1, 0]
    """
    if outputs.shape[-1] > 1:
        return outputs.argmax(axis=-1)
    return (outputs[..., 0] > (0.0 if are_logits else 0.5)).astype(np.int64)


def at_chance(
    score: Score,
    output: str,
    ys: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    values: np.ndarray,
) -> str:
    """Returns why labels tell nothing about a model, "" where they do.

    They don't where the model's answers are not shown to be better than one answer
    for all examples, the most frequent class or the mean of what the model gives, as
    where labels are in another order. Any export is "as good" by them.
    """
    if score.more_is_better is None or len({each.shape[1:] for each in outputs}) > 1:
        return ""
    same = np.concatenate(outputs).mean(axis=0)
    if score.name == "accuracy":
        number = same.shape[-1]
        pairs = zip(ys, outputs, strict=True)
        ids = np.concatenate([_class_ids(y, each.shape).ravel() for y, each in pairs])
        classes, counts = np.unique(ids, return_counts=True)
        most = int(classes[counts.argmax()])
        one = np.where(np.arange(number) == most, 1.0, -1.0)
        same = np.broadcast_to(one if number > 1 else 2.0 * most - 1.0, same.shape)
    alike = [np.broadcast_to(same, each.shape).astype("float32") for each in outputs]
    other = _values(score, ys, alike)
    if not (np.isfinite(other).all() and np.isfinite(values).all()):
        return ""
    if statistics.interval(score.worsening(other, values)).low > 0:
        return ""
    return (
        f"The labels of {output!r} tell nothing: on them float32's {score.name} is "
        f"{np.mean(values):.4g}, not shown to be better than the {np.mean(other):.4g} "
        "of one answer for all examples. Look at their order and at that of the "
        "classes, train the model, or pass more examples, of all classes."
    )


def change_of(
    score: Score,
    output: str,
    exact: np.ndarray,
    exported: np.ndarray,
    tolerance: float,
) -> MetricChange:
    """Returns a metric's worsening with its bounds, from its values on each example.

    Where each is a difference of two numbers in [0, 1], as those of an accuracy are,
    what was not seen may be there all the same: the bounds are those of fractions.
    """
    with np.errstate(invalid="ignore"):
        worse = score.worsening(exported, exact)
    number, inf = len(worse), math.inf
    means = float(np.mean(exact)), float(np.mean(exported))
    found = MetricChange(score.name, output, *means, inf, inf, inf, tolerance, number)
    if not np.isfinite(worse).all():
        return found
    both = np.concatenate([exact, exported])
    mean, needed = float(np.mean(worse)), None
    if not score.is_relative and 0 <= both.min() and both.max() <= 1:
        low, bound = -statistics.change_limit(-worse), statistics.change_limit(worse)
        if mean < tolerance < bound:
            # If all that are added are answered alike.
            changed = worse[worse != 0]

            def shows(many: int) -> bool:
                alike = np.zeros(many - len(changed))
                limit = statistics.change_limit(np.concatenate([changed, alike]))
                return limit <= tolerance

            counts = range(number, _MOST_EXAMPLES)
            needed = number + bisect.bisect_left(counts, True, key=shows)
            needed = needed if needed < _MOST_EXAMPLES else None
    else:
        between = statistics.interval(worse)
        low, bound = between.low, between.high
        if mean < tolerance < bound < math.inf:
            # The interval shrinks with the root of the number.
            reach = (bound - mean) / (tolerance - mean)
            needed = math.ceil(number * reach**2)
    return dataclasses.replace(
        found, worsening=mean, low=low, bound=bound, num_needed=needed
    )


def _of_outputs(
    name: str, exact: np.ndarray, exported: np.ndarray, classes: bool, tolerance: float
) -> MetricChange:
    """Returns what outputs alone say: predictions that flip bound what is lost.

    Beyond the tolerance nobody knows what a difference costs, so it counts as worse
    from `_BROKEN` on only.
    """
    number, nan = len(exact), math.nan
    if exact.dtype.kind in "fiub":
        off = relative_error(exported.astype(np.float64), exact.astype(np.float64))
    else:
        off = float(np.mean(exported != exact)) if exact.size else 0.0
    if not classes:  # one figure of all examples: nothing is counted
        low, what = (off if off > _BROKEN else 0.0), "difference over spread"
        figures = (nan, nan, off, low, off, tolerance, number)
        return MetricChange(what, name, *figures, difference=off)
    logits = _are_logits(exact)
    before, after = (classes_of(x, are_logits=logits) for x in (exact, exported))
    same = (before == after).reshape(number, -1).mean(axis=1)
    score = Score("agreement with float32", np.equal, True, False)
    whole = change_of(score, name, np.ones(number), same, tolerance)
    low = whole.low if whole.low > _BROKEN else min(whole.low, tolerance)
    flipped = int((before != after).sum())
    return dataclasses.replace(
        whole, low=low, reference=nan, difference=off, flipped=flipped
    )


def relative_error(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns the error of numbers, relative to their spread over the batch.

    It is a root mean square. inf where a number is not finite that is so in `exact`, or
    where one differs and all of those are 0.

    Example:
        >>> exact = np.array([[999.0], [1001.0]])
        >>> relative_error(exact + 0.5, exact), relative_error(exact * np.inf, exact)
        (0.5, inf)
    """
    held = np.isfinite(exact)
    if not np.isfinite(low[held]).all():
        return math.inf
    exact = np.where(held, exact, 0.0)
    error = _rms(np.where(held, low, 0.0) - exact)
    magnitude = _rms(exact)
    spread = _rms(exact - exact.mean(axis=0)) if len(exact) > 1 else 0.0
    if spread <= _CONSTANT * magnitude:
        spread = magnitude
    return error / spread if spread else (math.inf if error else 0.0)


def largest_difference(wanted: Outputs, found: Outputs) -> float:
    """Returns an output's largest difference over its spread, inf if not finite.

    Example:
        >>> largest_difference({"y": np.array([0.0, 2.0])}, {"y": np.array([0.0, 1.9])})
        0.1
    """
    largest = 0.0
    for name, exact in wanted.items():
        other = np.asarray(found[name])
        if exact.dtype.kind not in "fiub":
            same = np.array_equal(exact.astype(str), other.astype(str))
            largest = max(largest, 0.0 if same else math.inf)
            continue
        exact, other = exact.astype(np.float64), other.astype(np.float64)
        held = np.isfinite(exact)
        if exact.shape != other.shape or (held != np.isfinite(other)).any():
            return math.inf
        if held.any():
            spread = exact[held].std() or abs(exact[held]).max() or 1.0
            largest = max(largest, float(abs(exact - other)[held].max() / spread))
    return round(largest, 12)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0


def _score(
    model: keras.Model,
    loss: Any,
    metric: Any,
    classes: bool,
    values: np.ndarray,
    first: np.ndarray,
    y: np.ndarray,
) -> Score | None:
    """Returns what labels are scored by; None where only outputs can be compared."""
    if metric in (None, "accuracy", "acc") and classes:
        logits = _are_logits(values)

        def is_right(y: Any, outputs: Any) -> np.ndarray:
            outputs = np.asarray(outputs)
            found = classes_of(outputs, are_logits=logits)
            ids = _class_ids(np.asarray(y), outputs.shape)
            return np.asarray(ids.reshape(found.shape) == found)

        return Score("accuracy", is_right, True, False)
    if metric is None and not loss:
        return None
    compiled: Any = types.SimpleNamespace(loss=loss, name=model.name)
    return scores.score_of(compiled, metric, first, y)


def _values(score: Score, ys: Sequence[Any], outputs: Sequence[Any]) -> np.ndarray:
    pairs = zip(ys, outputs, strict=True)
    return np.concatenate([scores.values_of(score, y, each) for y, each in pairs])


def _loss_of(model: keras.Model, name: str, names: Sequence[str]) -> Any:
    """Returns the loss that a model was compiled with for an output; None without."""
    loss = getattr(model, "loss", None)
    if isinstance(loss, dict):
        return loss.get(name)
    if isinstance(loss, (list, tuple)):
        return loss[names.index(name)] if len(loss) == len(names) else None
    return loss


def _labels(ys: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the labels of each output by batch, None where there are none."""
    none = dict.fromkeys(names)
    if any(y is None for y in ys):
        return none
    if isinstance(ys[0], dict):
        return none | {n: [y[n] for y in ys] for n in names if n in ys[0]}
    flat = [tf.nest.flatten(y) for y in ys]
    if len(flat[0]) != len(names):
        return none
    return {n: [each[i] for each in flat] for i, n in enumerate(names)}


def _class_ids(y: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Returns labels as numbers of classes; those of the outputs' shape are one-hot."""
    is_one_hot = y.shape == tuple(shape) and shape[-1] > 1
    return y.argmax(axis=-1) if is_one_hot else y


def _are_logits(outputs: np.ndarray) -> bool:
    """States whether numbers cannot be probabilities."""
    return bool((outputs < 0).any() or (outputs > 1).any())


def _named(answer: Any, names: Sequence[str]) -> Outputs:
    """Returns what a model answered by names of outputs, in float32 or integers."""
    if isinstance(answer, Mapping) and {*answer} == {*names}:
        values = [answer[name] for name in names]
    else:
        values = tf.nest.flatten(answer)
    if len(values) != len(names):
        raise ValueError(
            f"The exported model has {len(names)} outputs, {tuple(names)!r}, and "
            f"{len(values)} were answered. Compare it with the model that it was "
            "exported from."
        )
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
