"""`capture`: writes down what TensorFlow's profiler sees while a block runs."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfamp._units import format_bytes

# A few steps of a large model; a profile that is cut off cannot be read.
_MIN_FREE_BYTES = 64 * 2**20


@contextlib.contextmanager
def capture(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Profiles what runs in the block: the time of every operation, host and device.

    Run a few steps that are warmed up, not the first, which traces and compiles, and
    not many: a step of a small model writes some hundred kilobytes. Steps run a few
    percent slower meanwhile.

    TensorBoard shows the same directory where its profile plug-in is installed (`pip
    install xprof`, formerly tensorboard-plugin-profile); nothing here needs it.

    Args:
        directory: Where to write, made if need be. Profiles of before stay there.

    Yields:
        The directory.

    Raises:
        TypeError: `directory` is no path.
        OSError: It cannot be written to, or too little room is left.
        RuntimeError: A profiler is running already.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with capture(folder):
        ...         product = tf.linalg.matmul(tf.ones((8, 8)), tf.ones((8, 8)))
        ...     len(list(Path(folder).rglob("*.xplane.pb")))
        1
    """
    path = _prepared(directory)
    try:
        tf.profiler.experimental.start(str(path))
    except tf.errors.AlreadyExistsError as error:
        raise RuntimeError(
            "TensorFlow's profiler is running already; expected it to be free. Stop it "
            "by `tf.profiler.experimental.stop()`, or train without "
            "`TensorBoard(profile_batch=...)` meanwhile."
        ) from error
    try:
        yield path
        tf.test.experimental.sync_devices()  # what still computes belongs to it
    except BaseException:
        _stop(path, save=False)
        raise
    _stop(path, save=True)


def _prepared(directory: str | os.PathLike[str]) -> Path:
    """Returns a directory that a profile fits into."""
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            f"`directory` is {directory!r}, of type {type(directory).__name__}; "
            "expected a path. Pass a string."
        )
    path = Path(directory)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"`directory` is {str(path)!r}, which cannot be made ({error.strerror}); "
            "expected a folder for the profile. Pass another one."
        ) from error
    free = shutil.disk_usage(path).free
    if free < _MIN_FREE_BYTES:
        raise OSError(
            f"`directory` is {str(path)!r}, where {format_bytes(free)} are free; "
            f"expected {format_bytes(_MIN_FREE_BYTES)} for a profile. Free some room, "
            "or pass another one."
        )
    return path


def _stop(path: Path, *, save: bool) -> None:
    try:
        tf.profiler.experimental.stop(save=save)
    except tf.errors.UnavailableError as error:
        if not save:
            return  # stopped inside the block, which failed anyway
        raise RuntimeError(
            "TensorFlow's profiler was stopped inside the block; expected it to run to "
            "its end. Remove `tf.profiler.experimental.stop()` or the callback that "
            "calls it."
        ) from error
    except tf.errors.OpError as error:
        raise OSError(
            f"The profile could not be written to {str(path)!r} ({error.message}); "
            "expected a folder with room. Free some, or pass another `directory`."
        ) from error
