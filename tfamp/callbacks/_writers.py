"""Where steps are written: rows of a CSV file, scalars for TensorBoard.

Both are checked when training begins, before any work could be lost.
"""

import csv
import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfamp.callbacks._steps import Step

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
    """Appends steps to a CSV file, a header first where it is new.

    The file is open only while rows are written, so an error that ends training
    leaves whole rows. Numbers that are not finite are empty cells.

    Args:
        path: The file; its folder exists.

    Raises:
        ValueError: The file cannot be written or holds something else.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        header = ",".join(Step._fields)
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

    def write(self, steps: Iterable[Step]) -> None:
        """Appends a row for each step."""
        with open(self._path, "a", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(steps)

    def close(self) -> None:
        """Does nothing: the file is closed."""


class Summaries:
    """Writes steps as TensorBoard scalars, with a step's number as theirs.

    Args:
        folder: The log directory, made where it does not exist.

    Raises:
        ValueError: It cannot be written to.
    """

    def __init__(self, folder: str) -> None:
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

    def write(self, steps: Iterable[Step]) -> None:
        """Writes the scalars of each step, less those that are not finite."""
        with self._writer.as_default():
            for step in steps:
                summary = _summary(step).SerializeToString()
                tf.summary.experimental.write_raw_pb(summary, step.step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; a second time does nothing."""
        self._writer.close()


def _summary(step: Step) -> Any:
    """Returns all scalars of a step: one write, where each would cost as much.

    `tf.summary.scalar` needs TensorBoard installed where the model trains.
    """
    return tf.compat.v1.Summary(
        value=[
            tf.compat.v1.Summary.Value(
                tag=name,
                tensor=tf.make_tensor_proto(value, tf.float32),
                metadata=_SCALAR,
            )
            for name, value in zip(step._fields[1:], step[1:], strict=True)
            if value is not None
        ]
    )
