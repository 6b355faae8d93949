"""What stands around `fit`, `evaluate` and `predict` of a managed model."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from tfamp.keras_hooks import structure
from tfamp.keras_hooks.layer_record import record_of
from tfamp.loss_scale.fit import learning_rate_advice
from tfamp.machine.allocators import machine_memory
from tfamp.machine.memory import device_peak_bytes
from tfamp.machine.out_of_memory import explain, is_out_of_memory

_NOTED = "_tfamp_explained"


@contextlib.contextmanager
def around_run(
    model: keras.Model, name: str, arguments: Mapping[str, Any]
) -> Iterator[None]:
    """Advises on the learning rate of `fit`, and explains errors of memory.

    An error is raised as it came, with the explanation as a note; Python 3.10 has no
    notes, so there it is logged.

    Args:
        model: Any model; nothing is done for one that is not managed.
        name: "fit", "evaluate" or "predict".
        arguments: Its arguments, by name.
    """
    if record_of(model) is None:
        yield
        return
    is_fit = name == "fit"
    with (
        learning_rate_advice.watched(model, arguments)
        if is_fit
        else contextlib.nullcontext()
    ):
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                _add_note(error, model, training=is_fit)
            raise


def _add_note(error: Exception, model: keras.Model, *, training: bool) -> None:
    # `fit` evaluates too: the inner one has told already.
    if getattr(error, _NOTED, False):
        return
    setattr(error, _NOTED, True)
    try:
        text = _explanation(error, model, training)
    except Exception as reason:  # whatever is asked of a full device may fail in turn
        logging.info("The error of memory could not be explained: %s", reason)
        return
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        logging.error("%s", text)


def _explanation(error: Exception, model: keras.Model, training: bool) -> str:
    dtypes = structure.compute_dtypes(model)
    optimizer = getattr(model, "optimizer", None) if training else None
    held = {"weights": structure.bytes_of(model.weights)}
    if optimizer is not None:
        held["optimizer slots"] = structure.bytes_of(optimizer.variables)
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    return explain(
        str(error),
        layers=[path for path, layer, _ in structure.walk(model) if layer is not model],
        held=held,
        memory=machine_memory(),
        peak_bytes=device_peak_bytes() if has_gpu else None,
        training=training,
        computes_in=dtypes.pop() if len(dtypes) == 1 else "",
    )
