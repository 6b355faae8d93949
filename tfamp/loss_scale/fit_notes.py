"""Notes on errors of memory in `fit`, `evaluate` and `predict` of a managed model."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layers import record_of
from tfamp.machine.memory import device_peak_bytes, machine_memory
from tfamp.machine.out_of_memory import explain, is_out_of_memory

_NOTED = "_tfamp_explained"


@contextlib.contextmanager
def around_run(model: keras.Model, *, training: bool) -> Iterator[None]:
    """Explains errors of memory of a managed model, in `fit` where it is training.

    An error is raised as it came, with the explanation as a note; Python 3.10 has no
    notes, so there it is logged.
    """
    try:
        yield
    except Exception as error:
        if record_of(model) is not None and is_out_of_memory(error):
            _add_note(error, model, training=training)
        raise


def _add_note(error: Exception, model: keras.Model, *, training: bool) -> None:
    # `fit` evaluates too: the inner one has explained it already.
    if getattr(error, _NOTED, False):
        return
    setattr(error, _NOTED, True)
    try:
        dtypes = structure.compute_dtypes(model)
        optimizer = getattr(model, "optimizer", None) if training else None
        held = {"weights": structure.bytes_of(model.weights)}
        if optimizer is not None:
            held["optimizer slots"] = structure.bytes_of(optimizer.variables)
        layers = [path for path, each, _ in structure.walk(model) if each is not model]
        has_gpu = bool(tf.config.list_physical_devices("GPU"))
        text = explain(
            str(error),
            layers=layers,
            held=held,
            memory=machine_memory(),
            peak_bytes=device_peak_bytes() if has_gpu else None,
            training=training,
            computes_in=dtypes.pop() if len(dtypes) == 1 else "",
        )
    except Exception as reason:  # whatever is asked of a full device may fail in turn
        logging.info("The error of memory could not be explained: %s", reason)
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.error("%s", text)
