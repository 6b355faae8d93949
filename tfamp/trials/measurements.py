"""What a run measures beside what `fit` logs: the metrics of each example.

A run writes down what its metrics are on each validation example, in the order of the
data. Where all runs saw the same examples in the same order, the verdict counts what
they leave open; where not, or where a metric is no mean over examples, its range is
wider.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.trials.run_records import Run
from tfamp.trials.tasks import file_name

SUFFIX = ".examples"
_FINGERPRINT, _NAMES = "fingerprint", "names"
# Of inputs so many numbers of an example tell it from others.
_LEADING_NUMBERS = 16
# How far the mean over examples may be off the metric that `fit` logged.
_PRECISION = 1e-3
_TEST_STEP = keras.Model.test_step


@dataclasses.dataclass
class PerExample:
    """The metrics of each example of validation data, by name of shape (examples,).

    `fingerprint` tells the examples and their order from others.
    """

    values: dict[str, np.ndarray]
    fingerprint: str
    number: int

    def write(self, path: Path) -> None:
        """Writes them to a file."""
        arrays = [np.float32(each) for each in self.values.values()]
        given: dict[str, Any] = {f"values_{i}": each for i, each in enumerate(arrays)}
        given |= {_FINGERPRINT: self.fingerprint, _NAMES: list(self.values)}
        with open(path, "wb") as file:
            np.savez_compressed(file, **given)


def measure_examples(
    model: keras.Model, data: Any, final: dict[str, float], *, batch_size: int | None
) -> PerExample:
    """Returns the metrics of each example, as far as they are means over examples.

    A metric is left out where its mean is not the one that `fit` logged: examples that
    are weighted or masked, a `test_step` of the user's, random augmentation.
    """
    functions = dict(_functions(model)) if type(model).test_step is _TEST_STEP else {}
    found: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    digest, number = hashlib.sha256(), 0
    for batch in _batches(data, batch_size or 32):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        number += len(tf.nest.flatten(x)[0])
        for part in tf.nest.flatten((x, y)):
            rows = np.asarray(part)
            digest.update(rows.reshape(len(rows), -1)[:, :_LEADING_NUMBERS].tobytes())
        if weights is not None or len(tf.nest.flatten(y)) != 1:
            found = {}
        if found:
            outputs = tf.convert_to_tensor(model.predict_on_batch(x))
            y = of_rank(tf.convert_to_tensor(tf.nest.flatten(y)[0]), outputs)
            for name in tuple(found):
                try:
                    values = np.asarray(functions[name](y, outputs), np.float32)
                except (TypeError, ValueError, tf.errors.OpError):
                    # `fit` may take it in another way; the rest is known all the same.
                    del found[name]
                else:
                    found[name].append(values.reshape(len(values), -1).mean(axis=1))
    joined = {name: np.concatenate(each) for name, each in found.items() if each}
    kept = {
        name: values
        for name, values in joined.items()
        if len(values) == number and _is_near(values, final.get(name))
    }
    return PerExample(kept, digest.hexdigest(), number)


def differences(
    folder: Path, pairs: Sequence[tuple[Run, Run]], metric: str
) -> np.ndarray | None:
    """Returns a metric of each example under a policy minus that under the reference.

    Shape (pairs, examples); None where a run lacks it, or where they saw other examples
    or another order.
    """
    rows: list[np.ndarray] = []
    seen: set[str] = set()
    for pair in pairs:
        both = [_read_examples(folder, run, metric) for run in pair]
        if both[0] is None or both[1] is None:
            return None
        seen |= {both[0][1], both[1][1]}
        if len(seen) > 1:
            return None
        rows.append(both[1][0] - both[0][0])
    return np.stack(rows) if rows else None


def _read_examples(
    folder: Path, run: Run, metric: str
) -> tuple[np.ndarray, str] | None:
    path = folder / f"{file_name(run.policy, run.seed)}{SUFFIX}"
    if not path.is_file():
        return None
    with np.load(path) as arrays:
        names = arrays[_NAMES].tolist()
        if metric not in names:
            return None
        values = arrays[f"values_{names.index(metric)}"].astype(np.float64)
        return values, str(arrays[_FINGERPRINT])


def _functions(model: keras.Model) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Returns name and function of the loss and of metrics that are plain means."""
    for tracked in model.metrics:
        for metric in getattr(tracked, "metrics", [tracked]):
            if isinstance(metric, keras.metrics.MeanMetricWrapper):
                yield metric.name, of_each_example(metric)
    if isinstance(model.loss, (str, keras.losses.Loss)) or callable(model.loss):
        loss = keras.losses.get(model.loss)
        yield "loss", loss.call if isinstance(loss, keras.losses.Loss) else loss


def of_each_example(metric: Any) -> Callable[..., Any]:
    """Returns a function that gives what a metric takes the mean of.

    A `MeanMetricWrapper` hands the values of the examples to the `Mean` below it, so a
    class that comes between the two sees them.
    """

    class Seen(keras.metrics.Mean):
        seen: Any = None

        def update_state(self, values: Any, sample_weight: Any = None) -> None:
            Seen.seen = np.asarray(values)

    kind = type("PerExample", (type(metric), Seen), {})
    copy = kind.from_config(metric.get_config())  # type: ignore[attr-defined]

    def function(y: Any, outputs: Any) -> Any:
        copy.update_state(y, outputs)
        return Seen.seen

    return function


def _batches(data: Any, batch_size: int) -> Iterator[Any]:
    if isinstance(data, tuple):
        number = len(tf.nest.flatten(data)[0])
        for start in range(0, number, batch_size):
            part = slice(start, start + batch_size)
            yield tf.nest.map_structure(lambda each, part=part: each[part], data)
    elif isinstance(data, tf.data.Dataset):
        yield from data
    else:
        for index in range(len(data)):
            yield data[index]


def of_rank(y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """Returns targets with the last dimension of 1 that outputs have, as losses do."""
    is_short = y.shape.rank == outputs.shape.rank - 1 and outputs.shape[-1] == 1
    return y[..., tf.newaxis] if is_short else y


def _is_near(values: np.ndarray, final: float | None) -> bool:
    """Whether the mean of a metric is the one that `fit` logged."""
    if final is None or not np.isfinite(values).all():
        return False
    mean = float(np.mean(values, dtype=np.float64))
    return abs(mean - final) <= _PRECISION * max(abs(final), _PRECISION)
