"""What callbacks have in common: a part in `fit`, lines of log, files of figures.

Files are checked when training begins, before any work could be lost. A row is a tuple
whose first value is the number of the step.
"""

import csv
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import around_training
from tfamp.loss_scale.fit_hooks import FIT_HOOKS

# Older progress bars average over an epoch what batches log, counters too.
BAR_AVERAGES = not hasattr(keras.utils.Progbar(1, verbose=0), "stateless_metrics")
# As `tf.summary.scalar` marks them; 1 is DATA_CLASS_SCALAR.
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
        self._leave()

    def _join(self, **part: Any) -> bool:
        """Takes part in `fit`, as `around_training.join`; whether it has its place."""
        self._leave()
        self._member = around_training.join(self.model, self._end, **part)
        return self._member.has_place

    def _leave(self) -> None:
        if self._member is not None:
            self._member.leave()

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


def check_path(argument: str, path: object) -> str | None:
    """Returns a path as text, or None; a TypeError names what is neither."""
    if path is None or isinstance(path, str):
        return path
    if isinstance(path, os.PathLike):
        return os.fspath(path)
    raise TypeError(
        f"`{argument}` is {path!r}, of type {type(path).__name__}; expected a path. "
        "Pass a string, or leave it out."
    )


# Folder -> its writer, and how many callbacks have it open. TensorBoard follows the
# newest file of a folder alone, so callbacks that share a folder share a file.
_WRITERS: dict[str, tuple[Any, int]] = {}


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
        csv_path: str | None,
        log_dir: str | None,
    ) -> None:
        is_chief = model.distribute_strategy.extended.should_save_summary
        self._csv_path = csv_path if is_chief else None
        if self._csv_path is not None:
            _begin_csv(self._csv_path, ",".join(fields))
        self._tags, self._folder = fields[1:], ""
        if is_chief and log_dir is not None:
            _check_folder(log_dir)
            self._folder = log_dir if "://" in log_dir else os.path.realpath(log_dir)
            writer, num_users = _WRITERS.get(self._folder, (None, 0))
            self._writer = writer or tf.summary.create_file_writer(self._folder)
            _WRITERS[self._folder] = self._writer, num_users + 1

    @property
    def is_open(self) -> bool:
        """Whether rows are written anywhere."""
        return self._csv_path is not None or bool(self._folder)

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows, if there are any."""
        if self._csv_path is not None and rows:
            with open(self._csv_path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)
        if self._folder and rows:
            with self._writer.as_default():
                for step, *values in rows:
                    summary = _summary(self._tags, values).SerializeToString()
                    tf.summary.experimental.write_raw_pb(summary, step)
            self._writer.flush()

    def close(self) -> None:
        """Closes the files with the last who has them open; again it does nothing."""
        if not self._folder:
            return
        writer, num_users = _WRITERS.pop(self._folder)
        if num_users > 1:
            _WRITERS[self._folder] = writer, num_users - 1
        else:
            writer.close()
        self._folder = ""


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


def _check_folder(folder: str) -> None:
    """Raises where a folder for TensorBoard cannot be made and written."""
    probe = os.path.join(folder, f".writable_{os.getpid()}")
    try:
        tf.io.gfile.makedirs(folder)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except tf.errors.OpError as error:
        raise ValueError(
            f"`log_dir` is {folder!r}, which cannot be written ({error.message}); "
            "expected a folder for TensorBoard. Pass another one."
        ) from error


def _summary(tags: Sequence[str], values: Sequence[Any]) -> Any:
    """Returns all scalars of a row: one write, where each would cost as much.

    `tf.summary.scalar` needs TensorBoard installed where the model trains.
    """
    return tf.compat.v1.Summary(
        value=[
            tf.compat.v1.Summary.Value(
                tag=tag,
                tensor=tf.make_tensor_proto(value, tf.float32),
                metadata=_SCALAR,
            )
            for tag, value in zip(tags, values, strict=True)
            if value is not None
        ]
    )
