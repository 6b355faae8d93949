"""The states of random generators that are no variables of a model."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf


def take_random() -> dict[str, np.ndarray]:
    """Returns the states of Python's, NumPy's and TensorFlow's global generators.

    Stateless draws and Keras's seed generators, which Dropout and the like use, need
    none of them; operations such as `tf.random.normal` keep a state of their own that
    cannot be read.
    """
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python/version": np.array(version, np.int64),
        "python/internal": np.array(internal, np.uint32),
        "python/gauss": np.array(np.nan if gauss is None else gauss),
        "numpy/kind": np.frombuffer(str(kind).encode(), np.uint8),
        "numpy/keys": np.array(keys, np.uint32),
        "numpy/position": np.array([position, has_gauss], np.int64),
        "numpy/gauss": np.array(cached, np.float64),
    }
    state = _generator_state()
    if state is not None:
        states["tensorflow/state"] = state
    return states


def put_random(states: Mapping[str, np.ndarray]) -> None:
    """Gives the generators the states that `take_random` returned.

    Example:
        >>> before = take_random()
        >>> first = random.random(), float(np.random.rand())
        >>> put_random(before)
        >>> first == (random.random(), float(np.random.rand()))
        True
    """
    gauss = float(states["python/gauss"])
    random.setstate(
        (
            int(states["python/version"]),
            tuple(states["python/internal"].tolist()),
            None if np.isnan(gauss) else gauss,
        )
    )
    position, has_gauss = states["numpy/position"].tolist()
    np.random.set_state(
        (
            states["numpy/kind"].tobytes().decode(),
            states["numpy/keys"],
            position,
            has_gauss,
            float(states["numpy/gauss"]),
        )
    )
    if "tensorflow/state" in states:
        generator: Any = tf.random.get_global_generator()
        if generator.state.shape == states["tensorflow/state"].shape:
            generator.state.assign(states["tensorflow/state"])


def _generator_state() -> np.ndarray | None:
    """Returns the state of TensorFlow's global generator, one replica's alone."""
    generator: Any = tf.random.get_global_generator()
    try:
        return np.array(generator.state.numpy())
    except (AttributeError, NotImplementedError, ValueError):
        return None  # made under a strategy, with a state for each replica
