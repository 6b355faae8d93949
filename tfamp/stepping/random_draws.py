"""Draws the same random numbers in every dtype, so that runs can be compared.

Relies on: `keras.random` and layers drawing by the functions of the backend's `random`
module, as attributes of it, from the state of their seed.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfamp.keras_hooks import backend
from tfamp.keras_hooks.patches import replaced

_HALF = ("float16", "bfloat16")
_BY_DTYPE = ("normal", "truncated_normal", "uniform", "gamma", "beta", "binomial")


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Has this thread draw in float32 inside the block, and round what is drawn.

    TensorFlow draws other numbers for half precision from the same seed, so a dropout
    mask in float16 is another one than in float32.
    """
    owner = threading.get_ident()

    def in_this_thread(new: Callable[..., Any], old: Callable[..., Any]) -> Any:
        @functools.wraps(old)
        def draw(*args: Any, **kwargs: Any) -> Any:
            is_here = threading.get_ident() == owner
            return (new if is_here else old)(*args, **kwargs)

        return draw

    def by_dtype(old: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            asked = backend.standardize_dtype(dtype)
            if asked not in _HALF:
                return old(*args, dtype=dtype, **kwargs)
            return tf.cast(old(*args, dtype="float32", **kwargs), asked)

        return in_this_thread(draw, old)

    def dropout(inputs: Any, rate: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = tf.convert_to_tensor(inputs)
        if inputs.dtype.name not in _HALF:
            return stock_dropout(inputs, rate, *args, **kwargs)
        ones = tf.ones(tf.shape(inputs), tf.float32)
        kept = stock_dropout(ones, rate, *args, **kwargs)
        return inputs * tf.cast(kept, inputs.dtype)

    random = backend.random
    stock_dropout = random.dropout
    with replaced(
        random,
        dropout=in_this_thread(dropout, stock_dropout),
        **{name: by_dtype(getattr(random, name)) for name in _BY_DTYPE},
    ):
        yield
