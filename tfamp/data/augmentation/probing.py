"""Whether augmented values still fit the dtype that the model computes in."""

import functools
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data.augmentation.chain import Chain
from tfamp.formats import FORMATS, Format, spacing

_NUM_DRAWS = 8
_UNKNOWN_SIZE = 32
# Two bits of resolution: a brighter or flatter image loses less than one.
_MIN_GROWTH = 4.0
# Below this part of the values' own spread, rounding is no finer than a pixel's steps.
_COARSE = 1 / 256


def check_range(
    chain: Chain,
    spec: tf.TensorSpec,
    compute_dtype: str,
    *,
    strength: float = 1.0,
    stacklevel: int = 2,
) -> None:
    """Raises or warns where a step leads out of what a compute dtype can hold.

    Made-up images of the whole value range go through, several draws of them, since
    reading real ones here would disturb caches and counts of errors.

    Args:
        chain: The steps.
        spec: Of one image.
        compute_dtype: "float16", "bfloat16" or "float32".
        strength: The largest that is used.
        stacklevel: As for `warnings.warn`, seen from the caller of this function.

    Raises:
        ValueError: A step gives NaN, inf or more than the dtype can hold.
    """
    format = FORMATS[compute_dtype]
    warned: set[str] = set()
    for draw in range(_NUM_DRAWS if strength > 0 else 0):
        image = _made_up(chain, spec, draw)
        before = _resolution(format, image.numpy())
        found: list[tuple[str, np.ndarray]] = []
        chain.run(
            image[None],
            tf.constant(strength, tf.float32),
            tf.constant([draw, 0], tf.int32),
            functools.partial(_note, found),
        )
        for name, values in found:
            _check_finite(name, values, format)
            after = _resolution(format, values)
            is_coarse = after > max(_COARSE, _MIN_GROWTH * before)
            if is_coarse and name not in warned:
                warned.add(name)
                largest = float(np.abs(values).max())
                warnings.warn(
                    f"`{name}` gives values up to {largest:.4g} that spread by "
                    f"{values.std():.3g}; {format.name} tells them apart only in steps "
                    f"of {spacing(format, largest):.3g}. Expected a resolution as "
                    "before the step, within a factor of 4. Subtract the offset inside "
                    "it, or scale in the model.",
                    stacklevel=stacklevel + 1,
                )
            before = after


def _note(found: list[tuple[str, np.ndarray]], name: str, value: tf.Tensor) -> None:
    """Keeps what a step gave."""
    found.append((name, tf.cast(value, tf.float64).numpy()))


def _made_up(chain: Chain, spec: tf.TensorSpec, draw: int) -> tf.Tensor:
    """Returns an image that covers the value range: half noise, a quarter each end."""
    low, high = chain.value_range or (
        (0.0, 1.0)
        if spec.dtype.is_floating
        else (0.0, min(255.0, float(spec.dtype.max)))
    )
    random = np.random.default_rng(draw)
    shape = [size or _UNKNOWN_SIZE for size in spec.shape]
    noise = random.uniform(-0.5, 1.5, shape).clip(0, 1)
    return tf.cast(tf.constant(low + (high - low) * noise), spec.dtype)


def _resolution(format: Format, values: np.ndarray) -> float:
    """Returns the format's step at the largest value, as a part of the spread."""
    largest = float(np.abs(values.astype(np.float64)).max(initial=0.0))
    spread = float(values.astype(np.float64).std())
    if spread == 0 or not largest <= format.max:
        return np.finfo(np.float64).tiny
    return spacing(format, largest) / spread


def _check_finite(name: str, values: np.ndarray, format: Format) -> None:
    """Raises where values are not finite, or would not be in the format."""
    largest: Any = np.abs(values).max(initial=0.0)
    if np.isfinite(largest) and largest <= format.max:
        return
    raise ValueError(
        f"`{name}` gives values up to {float(largest)!r} at full strength; expected "
        f"what {format.name} can hold, up to {format.max!r}. Scale images before it, "
        "change them less, or pass their own `value_range`."
    )
