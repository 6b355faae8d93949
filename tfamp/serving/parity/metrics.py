"""The metrics of two models' answers, with labels or without."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.serving.parity import answers
from tfamp.serving.parity.result import MetricChange, OutputDifference
from tfamp.tuning import scores
from tfamp.tuning.scores import Score

# Without labels an export is called worse from this part of the answers that flip, or
# of the outputs' spread: below it only a metric could tell.
BROKEN = 0.1


def compared(
    reference: Any,
    batches: Sequence[tuple[Any, Any]],
    exact: Sequence[answers.Outputs],
    exported: Sequence[answers.Outputs],
    metric: Any,
    tolerance: float,
) -> tuple[list[OutputDifference], list[MetricChange], list[str]]:
    """Returns differences and metrics of each output, and what could not be taken."""
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
    differences, metrics = [], []
    for name, values in whole.items():
        ys = labels[name]
        y = np.concatenate(_flat(ys)) if ys else None
        classes = answers.has_classes(reference, values, y)
        found = answers.difference(name, low[name], values, classes=classes)
        differences.append(found)
        score = _score(reference, metric, classes, values, exact[0][name], ys)
        if score is None or ys is None:
            metrics.append(_of_outputs(found, low[name], values, tolerance))
            continue
        before, after = (
            np.concatenate(
                [
                    scores.values_of(score, y, batch[name])
                    for y, batch in zip(ys, side, strict=True)
                ]
            )
            for side in (exact, exported)
        )
        metrics.append(answers.change(score, name, before, after, tolerance))
    return differences, metrics, notes


def _score(
    reference: Any,
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
        return answers.accuracy(are_logits=answers.are_logits(values))
    if metric is None and not getattr(reference, "loss", None):
        return None
    return scores.score_of(reference, metric, first, ys[0])


def _of_outputs(
    found: OutputDifference,
    exported: np.ndarray,
    exact: np.ndarray,
    tolerance: float,
) -> MetricChange:
    """Returns what outputs alone say: predictions that flip bound what is lost.

    Beyond the tolerance nobody knows what a difference costs, so it counts as worse
    from `BROKEN` on only.
    """
    number = len(exact)
    if found.num_answers:
        logits = answers.are_logits(exact)
        of_each = [answers.classes_of(o, are_logits=logits) for o in (exact, exported)]
        same = (of_each[0] == of_each[1]).reshape(number, -1).mean(axis=1)
        score = Score("agreement with float32", np.equal, True, False)
        change = answers.change(score, found.name, np.ones(number), same, tolerance)
        low = change.low if change.low > BROKEN else min(change.low, tolerance)
        return dataclasses.replace(change, low=low, reference=math.nan)
    # One figure of all examples: there is nothing to be counted.
    off = found.relative
    return MetricChange(
        name="difference over spread",
        output=found.name,
        reference=math.nan,
        exported=math.nan,
        worsening=off,
        low=off if off > BROKEN else 0.0,
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


def _flat(ys: Sequence[np.ndarray]) -> list[np.ndarray]:
    if len({y.shape[1:] for y in ys}) > 1:
        return [y.reshape(-1, *y.shape[2:]) for y in ys]
    return list(ys)
