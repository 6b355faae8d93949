"""What a run measures beside what `fit` logs: each example's metrics, where time goes.

A run writes down what its metrics are on each validation example, in the order of the
data. Where all runs saw the same examples in the same order, the verdict counts what
they leave open; where not, or where a metric is no mean over examples, its range is
wider. A profile of some more steps says which types of operations take their time.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records import checks
from tfamp.records.record import whole
from tfamp.trials.run_records import OperationTime, Run
from tfamp.trials.storage import Job, file_name
from tfamp.trials.training import arguments

_SUFFIX = ".examples"
_FINGERPRINT, _NAMES = "fingerprint", "names"
# Of inputs so many numbers of an example tell it from others.
_LEADING_NUMBERS = 16
# How far the mean over examples may be off the metric that `fit` logged.
_PRECISION = 1e-3
_TEST_STEP = keras.Model.test_step

_PROTOBUF = "tensorflow.tsl.profiler.protobuf.xplane_pb2"
_PICOSECONDS = 1e12
# "StatefulPartitionedCall/model/dense/MatMul:MatMul", by the executor. Its other
# events have two colons, or none.
_OPERATION = re.compile(r"[^:]+:(?P<type>_?[A-Za-z]\w*)")
# "dot.12" and "MatMul_1.30.clone": XLA numbers instructions.
_NUMBERS = re.compile(r"(?:\.\d+|\.clone|_\d+)+$")
_DEVICE_PLANE = "/device:"
# Lines of a GPU's plane that tell the same kernels again, by step, module or scope.
_DERIVED_LINES = ("Steps", "XLA Modules", "TensorFlow ", "Source code", "Framework ")
_SUMS = "seconds_by_operation.json"


@dataclasses.dataclass
class PerExample:
    """The metrics of each example of validation data, by name of shape (examples,).

    `fingerprint` tells the examples and their order from others.
    """

    values: dict[str, np.ndarray]
    fingerprint: str
    number: int

    def write(self, folder: Path, policy: str, seed: int) -> None:
        """Writes them beside the record of a run."""
        arrays = [np.float32(each) for each in self.values.values()]
        given: dict[str, Any] = {f"values_{i}": each for i, each in enumerate(arrays)}
        given |= {_FINGERPRINT: self.fingerprint, _NAMES: list(self.values)}
        with open(folder / f"{file_name(policy, seed)}{_SUFFIX}", "wb") as file:
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
    path = folder / f"{file_name(run.policy, run.seed)}{_SUFFIX}"
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


def seconds_by_type(directory: Path) -> dict[str, float]:
    """Returns the time in each type of operation of the newest profile, longest first.

    Operations run beside one another, so their times may add up to more than went by.
    Types are such as "MatMul"; oneDNN's begin with "_Mkl", fused ones are named after
    the product, XLA's after the instruction. With a GPU the host's time is that of
    launching, so that only the device's counts.
    """
    by_place: dict[bool, dict[str, float]] = {True: {}, False: {}}
    files = list(directory.rglob("*.xplane.pb"))
    newest = max(files, key=lambda file: file.stat().st_mtime, default=directory)
    # Of the newest profile there is a file for each host.
    for path in (each for each in files if each.parent == newest.parent):
        for plane in _load(path).planes:
            is_device = plane.name.startswith(_DEVICE_PLANE)
            own = by_place[is_device]
            for line in plane.lines:
                if is_device and line.name.startswith(_DERIVED_LINES):
                    continue
                for kind, seconds in _with_self_times(_operations(plane, line)):
                    own[kind] = own.get(kind, 0.0) + seconds
    found = by_place[True] or by_place[False]
    if not found:
        raise ValueError(
            f"The profile in {str(directory)!r} holds no operations; expected those of "
            "some steps."
        )
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _load(path: Path) -> Any:
    try:
        protobuf: Any = checks.require(
            _PROTOBUF, extra=None, purpose="Reading a profile"
        )
    except ImportError as error:
        raise ImportError(
            f"TensorFlow here has no {_PROTOBUF!r}; expected TensorFlow 2.19 to 2.21. "
            "Install one of these, or look at the profile with xprof.",
            name=_PROTOBUF,
        ) from error
    space = protobuf.XSpace()
    try:
        space.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own class differs by its version
        raise ValueError(
            f"The profile {str(path)!r} is damaged ({error}); expected what the "
            "profiler wrote. Capture it again, with room on the disk."
        ) from error
    return space


def _operations(plane: Any, line: Any) -> Iterator[tuple[int, int, str]]:
    """Yields start, duration in picoseconds and type of the operations of a line."""
    for event in line.events:
        metadata = plane.event_metadata[event.metadata_id]
        stats = {
            plane.stat_metadata[stat.metadata_id].name: _text(plane, stat)
            for stat in (*metadata.stats, *event.stats)
        }
        matched = _OPERATION.fullmatch(stats.get("tf_op") or metadata.name)
        if matched:
            yield event.offset_ps, event.duration_ps, matched["type"]
        elif "hlo_op" in stats:
            name = stats["hlo_op"] or metadata.name
            yield event.offset_ps, event.duration_ps, _NUMBERS.sub("", name)


def _text(plane: Any, stat: Any) -> str:
    """Returns the text of a stat, which may refer to one kept elsewhere."""
    if stat.WhichOneof("value") == "ref_value":
        return str(plane.stat_metadata[stat.ref_value].name)
    return str(stat.str_value)


def _with_self_times(
    events: Iterable[tuple[int, int, str]],
) -> Iterator[tuple[str, float]]:
    """Yields type and seconds of operations; one inside another is taken off that."""
    # Of two that begin together the longer one is around the other.
    ordered = sorted(events, key=lambda event: (event[0], -event[1]))
    inside = [0] * len(ordered)
    around: list[int] = []
    for index, (start, duration, _) in enumerate(ordered):
        while around and start >= ordered[around[-1]][0] + ordered[around[-1]][1]:
            around.pop()
        if around:
            inside[around[-1]] += duration
        around.append(index)
    for (_, duration, kind), nested in zip(ordered, inside, strict=True):
        yield kind, max(0, duration - nested) / _PICOSECONDS


def profile(model: keras.Model, data: Any, *, job: Job, directory: Path) -> None:
    """Profiles some more training steps of a model that `fit` has trained.

    Steps run a few percent slower meanwhile. TensorBoard with its profile plug-in (`pip
    install xprof`) opens the directory too, where the seconds of a step in each type of
    operation lie. A profiler that runs already is a `tf.errors.OpError`.
    """
    given, _, _, steps_an_epoch = arguments(data, job)
    steps = min(job.profile_steps, steps_an_epoch or job.profile_steps)
    directory.mkdir(parents=True, exist_ok=True)
    with tf.profiler.experimental.Profile(str(directory)):
        model.fit(**given, epochs=1, steps_per_epoch=steps, verbose=0)
        tf.test.experimental.sync_devices()  # what still computes belongs to it
    seconds = {k: total / steps for k, total in seconds_by_type(directory).items()}
    with whole(directory / _SUMS) as beside:
        beside.write_text(json.dumps(seconds), encoding="utf-8")


def read_seconds(directory: Path) -> dict[str, float]:
    """Returns the seconds of a step in each type of operation, if it was profiled."""
    path = directory / _SUMS
    found: dict[str, float] = {}
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8"))
    return found


def side_by_side(
    seconds: Mapping[str, Mapping[str, float]], reference: str
) -> dict[str, tuple[OperationTime, ...]]:
    """Returns the time of each type of operation of a step beside the reference's.

    By policy, the longest types first; nothing where one of the two has no profile.
    """
    before = seconds.get(reference, {})
    found = {}
    for policy, after in seconds.items():
        rows = [
            OperationTime(kind, before.get(kind, 0.0), after.get(kind, 0.0))
            for kind in {**before, **after}
        ]
        rows.sort(key=lambda row: -max(row.before_seconds, row.after_seconds))
        if policy != reference and before and after:
            found[policy] = tuple(rows)
    return found
