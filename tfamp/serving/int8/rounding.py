"""What int8 leaves of weights and activations: rounded, and back in float32."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfamp.keras_hooks import structure

# A channel this many times as large as the one in the middle leaves the others less
# than three bits of the eight.
OUTLIER = 20.0
_WEIGHT_STEPS = 127
_ACTIVATION_STEPS = 255
# What has fewer dimensions, such as a bias, stays in float in every runtime.
_MIN_RANK = 2


def rounded_weights(values: np.ndarray, channels: Sequence[int]) -> np.ndarray:
    """Returns weights after int8 with one scale for each channel, symmetric around 0.

    Args:
        values: A kernel.
        channels: Dimensions that have a scale of their own for each index; none for
            one scale.

    Example:
        >>> kernel = np.array([[127.0, 0.4], [1.4, 0.2]])
        >>> rounded_weights(kernel, (1,)).round(2).tolist()
        [[127.0, 0.4], [1.0, 0.2]]
        >>> rounded_weights(kernel, ()).tolist()
        [[127.0, 0.0], [1.0, 0.0]]
    """
    others = tuple(axis for axis in range(values.ndim) if axis not in channels)
    largest = np.abs(values).max(axis=others, keepdims=True, initial=0.0)
    scale = np.where(largest > 0, largest / _WEIGHT_STEPS, 1.0)
    return (np.round(values / scale) * scale).astype(values.dtype)


def rounded_activations(values: np.ndarray) -> np.ndarray:
    """Returns activations after uint8 with one scale and one zero point for all.

    Example:
        >>> rounded_activations(np.array([0.0, 0.3, 1.2, 255.0])).tolist()
        [0.0, 0.0, 1.0, 255.0]
    """
    low = min(float(values.min(initial=0.0)), 0.0)
    high = max(float(values.max(initial=0.0)), 0.0)
    scale = (high - low) / _ACTIVATION_STEPS
    if not (scale > 0 and np.isfinite(scale)):
        return values
    zero = np.round(-low / scale)
    steps = np.clip(np.round(values / scale) + zero, 0, _ACTIVATION_STEPS)
    return ((steps - zero) * scale).astype(values.dtype)


def outlier_ratio(values: np.ndarray) -> tuple[int, float]:
    """Returns the largest channel of activations, and how many times the middle it is.

    Args:
        values: Of shape (batch, ..., channels).

    Example:
        >>> outlier_ratio(np.array([[1.0, -1.0, 50.0], [-1.0, 1.0, 20.0]]))
        (2, 50.0)
    """
    if values.ndim < 2 or values.shape[-1] < 2:
        return 0, 1.0
    sizes = np.abs(values).reshape(-1, values.shape[-1]).max(axis=0, initial=0.0)
    # Channels that are 0 for all examples, as behind a ReLU, need no steps.
    middle = float(np.median(sizes[sizes > 0])) if (sizes > 0).any() else 0.0
    channel = int(sizes.argmax())
    return channel, float(sizes[channel]) / middle if middle else 1.0


def kernels_of(layer: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """Returns the weights that int8 rounds, each with its channels; none for most.

    An embedding is looked up, not multiplied: runtimes leave it, or round its rows.
    """
    if not isinstance(layer, keras.layers.Layer):
        return []
    if isinstance(layer, keras.layers.Embedding):
        return []
    holders = [each for _, each, _ in structure.walk(layer)]
    if not isinstance(layer, (keras.layers.RNN, keras.layers.TimeDistributed)):
        holders = [layer]
    return [
        (weight, _channels(holder, weight))
        for holder in holders
        for weight in structure.own_weights(holder)
        if keras.backend.is_float_dtype(weight.dtype) and len(weight.shape) >= _MIN_RANK
    ]


def _channels(layer: Any, weight: Any) -> tuple[int, ...]:
    """Returns the dimensions of a kernel that are there in the outputs."""
    if isinstance(layer, keras.layers.EinsumDense):
        inputs, output = layer.equation.split("->")
        letters = inputs.split(",")[1].replace(".", "")
        if len(letters) == len(weight.shape):
            return tuple(i for i, letter in enumerate(letters) if letter in output)
    if isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)):
        return (len(weight.shape) - 2, len(weight.shape) - 1)
    return (len(weight.shape) - 1,)
