"""Leaves a model as it was: puts it back, copies it, draws the same numbers again."""

import contextlib
import functools
import random
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.keras_hooks import backend, epochs, saved_state
from tfamp.keras_hooks.optimizers import optimizers_of
from tfamp.keras_hooks.patches import replaced
from tfamp.models import load_model
from tfamp.records.checks import first_line
from tfamp.records.formats import HALF
from tfamp.stepping import ALONE
from tfamp.stepping.snapshots import named_variables

_BY_DTYPE = ("normal", "truncated_normal", "uniform", "gamma", "beta", "binomial")


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Has this thread draw in float32 and round: TensorFlow draws others in half."""
    owner, stock = threading.get_ident(), backend.random
    stock_dropout = stock.dropout

    def by_dtype(old: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(old)
        def draw(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            asked = backend.standardize_dtype(dtype)
            if asked not in HALF or threading.get_ident() != owner:
                return old(*args, dtype=dtype, **kwargs)
            return tf.cast(old(*args, dtype="float32", **kwargs), asked)

        return draw

    @functools.wraps(stock_dropout)
    def dropout(inputs: Any, rate: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tf.convert_to_tensor(inputs)
        if inputs.dtype.name not in HALF or threading.get_ident() != owner:
            return stock_dropout(inputs, rate, *args, **kwargs)
        ones = tf.ones(tf.shape(inputs), tf.float32)
        kept = stock_dropout(ones, rate, *args, **kwargs)
        return inputs * tf.cast(kept, inputs.dtype)

    draws = {name: by_dtype(getattr(stock, name)) for name in _BY_DTYPE}
    with ALONE, replaced(stock, dropout=dropout, **draws):
        yield


def take_random() -> dict[str, Any]:
    """Returns the states of generators of Python, NumPy, Keras and TensorFlow."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    held: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    for name, state in _variables().items():
        # Replicas have one each, which cannot be read.
        with contextlib.suppress(AttributeError, NotImplementedError, ValueError):
            held[name] = np.array(state.numpy()).tolist()
    return held


def put_random(held: Mapping[str, Any]) -> None:
    """Puts back what `take_random` gave, also where JSON has made lists of it."""
    version, keys, gauss = held["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, keys, *rest = held["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    for name, state in _variables().items():
        if held.get(name) is not None:
            dtype = tf.as_dtype(state.dtype).as_numpy_dtype
            state.assign(np.array(held[name], dtype))


def _variables() -> dict[str, Any]:
    """Returns the variables of the generators of Keras and TensorFlow in use."""
    of_keras, generator = epochs.global_seed_state(), backend.global_generator()
    found = {"keras": of_keras, "tensorflow": getattr(generator, "state", None)}
    return {name: state for name, state in found.items() if state is not None}


@contextlib.contextmanager
def seeds_put_back() -> Iterator[None]:
    """Restores the program's random generators after the block."""
    held = take_random()
    try:
        with backend.global_seeds():
            yield
    finally:
        put_random(held)


def copied(model: keras.Model, *, instead: str) -> keras.Model:
    """Returns an uncompiled copy, through a file or in memory, or names `instead`."""
    with seeds_put_back(), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.keras")
        try:
            model.save(path)
            return load_model(path, compile=False, safe_mode=False)
        except (TypeError, ValueError, NotImplementedError) as error:
            try:
                return saved_state.copied_in_memory(model)
            except Exception as second:  # of whatever objects the model holds
                raise ValueError(
                    f"Cannot copy model {model.name!r}: {first_line(error)} In memory: "
                    f"{first_line(second)} Give its classes a `get_config` that "
                    f"returns their arguments, or {instead}."
                ) from error


@contextlib.contextmanager
def unchanged(model: keras.Model) -> Iterator[None]:
    """Restores every variable of a built model, bit by bit, also after an error.

    The program's random generators too. Inside learning rates are 0 where they are
    variables. Not restored: variables that only the train step makes.
    """
    # Each replica's own, since a sum over them cannot be shared out again exactly.
    parts = [part for named in named_variables(model) for part in named.parts(model)]
    # Copies: NumPy may look at the very memory that the step writes.
    held = [part.numpy().copy() for part in parts]
    try:
        with seeds_put_back():
            for optimizer in optimizers_of(model):
                if isinstance(optimizer.learning_rate, keras.Variable):
                    optimizer.learning_rate.assign(0.0)
            yield
    finally:
        # Metrics that were made meanwhile go to their start, others back to `held`.
        model.reset_metrics()
        for part, bits in zip(parts, held, strict=True):
            part.assign(bits)
