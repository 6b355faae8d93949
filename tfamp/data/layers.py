"""Layers that do in the model what a pipeline does: scale, fill, limit."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records.record import Record

# x + shift is exact in float32 for every x in [0, 255] if the shift is a multiple of
# 2**-15 and the sum stays below 2**9: 24 bits.
_FLOAT32_BITS = 24
_LARGEST_PIXEL = 255.0
# What float64 itself cannot tell, once `offset / scale` was computed in it.
_FLOAT64_NOISE = 4 * 2.0**-53
# What float32 holds without loss.
_FITS_FLOAT32 = ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16")


@keras.saving.register_keras_serializable(package="tfamp")
class Rescale(keras.layers.Layer):
    """Computes `x * scale + offset` for pixels, in the layer's compute dtype.

    Put it first in the model and feed it uint8: the batch is a quarter of float32's
    size on its way to the device. The sum is made in float32 before the product and
    rounded once, so float16 and bfloat16 get the value nearest to the true one, and
    float32 one off by less than 2 units in the last place. Of `keras.layers.Rescaling`
    to [-1, 1] 82 % of the 256 values are not the nearest in bfloat16.

    Args:
        scale: Factor, not 0; one number, or one for each channel (the last axis).
        offset: What is added after the factor; likewise.
        **kwargs: As for every layer: `name`, `dtype`, ...

    Example:
        >>> layer = Rescale(1 / 127.5, -1.0)
        >>> layer(np.array([0, 255], np.uint8)).numpy().tolist()
        [-1.0, 1.0]
    """

    def __init__(self, scale: Any = 1 / 255, offset: Any = 0.0, **kwargs: Any) -> None:
        # A float input is not rounded before it is scaled either.
        super().__init__(autocast=False, **kwargs)
        self.scale = _numbers("scale", scale)
        self.offset = _numbers("offset", offset)
        if not np.all(np.asarray(self.scale)):
            raise ValueError(
                f"`scale` is {self.scale!r}; expected numbers other than 0, which "
                "would make every pixel the same. Pass 1 / 255 for [0, 1]."
            )
        self._shift, self._factor, self._rest = _steps(
            np.asarray(self.scale), np.asarray(self.offset)
        )
        self.supports_masking = True

    def call(self, inputs: Any) -> Any:
        """Returns the scaled inputs in the compute dtype."""
        x = tf.cast(inputs, tf.float32)
        if self._shift is not None:
            x = x + self._shift
        x = x * self._factor
        if self._rest is not None:
            x = x + self._rest
        return tf.cast(x, self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments; the numbers as they were given."""
        return {**super().get_config(), "scale": self.scale, "offset": self.offset}


def _numbers(argument: str, value: Any) -> float | list[float]:
    """Returns a number or a list of numbers, as JSON keeps them exactly."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        array = np.asarray(np.nan)
    if array.ndim > 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError(
            f"`{argument}` is {value!r}; expected a finite number, or a list of one "
            f"for each channel. Pass `{argument}=0.5` or `{argument}=[0.1, 0.2, 0.3]`."
        )
    return array.tolist()


def _steps(
    scale: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """Returns shift, factor and rest: x -> (x + shift) * factor + rest.

    The shift is `offset / scale` on the grid where its sum with a pixel is exact, so
    that nothing cancels; the rest is what the grid leaves. None for a step that does
    nothing. All numbers are float64.
    """
    wanted = offset / scale
    largest = np.abs(wanted) + _LARGEST_PIXEL
    grid = np.exp2(np.ceil(np.log2(largest + 1)) - _FLOAT32_BITS)
    shift = np.round(wanted / grid) * grid
    rest = wanted - shift
    rest = np.where(np.abs(rest) <= _FLOAT64_NOISE * np.abs(wanted), 0.0, rest) * scale
    return (
        np.asarray(shift, np.float32) if np.any(shift) else None,
        np.asarray(scale, np.float32),
        np.asarray(rest, np.float32) if np.any(rest) else None,
    )


@dataclasses.dataclass(frozen=True)
class ColumnRule(Record):
    """What the layer does to one column, feature by feature."""

    name: str
    scalar: bool  # whether an example has one value, without an axis
    missing_values: tuple[float, ...]  # that stand for a missing value, besides NaN
    fill: tuple[float, ...]  # written for a missing value; NaN to leave it as NaN
    lower: tuple[float, ...]  # smaller values become this; -inf for no limit
    upper: tuple[float, ...]
    center: tuple[float, ...]  # subtracted
    width: tuple[float, ...]  # divided by


@keras.saving.register_keras_serializable(package="tfamp")
class Condition(keras.layers.Layer):
    """Fills missing values, limits outliers and scales, feature by feature.

    Made by `Statistics.as_layer`, and the first layer of a model: its constants are
    part of the model's file, so serving does to a value what training did.

    It computes in float32, or float64 where that would lose digits, whatever the dtype
    policy; only the result is in the compute dtype. To keep the digits of 64-bit inputs
    up to the layer, declare `keras.Input(..., dtype="float64")` or "int64": Keras casts
    to float32 otherwise.

    Inputs are a tensor `(..., features)`, or a dict of columns, `(batch, features)`,
    or `(batch,)` and `(batch, 1)` for scalars, which are joined along the last axis in
    the order of `rules`. Single examples, without the batch axis, are taken as well.

    Args:
        rules: A `ColumnRule`, or its dict, for each column.
        named: Whether inputs are a dict.
        **kwargs: As for any layer: `name`, `dtype`.

    Example:
        >>> import numpy as np
        >>> from tfamp.data.statistics import fit_statistics
        >>> pay = np.array([1.0, 2.0, 3.0, np.nan], np.float32)
        >>> layer = fit_statistics(pay).as_layer(clip=None)
        >>> layer(np.array([2.0, np.nan], np.float32)).numpy()
        array([0., 0.], dtype=float32)
    """

    def __init__(
        self,
        rules: Sequence[ColumnRule | Mapping[str, Any]],
        *,
        named: bool,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("trainable", None)  # of a config
        super().__init__(autocast=False, trainable=False, **kwargs)
        self.rules = tuple(
            rule if isinstance(rule, ColumnRule) else ColumnRule.from_dict(rule)
            for rule in rules
        )
        self.named = named
        self.supports_masking = not named

    def call(self, inputs: Any) -> Any:
        """Returns the conditioned inputs in the compute dtype."""
        if not self.named:
            return self._condition(inputs, self.rules[0])
        names = tuple(rule.name for rule in self.rules)
        found = tuple(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        if not isinstance(inputs, Mapping) or not set(names) <= set(found):
            raise ValueError(
                f"Layer {self.name!r} got {found!r}; expected a dict with the columns "
                f"{names!r}. Pass the inputs by name, as the statistics were read."
            )
        columns = []
        for rule in self.rules:
            values = self._condition(inputs[rule.name], rule)
            # (batch, 1) comes from `keras.Input(shape=(1,))` and has its axis already.
            has_axis = (values.shape.rank or 0) > 1 and values.shape[-1] == 1
            lacks_axis = rule.scalar and not has_axis
            columns.append(tf.expand_dims(values, -1) if lacks_axis else values)
        return tf.concat(columns, axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns all constants, exactly."""
        rules = [rule.to_dict() for rule in self.rules]
        return {**super().get_config(), "rules": rules, "named": self.named}

    def _condition(self, values: Any, rule: ColumnRule) -> tf.Tensor:
        """Returns a column, filled, limited and scaled.

        It is scaled first, and then filled and limited by scaled constants, which are
        made in float64: a far center costs these no digits.
        """
        values = tf.convert_to_tensor(values)
        if values.dtype == tf.string:
            raise TypeError(
                f"Column {rule.name!r} is of dtype string; expected numbers, as its "
                "statistics are of. Convert it, or fit statistics again."
            )
        size = values.shape[-1] if values.shape.rank else None
        if not rule.scalar and size not in (None, len(rule.fill)):
            raise ValueError(
                f"Column {rule.name!r} has shape {tuple(values.shape)}; expected a "
                f"last axis of {len(rule.fill)} features, as in its statistics. Fit "
                "them on inputs of this shape."
            )
        # Runtimes of phones have no float64, so all that can do with float32 does.
        dtype = "float32" if values.dtype.name in _FITS_FLOAT32 else "float64"
        center, width = np.array(rule.center), np.array(rule.width)
        # What the center lacks in the dtype is added to what is scaled: two sums with
        # constants in a row are made one by TensorFlow's optimizer.
        rest = center.astype(dtype).astype(np.float64) - center

        def constants(array: np.ndarray) -> tf.Tensor:
            return tf.constant(array[0] if rule.scalar else array, dtype)

        def scaled(field: Any) -> tf.Tensor:
            return constants((np.array(field) - center) / width)

        missing = is_missing_tensor(values, rule.missing_values)
        values = (tf.cast(values, dtype) - constants(center)) * constants(1 / width)
        values += constants(rest / width)
        lower, upper = scaled(rule.lower), scaled(rule.upper)
        # A comparison with NaN is false: NaN stays NaN, unlike in some minimums.
        values = tf.where(values < lower, lower, values)
        values = tf.where(values > upper, upper, values)
        fill = np.clip(rule.fill, rule.lower, rule.upper)
        values = tf.where(missing, scaled(fill), values)
        # By way of float32: float64 is not cast to bfloat16 by every device.
        return tf.cast(tf.cast(values, "float32"), self.compute_dtype)


def suits(value: Any, dtype: Any) -> bool:
    """Whether a column of this dtype can hold the value.

    Example:
        >>> suits(-999.0, np.uint8), suits(-1.0, np.int8), suits(0.1, np.float32)
        (False, True, True)
    """
    dtype = np.dtype(dtype)
    if isinstance(value, str) or dtype.kind not in "iub":
        return isinstance(value, str) == (dtype.kind in "OSU")
    if dtype.kind == "b":
        return value in (0, 1)
    limits = np.iinfo(dtype)
    return float(value).is_integer() and limits.min <= value <= limits.max


def is_missing_tensor(values: tf.Tensor, missing_values: Sequence[Any]) -> tf.Tensor:
    """Returns which values are NaN or one that is missing, compared in their dtype."""
    is_float = values.dtype.is_floating
    missing = tf.math.is_nan(values) if is_float else tf.zeros_like(values, tf.bool)
    for value in missing_values:
        if suits(value, values.dtype.as_numpy_dtype):
            constant: Any = value
            if values.dtype != tf.string:
                constant = tf.cast(tf.constant(value, "float64"), values.dtype)
            missing = tf.logical_or(missing, tf.equal(values, constant))
    return missing
