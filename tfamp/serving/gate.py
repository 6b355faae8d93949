"""The gate: whether an exported model answers as the float32 one it came from.

Both answer the same examples, so each example is its own control: only those on which
the two differ tell anything.
"""

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import structure
from tfamp.numerics.sensitivity.errors import forward_error
from tfamp.serving.parity import (
    MetricChange,
    OutputDifference,
    Parity,
    Verdict,
)
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.stepping.arguments import dataset_of
from tfamp.trials import statistics
from tfamp.tuning import scores
from tfamp.tuning.scores import Score

BATCH = 32
Outputs = dict[str, np.ndarray]
# How far a row of probabilities may be off a sum of 1.
_SUM_IS_OFF = 1e-3
# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
_BROKEN = 0.1
# Nobody labels more examples than this to settle half a percent.
_MOST_EXAMPLES = 10**6


class Reference(NamedTuple):
    """A float32 model, validation examples by batch, and what it answers to them."""

    model: keras.Model
    batches: list[tuple[Any, Any]]
    outputs: list[Outputs]


def reference_of(
    model: keras.Model,
    validation: Any,
    names: Sequence[str],
    batch_size: int | None = None,
) -> Reference:
    """Returns what a float32 model answers, read and predicted once."""
    dataset = dataset_of(
        validation, batch_size or BATCH, needs_targets=False, name="validation"
    )
    batches = []
    for batch in dataset:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        x, y = (each if each is None else _arrays(each) for each in (x, y))
        batches.append((x, y))
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

    Args:
        reference: What float32 answers.
        candidate: The exported model.
        metric: Name of a Keras metric, a loss, or a function of targets and outputs
            that returns a value for each example. None takes the accuracy where labels
            are classes, else the loss that the model was compiled with.
        tolerance: By how much the metric may be worse: in its own points for a rate
            such as an accuracy (0.005 is half a percent), as a part of float32's mean
            for a loss.

    Raises:
        ValueError: The outputs of the two are others.
    """
    model, batches, exact = reference
    names = list(exact[0])
    exported = [_named(candidate.predict(x), names) for x, _ in batches]
    labels = _labels([y for _, y in batches], names)
    differences, metrics, untold = [], [], []
    for name in names:
        before, after = (_joined([b[name] for b in side]) for side in (exact, exported))
        if before.shape != after.shape:
            raise ValueError(
                f"Output {name!r} has shape {before.shape} in float32 and "
                f"{after.shape} in the exported model; expected the same. Compare "
                "it with the model that it was exported from."
            )
        ys = labels[name]
        loss = _loss_of(model, name, names)
        classes = has_classes(loss, before, None if ys is None else _joined(ys))
        found = _difference(name, after, before, classes=classes)
        differences.append(found)
        change = None
        if ys is not None:
            outputs = [[b[name] for b in side] for side in (exact, exported)]
            compiled = types.SimpleNamespace(loss=loss, name=model.name)
            score = _score(compiled, metric, classes, before, outputs[0][0], ys[0])
            if score is not None:
                of_each = [_values(score, ys, side) for side in outputs]
                why = at_chance(score, name, ys, outputs[0], of_each[0])
                if why:
                    untold.append(why)
                else:
                    exact_ones, others = of_each
                    change = change_of(score, name, exact_ones, others, tolerance)
        metrics.append(change or _of_outputs(found, after, before, tolerance))
    verdict, reason = judged(differences, metrics, untold=untold)
    return Parity(
        *(verdict, reason, candidate.runtime),
        num_examples=sum(len(tf.nest.flatten(x)[0]) for x, _ in batches),
        outputs=tuple(differences),
        metrics=tuple(metrics),
        size_bytes=size_of(candidate.path),
        reference_bytes=int(structure.bytes_of(model.weights)),
        notes=()
        if any(y is not None for y in labels.values())
        else ("No labels: only outputs are compared.",),
    )


def judged(
    differences: Sequence[OutputDifference],
    metrics: Sequence[MetricChange],
    *,
    untold: Sequence[str] = (),
) -> tuple[Verdict, str]:
    """Returns the verdict of all outputs together, and why in a sentence.

    `untold` says of which outputs labels tell nothing, and why: by them nothing is "as
    good", and only outputs that are far off show it to be "worse".
    """
    broken = [d.name for d in differences if not np.isfinite(d.relative)]
    if broken:
        return "worse", (
            f"Outputs {tuple(broken)!r} hold numbers that are not finite, which are so "
            "in float32, or that differ where float32's are all alike."
        )
    for found in metrics:
        if found.fails:
            return "worse", (
                f"The {found.name} of {found.output!r} is worse by "
                f"{found.worsening:.3%}, and by more than {found.low:.3%} with "
                f"certainty; allowed are {found.tolerance:.3%}."
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


def size_of(path: Path | None) -> int | None:
    """Returns the bytes of a file or of all files in a folder; None without any."""
    if path is None or not path.exists():
        return None
    files = [path] if path.is_file() else path.rglob("*")
    return sum(each.stat().st_size for each in files if each.is_file())


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
    for all examples: the most frequent class, or the mean of what the model gives.
    Labels in another order than the examples or than the outputs do that, and so does
    a metric that a rare class hardly moves. Any export is "as good" by them.
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
    inf = math.inf
    means = float(np.mean(exact)), float(np.mean(exported))
    found = MetricChange(
        score.name, output, *means, inf, inf, inf, tolerance, len(worse)
    )
    if not np.isfinite(worse).all():
        return found
    both = np.concatenate([exact, exported])
    is_rate = not score.is_relative and 0 <= both.min() and both.max() <= 1
    if is_rate:
        low, bound = -statistics.change_limit(-worse), statistics.change_limit(worse)
    else:
        between = statistics.interval(worse)
        low, bound = between.low, between.high
    needed = None
    if low <= tolerance < bound:
        needed = _examples_needed(worse, tolerance, is_rate=is_rate)
    mean = float(np.mean(worse))
    return dataclasses.replace(
        found, worsening=mean, low=low, bound=bound, num_needed=needed
    )


def _examples_needed(
    worse: np.ndarray, tolerance: float, *, is_rate: bool
) -> int | None:
    """Returns how many examples would show a metric to be within a tolerance.

    Those that are added count as answered alike where examples are lost or won, and as
    scattered as those that are there otherwise. None where what was seen is beyond the
    tolerance, so that more would show the opposite.
    """
    number, room = len(worse), tolerance - float(np.mean(worse))
    if room < 0 or (not is_rate and (room == 0 or number < 2)):
        return None
    if not is_rate:
        reach = statistics.student_quantile(statistics.ERROR_RATE, 1000)
        spread = float(np.std(worse, ddof=1))
        return max(number + 1, math.ceil((reach * spread / room) ** 2))

    def shows(many: int) -> bool:
        alike = np.zeros(many - number)
        return statistics.change_limit(np.concatenate([worse, alike])) <= tolerance

    low, high = number, 2 * number
    while not shows(high):
        low, high = high, 2 * high
        if high > _MOST_EXAMPLES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if shows(middle) else (middle, high)
    return high


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
    number, nan, off = len(exact), math.nan, found.relative
    if not found.num_answers:  # one figure of all examples: nothing is counted
        low = off if off > _BROKEN else 0.0
        name = "difference over spread"
        return MetricChange(
            name, found.name, nan, nan, off, low, off, tolerance, number
        )
    logits = _are_logits(exact)
    of_each = [classes_of(each, are_logits=logits) for each in (exact, exported)]
    same = (of_each[0] == of_each[1]).reshape(number, -1).mean(axis=1)
    score = Score("agreement with float32", np.equal, True, False)
    whole = change_of(score, found.name, np.ones(number), same, tolerance)
    low = whole.low if whole.low > _BROKEN else min(whole.low, tolerance)
    return dataclasses.replace(whole, low=low, reference=nan)


def _difference(
    name: str, exported: np.ndarray, exact: np.ndarray, *, classes: bool
) -> OutputDifference:
    """Returns how far an output is from the reference's.

    Numbers that are not finite in float32 are left out.
    """
    num_answers = flipped = 0
    if classes:
        logits = _are_logits(exact)
        of_each = [classes_of(each, are_logits=logits) for each in (exported, exact)]
        num_answers, flipped = of_each[0].size, int((of_each[0] != of_each[1]).sum())
    if exact.dtype.kind not in "fiub":
        changed = float(np.mean(exported != exact)) if exact.size else 0.0
        return OutputDifference(name, float(changed > 0), changed, changed)
    low, high = exported.astype(np.float64), exact.astype(np.float64)
    relative = forward_error(low, high)
    off = np.abs(np.where(np.isfinite(high), low - high, 0.0))
    largest = mean = 0.0
    if off.size:
        largest, mean = float(off.max()), float(off.mean())
    if not math.isfinite(relative):
        largest = mean = math.inf
    if largest and not relative:  # where float32 gives 0 for all
        relative = math.inf
    return OutputDifference(name, largest, mean, relative, num_answers, flipped)


def _score(
    compiled: Any,
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
    if metric is None and not compiled.loss:
        return None
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
    return {n: _widened(np.asarray(v)) for n, v in zip(names, values, strict=True)}


def _arrays(values: Any) -> Any:
    return tf.nest.map_structure(np.asarray, values)


def _widened(values: np.ndarray) -> np.ndarray:
    is_half = values.dtype.itemsize < 4 and values.dtype.kind in "fV"
    return values.astype(np.float32) if is_half else values


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns batches as one array; sequences of several lengths lie flat."""
    if len({part.shape[1:] for part in parts}) > 1:
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return np.concatenate(parts)
