"""The metrics of each validation example, which a run writes down."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.stepping.arguments import dataset_of
from tfamp.trials import scores
from tfamp.trials.run_records import Run, file_name

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
    functions = {} if has_own_step else scores.functions_of(model)
    found: dict[str, list[np.ndarray]] = {name: [] for name in functions}
    digest, number = hashlib.sha256(), 0
    if isinstance(data, keras.utils.PyDataset):  # in its own order
        data = (data[index] for index in range(len(data)))
    else:
        data = dataset_of(data, batch_size)
    for batch in data:
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
