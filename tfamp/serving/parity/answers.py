"""What two models answer on validation data, and how far that is apart."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.serving.parity.result import OutputDifference
from tfamp.serving.runtimes.signature import LoadedModel
from tfamp.tuning import scores

Outputs = dict[str, np.ndarray]
# How far a row of probabilities may be off a sum of 1.
_SUM_IS_OFF = 1e-3


def batches_of(dataset: Any) -> list[tuple[Any, Any]]:
    """Returns inputs and targets of each batch as arrays; None where it has none."""
    found = []
    for batch in dataset:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        found.append((_arrays(x), None if y is None else _arrays(y)))
    return found


def outputs_of(
    model: keras.Model | LoadedModel,
    batches: Sequence[tuple[Any, Any]],
    names: Sequence[str],
) -> list[Outputs]:
    """Returns the outputs of a model by name, for each batch.

    The outputs of a dict have its keys as names, others `names` in their order.
    """
    if isinstance(model, LoadedModel):
        answers = [model.predict(x) for x, _ in batches]
    else:
        inputs = [(tf.nest.map_structure(tf.constant, x),) for x, _ in batches]
        answers = scores.predict(model, inputs)
    return [named(answer, names) for answer in answers]


def named(answer: Any, names: Sequence[str]) -> Outputs:
    """Returns what a model answered by names of outputs, in float32 or integers.

    Example:
        >>> named([np.zeros(2), np.ones(2)], ("a", "b"))["b"].tolist()
        [1.0, 1.0]

    Raises:
        ValueError: It gave another number of outputs.
    """
    if isinstance(answer, Mapping) and {*answer} == {*names}:
        values = [answer[name] for name in names]
    else:
        values = tf.nest.flatten(answer)
    if len(values) != len(names):
        raise ValueError(
            f"The float32 model has {len(values)} outputs, the exported one "
            f"{len(names)}: {tuple(names)!r}. Compare it with the model that it was "
            "exported from."
        )
    return {n: _widened(np.asarray(v)) for n, v in zip(names, values, strict=True)}


def joined(batches: Sequence[Outputs]) -> Outputs:
    """Returns the outputs of all batches, examples first."""
    return {n: in_one([batch[n] for batch in batches]) for n in batches[0]}


def in_one(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns batches as one array; sequences of several lengths lie flat."""
    if len({part.shape[1:] for part in parts}) > 1:
        parts = [part.reshape(-1, *part.shape[2:]) for part in parts]
    return np.concatenate(parts)


def has_classes(loss: Any, outputs: np.ndarray, y: Any) -> bool:
    """States whether the numbers of a float32 model's output stand for classes.

    Labels say it where there are any, else the loss that the model was compiled with
    for this output, else whether the numbers are probabilities.
    """
    if outputs.dtype.kind != "f" or outputs.ndim < 2:
        return False
    if y is not None:
        is_whole = y.dtype.kind in "iub" or bool((y == np.round(y)).all())
        if outputs.shape[-1] == 1:
            return is_whole and bool(np.isin(y, (0, 1)).all())
        is_one_hot = y.shape == outputs.shape and bool((y.sum(-1) == 1).all())
        is_id = y.size * outputs.shape[-1] == outputs.size
        is_id = is_id and bool(y.max(initial=0) < outputs.shape[-1])
        return is_whole and (is_one_hot or is_id)
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    if "crossentropy" in str(name or getattr(loss, "__name__", "")):
        return True
    inside = bool((outputs >= 0).all() and (outputs <= 1).all())
    if outputs.shape[-1] == 1:
        return False
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


def are_logits(outputs: np.ndarray) -> bool:
    """States whether numbers cannot be probabilities."""
    return bool((outputs < 0).any() or (outputs > 1).any())


def difference(
    name: str, exported: np.ndarray, exact: np.ndarray, *, classes: bool
) -> OutputDifference:
    """Returns how far an output is from the reference's.

    Numbers that are not finite in float32 are left out.

    Example:
        >>> found = difference("y", np.array([[1.5], [3.0]]), np.array([[1.0], [3.0]]),
        ...                    classes=False)
        >>> found.largest, found.mean, found.relative < 0.36
        (0.5, 0.25, True)
    """
    num_answers = flipped = 0
    if classes:
        logits = are_logits(exact)
        low_classes, high_classes = (
            classes_of(each, are_logits=logits) for each in (exported, exact)
        )
        num_answers = low_classes.size
        flipped = int((low_classes != high_classes).sum())
    if exact.dtype.kind not in "fiub":
        changed = float(np.mean(exported != exact)) if exact.size else 0.0
        return OutputDifference(name, float(changed > 0), changed, changed)
    low, high = exported.astype(np.float64), exact.astype(np.float64)
    usable = np.isfinite(high)
    if not np.isfinite(low[usable]).all():
        return OutputDifference(
            name, math.inf, math.inf, math.inf, num_answers, flipped
        )
    off = np.abs(np.where(usable, low - high, 0.0))
    spread = spread_of(high)
    size = float(np.sqrt(np.mean(off**2))) if off.size else 0.0
    relative = size / spread if spread else (math.inf if size else 0.0)
    largest, mean = (float(f(off)) if off.size else 0.0 for f in (np.max, np.mean))
    return OutputDifference(name, largest, mean, relative, num_answers, flipped)


def spread_of(values: np.ndarray) -> float:
    """Returns the root mean square around the mean over examples, finite ones only."""
    values = np.where(np.isfinite(values), values, 0.0)
    around = values - values.mean(axis=0) if len(values) > 1 else values
    spread = float(np.sqrt(np.mean(around**2))) if values.size else 0.0
    size = float(np.sqrt(np.mean(values**2))) if values.size else 0.0
    return spread if spread > 1e-6 * size else size


def _arrays(values: Any) -> Any:
    return tf.nest.map_structure(np.asarray, values)


def _widened(values: np.ndarray) -> np.ndarray:
    is_half = values.dtype.itemsize < 4 and values.dtype.kind in "fV"
    return values.astype(np.float32) if is_half else values
