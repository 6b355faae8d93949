"""A model's metric on each example, and whether a plan keeps it within a tolerance."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records.checks import first_line
from tfamp.trials.examples import of_each_example, of_rank
from tfamp.trials.statistics import difference_limit, student_quantile

_HIGHER = ("accuracy", "acc", "precision", "recall", "auc", "cosine", "iou", "f1")


@dataclasses.dataclass(frozen=True)
class Score:
    """What is compared, example by example."""

    name: str  # of the metric
    # Takes targets and outputs, returns one value for each example.
    function: Callable[[Any, Any], Any]
    # None where nobody said, so that any change is a worsening.
    more_is_better: bool | None
    is_relative: bool  # whether the tolerance is a part of float32's mean

    def worsening(self, low: np.ndarray, exact: np.ndarray) -> np.ndarray:
        """Returns by how much each example is worse than in float32."""
        change = low - exact
        if self.more_is_better is None:
            change = np.abs(change)
        elif self.more_is_better:
            change = -change
        mean = abs(float(np.mean(exact)))
        return change / max(mean, 1e-12) if self.is_relative else change


def score_of(model: keras.Model, metric: Any, outputs: Any, y: Any) -> Score:
    """Returns the score of a metric; the model's own loss for None.

    Args:
        model: A compiled model.
        metric: None, "loss", the name of a metric of Keras, a `keras.metrics.Metric`
            or `keras.losses.Loss`, or a function of targets and outputs.
        outputs: What the model gives for a batch.
        y: The targets of that batch.

    Raises:
        ValueError: There is no such metric, or it gives no value for each example.
    """
    found = _score(model, metric, outputs, y)
    values = values_of(found, y, outputs)
    if not np.isfinite(values).all():
        raise ValueError(
            f"Metric {found.name!r} is {float(np.mean(values))!r} in float32; expected "
            "finite numbers to compare with. Look at the data and the model with "
            "`tfamp.triage(model, batch)`."
        )
    return found


def values_of(score: Score, y: Any, outputs: Any) -> np.ndarray:
    """Returns the score of each example, of shape (examples,)."""
    try:
        found = np.asarray(score.function(y, outputs), np.float64)
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise ValueError(
            f"Metric {score.name!r} cannot be taken of these targets and outputs: "
            f"{first_line(error)}. Pass `metric`, a function of both that returns a "
            "value for each example."
        ) from error
    number = len(tf.nest.flatten(outputs)[0])
    if found.ndim < 1 or len(found) != number:
        raise ValueError(
            f"Metric {score.name!r} gives shape {found.shape} for {number} examples; "
            "expected a value for each. Pass a function that does not take the mean."
        )
    return found.reshape(number, -1).mean(axis=1)


def upper_bound(worsening: np.ndarray, rate: float, *, is_rate: bool) -> float:
    """Returns what the true mean worsening is below, but for a chance of `rate`.

    Args:
        worsening: Of each example or seed, at least two.
        rate: The chance to be wrong.
        is_rate: Whether each is one of -1, 0 and 1, as those of an accuracy are: then
            the bound is that of fractions, which is exact where none is -1.

    Example:
        >>> round(upper_bound(np.zeros(360), 0.05, is_rate=True), 4)
        0.0083
    """
    number = len(worsening)
    if is_rate:
        lost, won = int(np.sum(worsening > 0)), int(np.sum(worsening < 0))
        return difference_limit(lost, won, number, rate)
    spread = float(np.std(worsening, ddof=1)) if number > 1 else math.inf
    half = student_quantile(rate, number - 1) * spread / math.sqrt(number)
    return float(np.mean(worsening)) + half


def examples_needed(tolerance: float, rate: float) -> int:
    """Returns how many examples can show a rate to be below a tolerance, at best.

    Example:
        >>> examples_needed(0.005, 0.05)
        598
    """
    return math.ceil(math.log(rate) / math.log1p(-tolerance)) if tolerance < 1 else 1


def of_batches(
    score: Score, batches: Sequence[Any], outputs: Sequence[Any]
) -> np.ndarray:
    """Returns the score of each example of some batches."""
    pairs = zip(batches, outputs, strict=True)
    return np.concatenate([values_of(score, targets(b), o) for b, o in pairs])


def targets(batch: Any) -> Any:
    """Returns the targets of a batch."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return y


def predict(model: keras.Model, batches: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a model for each batch, in float32.

    It is traced once, for what all batches have in common.
    """

    def outputs_of(x: Any) -> Any:
        outputs = model(x, training=False)
        return tf.nest.map_structure(_widened, outputs)

    inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in batches]
    specs = [tf.nest.map_structure(tf.type_spec_from_value, x) for x in inputs]
    common = tf.nest.map_structure(_in_common, *specs)
    # Called as it is: TensorFlow counts traces by a function's code, and would warn of
    # one for each plan.
    traced = tf.function(outputs_of).get_concrete_function(common)
    return [traced(x) for x in inputs]


def _in_common(first: tf.TypeSpec, *others: tf.TypeSpec) -> tf.TypeSpec:
    """Returns what inputs of several batches are all of."""
    return first.most_specific_common_supertype(others) or first


def _widened(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x, tf.float32) if x.dtype.is_floating else x


def _score(model: keras.Model, metric: Any, outputs: Any, y: Any) -> Score:
    if metric is None or metric == "loss":
        return Score("loss", _loss_of(model), False, True)
    if isinstance(metric, str):
        name = _named(metric, outputs, y)
        higher = any(word in name.lower() for word in _HIGHER)
        found = keras.metrics.get(name)
        if isinstance(found, keras.metrics.MeanMetricWrapper):
            return Score(metric, of_each_example(found), higher, not higher)
        if not isinstance(found, keras.metrics.Metric):
            return Score(metric, _aligned(found), higher, not higher)
    if isinstance(metric, keras.losses.Loss):
        return Score(metric.name, _aligned(metric.call), False, True)
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        higher = any(word in metric.name.lower() for word in _HIGHER)
        return Score(metric.name, of_each_example(metric), higher, not higher)
    if callable(metric) and not isinstance(metric, keras.metrics.Metric):
        name = getattr(metric, "__name__", type(metric).__name__)
        return Score(name, metric, None, False)
    raise ValueError(
        f"`metric` is {metric!r}; expected the name of a metric of Keras that is a "
        "mean over examples, such as 'accuracy', or a function of targets and outputs "
        "that returns a value for each example."
    )


def _named(metric: str, outputs: Any, y: Any) -> str:
    """Returns which accuracy is meant, by the shapes, as Keras tells it."""
    if metric not in ("accuracy", "acc"):
        return metric
    last = tf.nest.flatten(outputs)[0].shape[-1]
    if last == 1:
        return "binary_accuracy"
    is_one_hot = len(tf.nest.flatten(y)[0].shape) > 1 and (
        tf.nest.flatten(y)[0].shape[-1] == last
    )
    return "categorical_accuracy" if is_one_hot else "sparse_categorical_accuracy"


def _loss_of(model: keras.Model) -> Callable[[Any, Any], Any]:
    loss = getattr(model, "loss", None)
    if not isinstance(loss, str | keras.losses.Loss) and not callable(loss):
        raise ValueError(
            f"Model {model.name!r} has no single loss to compare; expected one, or "
            "`metric`. Pass a function of targets and outputs that returns a value for "
            "each example."
        )
    found = keras.losses.get(loss)
    return _aligned(found.call if isinstance(found, keras.losses.Loss) else found)


def _aligned(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Returns a function that takes targets without the last dimension of 1, too."""

    def aligned(y: Any, outputs: Any) -> Any:
        y, outputs = (tf.convert_to_tensor(each) for each in (y, outputs))
        return function(of_rank(y, outputs), outputs)

    return aligned
