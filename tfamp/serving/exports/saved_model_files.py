"""Writes a SavedModel that stores each weight once, for TensorFlow and TF Serving."""

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tensorflow as tf

from tfamp.serving.exports.request import Request
from tfamp.serving.exports.tracing import SIGNATURE, Traced


def write(traced: Traced, folder: Path, request: Request) -> None:
    """Writes `saved_model.pb` and `variables/` into a folder."""
    del request  # the trace is of a model in the dtype already
    with quiet("tensorflow", "absl"):
        tf.saved_model.save(
            traced.module, str(folder), signatures={SIGNATURE: traced.function}
        )


@contextlib.contextmanager
def written(traced: Traced) -> Iterator[str]:
    """Yields a folder with a SavedModel, from which other formats are converted."""
    with tempfile.TemporaryDirectory() as folder:
        write(traced, Path(folder), Request("saved_model", "float32"))
        yield folder


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Keeps loggers of converters quiet: what goes wrong is found by running files."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
