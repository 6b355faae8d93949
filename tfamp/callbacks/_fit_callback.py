"""What callbacks have in common: a part in `fit`, its batches, files of figures.

Files are checked when training begins, before any work could be lost. A row is a tuple
whose first value is the number of the step.
"""

import csv
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import around_training
from tfamp.loss_scale.fit_hooks import FIT_HOOKS

# Older progress bars average over an epoch what batches log, counters too.
BAR_AVERAGES = not hasattr(keras.utils.Progbar(1, verbose=0), "stateless_metrics")
# As `tf.summary.scalar` marks them, which needs TensorBoard; 1 is DATA_CLASS_SCALAR.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,
)


class FitCallback(keras.callbacks.Callback):
    """A callback that joins `fit` when training begins and is told how that ended."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: tuple[str, ...] = ()
        self._member: around_training.Member | None = None
        FIT_HOOKS.install()

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        """Stands around the training function still, if another callback changed it."""
        if self._member is not None:
            self._member.surround()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves `fit`: gives the training function back and closes what is open."""
        if self._member is not None:
            self._member.leave()

    def _join(self, **part: Any) -> bool:
        """Takes part in `fit`, as `around_training.join`; whether it has its place."""
        if self._member is not None:
            self._member.leave()
        self._member = around_training.join(self.model, self._end, **part)
        return self._member.has_place

    def _end(self, error: BaseException | None) -> None:
        self._member = None
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Lets go of what was opened, after the error that ended `fit` if one did."""

    def _note(self, line: str, level: int = logging.WARNING) -> None:
        """Logs a line once, and lists it in `notes`."""
        if line not in self.notes:
            self.notes = (*self.notes, line)
            logging.log(level, "%s", line)


class Draws:
    """An iterator over what a function draws, for one call of a training function.

    From an iterator of TensorFlow Keras draws inside the traced function; from any
    other one it draws in Python, ahead of each step, where batches can be timed and
    kept. Nothing is drawn twice or earlier, and the step is the same function.

    The first batch is drawn at once, so that the end of the data shows as it does in
    Keras's own function: a StopIteration ahead of the step. `source` is what the
    function draws from.
    """

    def __init__(self, draw: Callable[[], Any], source: Any) -> None:
        self._draw, self._ahead = draw, [draw()]
        if isinstance(source, (tf.data.Iterator, Draws)):
            self.element_spec = getattr(source, "element_spec", None)

    def __iter__(self) -> Iterator[Any]:
        """Returns itself."""
        return self

    def __next__(self) -> Any:
        """Returns the next batch."""
        return self._ahead.pop() if self._ahead else self._draw()


def can_draw(model: keras.Model) -> bool:
    """Returns whether a model's training function takes any iterator.

    One of the user's own may count on an iterator of TensorFlow, and several workers
    have to trace the same step alike.
    """
    is_own = type(model).make_train_function is not keras.Model.make_train_function
    return not is_own and not has_workers(model)


def has_workers(model: keras.Model) -> bool:
    """Returns whether a model trains on several workers."""
    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(model.distribute_strategy, kind)


def check_path(argument: str, path: object) -> str | None:
    """Returns a path as text, or None; a TypeError names what is neither."""
    if path is None or isinstance(path, (str, os.PathLike)):
        return path if path is None else os.fspath(path)
    raise TypeError(
        f"`{argument}` is {path!r}, of type {type(path).__name__}; expected a path. "
        "Pass a string, or leave it out."
    )


# Folder -> its writer. TensorBoard follows the newest file of a folder alone, so
# callbacks that share a folder share a file.
_WRITERS: "weakref.WeakValueDictionary[str, Any]" = weakref.WeakValueDictionary()


class EventWriter:
    """Writes rows to a CSV file and as TensorBoard scalars, on the chief worker only.

    Either path may be None. A CSV file gets a header where it is new, and None is an
    empty cell; it is open only while rows are written, so an error that ends training
    leaves whole rows. A log directory is made where it does not exist. A ValueError
    says which cannot be written to.
    """

    def __init__(
        self,
        model: keras.Model,
        fields: Sequence[str],
        *,
        csv_path: str | None = None,
        log_dir: str | None = None,
    ) -> None:
        is_chief = model.distribute_strategy.extended.should_save_summary
        self._csv_path = csv_path if is_chief else None
        if self._csv_path is not None:
            _begin_csv(self._csv_path, ",".join(fields))
        self._tags, self._writer = fields[1:], None
        if is_chief and log_dir is not None:
            folder = log_dir if "://" in log_dir else os.path.realpath(log_dir)
            try:
                self._writer = _WRITERS.get(folder) or (
                    tf.summary.create_file_writer(folder)
                )
            except tf.errors.OpError as error:
                raise ValueError(
                    f"`log_dir` is {log_dir!r}, which cannot be written "
                    f"({error.message}); expected a folder for TensorBoard. Pass "
                    "another one."
                ) from error
            _WRITERS[folder] = self._writer

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows, if there are any."""
        if self._csv_path is not None and rows:
            with open(self._csv_path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        if self._writer is not None and rows:
            with self._writer.as_default():
                for step, *values in rows:
                    # All of a row at once: one write, where each would cost as much.
                    scalars = [
                        tf.compat.v1.Summary.Value(
                            tag=tag,
                            tensor=tf.make_tensor_proto(value, tf.float32),
                            metadata=_SCALAR,
                        )
                        for tag, value in zip(self._tags, values, strict=True)
                        if value is not None
                    ]
                    summary = tf.compat.v1.Summary(value=scalars).SerializeToString()
                    tf.summary.experimental.write_raw_pb(summary, step)
            self._writer.flush()

    def close(self) -> None:
        """Lets go of the files, which the last who has them open closes."""
        self._csv_path = self._writer = None


def _begin_csv(path: str, header: str) -> None:
    """Writes the header of a file that is new; raises where rows cannot follow it."""
    try:
        with open(path, "a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            first = file.readline().rstrip("\r\n")
            if not first:
                file.write(header + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"`csv_path` is {path!r}, which cannot be written ({error}); expected a "
            "file of text in a folder that exists. Pass another path."
        ) from error
    if first not in ("", header):
        raise ValueError(
            f"`csv_path` is {path!r}, whose first line is {first[:80]!r}; expected a "
            "new file, or one of an earlier run. Pass another path."
        )
