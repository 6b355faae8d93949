"""What callbacks have in common: a part in `fit`, lines of log, files of figures.

Files are checked when training begins, before any work could be lost. A row is a tuple
whose first value is the number of the step.
"""

import csv
import os
from collections.abc import Iterable, Sequence
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
        FIT_HOOKS.hold(self)

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
    """Returns a path as text, or None; a TypeError names what is neither.

    Example:
        >>> check_path("csv_path", "steps.csv")
        'steps.csv'
    """
    if path is None or isinstance(path, str):
        return path
    if isinstance(path, os.PathLike):
        return os.fspath(path)
    raise TypeError(
        f"`{argument}` is {path!r}, of type {type(path).__name__}; expected a path. "
        "Pass a string, or leave it out."
    )


class _CsvRows:
    """Appends rows to a CSV file, a header first where it is new.

    The file is open only while rows are written, so an error that ends training
    leaves whole rows. None is an empty cell. A file that cannot be written or holds
    something else is a ValueError.
    """

    def __init__(self, path: str, fields: Sequence[str]) -> None:
        self._path = path
        header = ",".join(fields)
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            raise ValueError(
                f"`csv_path` is {path!r}, but there is no folder {folder!r}; expected "
                f"a file in a folder that exists. Run `os.makedirs({folder!r})` first."
            )
        try:
            with open(path, "a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                first = file.readline().rstrip("\r\n")
                if not first:
                    file.write(header + "\n")
        except OSError as error:
            raise ValueError(
                f"`csv_path` is {path!r}, which cannot be written ({error.strerror}); "
                "expected a file to write to. Pass another path."
            ) from error
        except UnicodeDecodeError as error:
            raise self._foreign("no text") from error
        if first not in ("", header):
            raise self._foreign(f"a first line {first[:80]!r}")

    def _foreign(self, found: str) -> ValueError:
        return ValueError(
            f"`csv_path` is {self._path!r}, a file with {found}; expected a new file, "
            "or one of an earlier run. Pass another path."
        )

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Appends rows."""
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


# Folder -> its writer, and how many callbacks have it open. TensorBoard follows the
# newest file of a folder alone, so callbacks that share a folder share a file.
_WRITERS: dict[str, tuple[Any, int]] = {}


class _Summaries:
    """Writes the values of rows as TensorBoard scalars, except None.

    The log directory is made where it does not exist; a ValueError says that it cannot
    be written to.
    """

    def __init__(self, folder: str, fields: Sequence[str]) -> None:
        self._tags = tuple(fields[1:])
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
        self._folder = folder if "://" in folder else os.path.realpath(folder)
        writer, num_users = _WRITERS.get(self._folder, (None, 0))
        self._writer = writer or tf.summary.create_file_writer(self._folder)
        _WRITERS[self._folder] = self._writer, num_users + 1
        self._is_open = True

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Writes the scalars of each row."""
        with self._writer.as_default():
            for step, *values in rows:
                summary = _summary(self._tags, values).SerializeToString()
                tf.summary.experimental.write_raw_pb(summary, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file with the last who has it open; a second time does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        writer, num_users = _WRITERS.pop(self._folder)
        if num_users > 1:
            _WRITERS[self._folder] = writer, num_users - 1
        else:
            writer.close()


class EventWriter:
    """Writes rows to a CSV file and as TensorBoard scalars, on the chief worker only.

    Either path may be None. A ValueError says which cannot be written to.
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
        has_csv = is_chief and csv_path is not None
        has_summaries = is_chief and log_dir is not None
        self._csv = _CsvRows(str(csv_path), fields) if has_csv else None
        self._summaries = _Summaries(str(log_dir), fields) if has_summaries else None

    @property
    def is_open(self) -> bool:
        """Whether rows are written anywhere."""
        return self._csv is not None or self._summaries is not None

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Writes rows, if there are any."""
        if self._csv is not None and rows:
            self._csv.write(rows)
        if self._summaries is not None and rows:
            self._summaries.write(rows)

    def close(self) -> None:
        """Closes the files; a second time does nothing."""
        if self._summaries is not None:
            self._summaries.close()


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
