"""Where figures are written: rows of a CSV file, scalars for TensorBoard.

Both are checked when training begins, before any work could be lost. A row is a tuple
whose first value is the number of the step.
"""

import csv
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

# As `tf.summary.scalar` marks them; 1 is DATA_CLASS_SCALAR.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"),
    data_class=1,
)


def check_path(argument: str, path: object) -> str | None:
    """Returns a path as text, or None.

    Raises:
        TypeError: It is neither text nor a path.

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


class CsvRows:
    """Appends rows to a CSV file, a header first where it is new.

    The file is open only while rows are written, so an error that ends training
    leaves whole rows. None is an empty cell.

    Args:
        path: The file; its folder exists.
        fields: Names of the values in a row.

    Raises:
        ValueError: The file cannot be written or holds something else.
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

    def close(self) -> None:
        """Does nothing: the file is closed."""


class Summaries:
    """Writes the values of rows as TensorBoard scalars, except None.

    Args:
        folder: The log directory, made where it does not exist.
        fields: Names of the values in a row; the first, of the step, is left out.

    Raises:
        ValueError: It cannot be written to.
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
        self._writer = tf.summary.create_file_writer(folder)

    def write(self, rows: Iterable[Sequence[Any]]) -> None:
        """Writes the scalars of each row."""
        with self._writer.as_default():
            for step, *values in rows:
                summary = _summary(self._tags, values).SerializeToString()
                tf.summary.experimental.write_raw_pb(summary, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._writer.close()


def open_writers(
    model: Any, fields: Sequence[str], *, csv_path: str | None, log_dir: str | None
) -> list[CsvRows | Summaries]:
    """Returns the writers that are asked for, none on any but the chief worker.

    Args:
        model: The model that trains.
        fields: Names of the values in a row.
        csv_path: A file, or None.
        log_dir: A folder for TensorBoard, or None.

    Raises:
        ValueError: One cannot be written to.
    """
    if not model.distribute_strategy.extended.should_save_summary:
        return []  # of several workers one writes
    writers: list[CsvRows | Summaries] = []
    if csv_path is not None:
        writers.append(CsvRows(csv_path, fields))
    if log_dir is not None:
        writers.append(Summaries(log_dir, fields))
    return writers


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
