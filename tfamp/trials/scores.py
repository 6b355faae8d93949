"""A model's metric on each example: what `compare`, `tune` and `export` judge by."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records.checks import first_line
from tfamp.stepping.arguments import dataset_of
from tfamp.trials.run_records import Run, file_name

_HIGHER = ("accuracy", "acc", "precision", "recall", "auc", "cosine", "iou", "f1")
# Takes targets and outputs, returns one value for each example.
PerExample = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Score:
    """What is compared, example by example."""

    name: str  # of the metric
    function: PerExample
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
    """Returns the score of a metric, seen on the outputs and targets of a batch."""
    found = _score(model, metric, outputs, y)
    values = values_of(found, y, outputs)
    if not np.isfinite(values).all():
        raise ValueError(
            f"Metric {found.name!r} is {float(np.mean(values))!r} in float32; expected "
            "finite numbers to compare with. Ask `tfamp.triage(model, batch)`."
        )
    return found


def _score(model: keras.Model, metric: Any, outputs: Any, y: Any) -> Score:
    is_loss = metric is None or metric == "loss"
    loss = getattr(model, "loss", None) if is_loss else metric
    if isinstance(loss, keras.losses.Loss) or (
        is_loss and (isinstance(loss, str) or callable(loss))
    ):
        name = "loss" if is_loss else str(metric.name)
        return Score(name, _of_loss(loss), False, True)
    if isinstance(metric, str) and not is_loss:
        is_accuracy = metric in ("accuracy", "acc")
        found = keras.metrics.get(_accuracy(outputs, y) if is_accuracy else metric)
    else:
        found = metric
    name = str(getattr(metric, "name", metric))
    higher = any(word in name.lower() for word in _HIGHER)
    if isinstance(found, keras.metrics.MeanMetricWrapper):
        return Score(name, _of_metric(found), higher, not higher)
    if not is_loss and callable(found) and not isinstance(found, keras.metrics.Metric):
        if isinstance(metric, str):
            return Score(name, _aligned(found), higher, not higher)
        name = getattr(metric, "__name__", type(metric).__name__)
        return Score(name, metric, None, False)
    raise ValueError(
        f"`metric` is {metric!r}, and the loss of model {model.name!r} "
        f"{getattr(model, 'loss', None)!r}; expected a single loss, the name of a "
        "metric of Keras that is a mean over examples, such as 'accuracy', or a "
        "function of targets and outputs that returns a value for each example."
    )


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


def functions_of(model: keras.Model) -> dict[str, PerExample]:
    """Returns name -> function of a model's loss and metrics that are plain means."""
    found: dict[str, PerExample] = {}
    for tracked in model.metrics:
        for metric in getattr(tracked, "metrics", [tracked]):
            if isinstance(metric, keras.metrics.MeanMetricWrapper):
                found[metric.name] = _of_metric(metric)
    if isinstance(model.loss, (str, keras.losses.Loss)) or callable(model.loss):
        found["loss"] = _of_loss(model.loss)
    return found


def predict(model: keras.Model, batches: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a model for each batch, in float32."""

    def outputs_of(x: Any) -> Any:
        return tf.nest.map_structure(
            lambda y: tf.cast(y, tf.float32) if y.dtype.is_floating else y,
            model(x, training=False),
        )

    inputs = [keras.utils.unpack_x_y_sample_weight(batch)[0] for batch in batches]
    specs = [tf.nest.map_structure(tf.type_spec_from_value, x) for x in inputs]
    common = tf.nest.map_structure(
        lambda first, *others: first.most_specific_common_supertype(others) or first,
        *specs,
    )
    # Called as it is: TensorFlow counts traces by a function's code, and would warn of
    # one for each plan.
    traced = tf.function(outputs_of).get_concrete_function(common)
    return [traced(x) for x in inputs]


def _accuracy(outputs: Any, y: Any) -> str:
    """Returns which accuracy is meant, by the shapes, as Keras tells it."""
    last = tf.nest.flatten(outputs)[0].shape[-1]
    if last == 1:
        return "binary_accuracy"
    shape = tf.nest.flatten(y)[0].shape
    is_one_hot = len(shape) > 1 and shape[-1] == last
    return "categorical_accuracy" if is_one_hot else "sparse_categorical_accuracy"


def _of_metric(metric: Any) -> PerExample:
    """Returns a function that gives what a metric takes the mean of."""

    class Seen(keras.metrics.Mean):
        seen: Any = None

        def update_state(self, values: Any, sample_weight: Any = None) -> None:
            Seen.seen = np.asarray(values)

    # Not made from its config, which has no function of the user's.
    copy: Any = object.__new__(type("PerExample", (type(metric), Seen), {}))
    vars(copy).update(vars(metric))

    def function(y: Any, outputs: Any) -> Any:
        copy.update_state(y, outputs)
        return Seen.seen

    return _aligned(function)


def _of_loss(loss: Any) -> PerExample:
    found = keras.losses.get(loss)
    return _aligned(found.call if isinstance(found, keras.losses.Loss) else found)


def _aligned(function: PerExample) -> PerExample:
    """Returns a function that takes targets without the last dimension of 1, too."""

    def aligned(y: Any, outputs: Any) -> Any:
        y, outputs = (tf.convert_to_tensor(each) for each in (y, outputs))
        if y.shape.rank == outputs.shape.rank - 1 and outputs.shape[-1] == 1:
            y = y[..., tf.newaxis]
        return function(y, outputs)

    return aligned


_SUFFIX, _FINGERPRINT = ".examples.npz", "of what"
# Of inputs so many numbers of an example tell it from others.
_LEADING_NUMBERS = 16
# How far the mean over examples may be off the metric that `fit` logged.
_PRECISION = 1e-3


def write_examples(
    path: Path, model: keras.Model, data: Any, final: dict[str, float], batch_size: int
) -> int:
    """Writes the metrics of each example, and returns how many examples there are.

    A metric is left out where its mean is not the one that `fit` logged: examples that
    are weighted or masked, a `test_step` of the user's, random augmentation.
    """
    has_own_step = type(model).test_step is not keras.Model.test_step
    functions = {} if has_own_step else functions_of(model)
    found: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    digest, number = hashlib.sha256(), 0
    for batch in dataset_of(data, batch_size):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        number += len(tf.nest.flatten(x)[0])
        for part in tf.nest.flatten((x, y)):
            rows = np.asarray(part)
            digest.update(rows.reshape(len(rows), -1)[:, :_LEADING_NUMBERS].tobytes())
        if weights is not None or len(tf.nest.flatten(y)) != 1:
            found = {}
        if not found:
            continue
        y, outputs = tf.nest.flatten(y)[0], model.predict_on_batch(x)
        for name in tuple(found):
            try:
                values = np.asarray(functions[name](y, outputs), np.float32)
            except (TypeError, ValueError, tf.errors.OpError):
                # `fit` may take it in another way; the rest is known all the same.
                del found[name]
            else:
                found[name].append(values.reshape(len(values), -1).mean(axis=1))
    kept: dict[str, Any] = {_FINGERPRINT: digest.hexdigest()}
    for name, parts in found.items():
        joined = np.concatenate([np.zeros(0, np.float32), *parts])
        logged, mean = final.get(name, np.nan), np.mean(joined, dtype=np.float64)
        least = _PRECISION * max(abs(logged), _PRECISION)
        if len(joined) == number and abs(mean - logged) <= least:
            kept[f"metric {name}"] = joined
    np.savez_compressed(f"{path}{_SUFFIX}", **kept)
    return number


def differences(
    folder: Path, pairs: Sequence[tuple[Run, Run]], metric: str
) -> np.ndarray | None:
    """Returns a metric of each example under a policy minus that under the reference.

    Shape (pairs, examples); None where a run lacks it, or where they saw other examples
    or another order.
    """
    values, seen, key = [], set(), f"metric {metric}"
    for run in (run for pair in pairs for run in pair):
        path = folder / f"{file_name(run.policy, run.seed)}{_SUFFIX}"
        if not path.is_file():
            return None
        with np.load(path) as arrays:
            seen.add(str(arrays[_FINGERPRINT]))
            if key not in arrays or len(seen) > 1:
                return None
            values.append(arrays[key].astype(np.float64))
    return np.stack(values[1::2]) - np.stack(values[::2]) if values else None
