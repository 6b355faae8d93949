"""Layers that do in the model what a pipeline does: scale, fill, limit."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.records.record import Record

# x + shift is exact in float32 for every x in [0, 255] if both fit 24 bits.
_FLOAT32_BITS = 24
_LARGEST_PIXEL = 255.0
# What float64 itself cannot tell, once `offset / scale` was computed in it.
_FLOAT64_NOISE = 4 * 2.0**-53
# What float32 holds without loss.
_FITS_FLOAT32 = ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16")


@keras.saving.register_keras_serializable(package="tfamp")
class Rescale(keras.layers.Layer):
    """Computes `x * scale + offset` for pixels, in the layer's compute dtype.

    Put it first in the model and feed it uint8, a quarter of float32's size. The sum is
    made in float32 before the product and rounded once, so float16 and bfloat16 get the
    value nearest to the true one; of `keras.layers.Rescaling` 82 % of 256 are not.

    Args:
        scale: Factor, not 0; one number, or one for each channel (the last axis).
        offset: What is added after the factor; likewise.
        **kwargs: As for every layer: `name`, `dtype`, ...
    """

    def __init__(self, scale: Any = 1 / 255, offset: Any = 0.0, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.scale = _numbers("scale", scale)
        self.offset = _numbers("offset", offset)
        if not np.all(np.asarray(self.scale)):
            raise ValueError(
                f"`scale` is {self.scale!r}; expected numbers other than 0. Pass 1 / "
                "255 for [0, 1]."
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
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or not array.size or not np.isfinite(array).all():
        raise ValueError(
            f"`{argument}` is {value!r}; expected a finite number, or one for each "
            f"channel. Pass `{argument}=0.5` or `{argument}=[0.1, 0.2, 0.3]`."
        )
    return array.tolist()


def _steps(
    scale: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """Returns shift, factor and rest: x -> (x + shift) * factor + rest."""
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
    fill: tuple[float, ...]  # written for NaN; NaN to leave it
    lower: tuple[float, ...]  # smaller values become this; -inf for no limit
    upper: tuple[float, ...]
    center: tuple[float, ...]  # subtracted
    width: tuple[float, ...]  # divided by


@keras.saving.register_keras_serializable(package="tfamp")
class Condition(keras.layers.Layer):
    """Fills missing values, limits outliers and scales, feature by feature.

    Made by `Statistics.as_layer`, and the first layer of a model: its constants are
    part of the model's file, so serving does to a value what training did. It computes
    in float32, or float64 where that would lose digits, whatever the dtype policy. To
    keep the digits of 64-bit inputs up to the layer, declare
    `keras.Input(..., dtype="float64")` or "int64": Keras casts to float32 otherwise.

    Inputs are a tensor `(..., features)`, or a dict of columns, `(batch, features)`,
    or `(batch,)` and `(batch, 1)` for scalars, which are joined along the last axis in
    the order of `rules`, `ColumnRule`s or their dicts.
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
                f"{names!r}. Pass the inputs by name."
            )
        columns = []
        for rule in self.rules:
            values = self._condition(inputs[rule.name], rule)
            has_axis = (values.shape.rank or 0) > 1 and values.shape[-1] == 1
            lacks_axis = rule.scalar and not has_axis
            columns.append(tf.expand_dims(values, -1) if lacks_axis else values)
        return tf.concat(columns, axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns all constants, exactly."""
        rules = [rule.to_dict() for rule in self.rules]
        return {**super().get_config(), "rules": rules, "named": self.named}

    def _condition(self, values: Any, rule: ColumnRule) -> tf.Tensor:
        values = tf.convert_to_tensor(values)
        size = values.shape[-1] if values.shape.rank else None
        is_wrong = not rule.scalar and size not in (None, len(rule.fill))
        if is_wrong or values.dtype == tf.string:
            raise ValueError(
                f"Column {rule.name!r} is {values.dtype.name} of the shape "
                f"{tuple(values.shape)}; expected numbers, with a last axis of "
                f"{len(rule.fill)} features. Fit statistics on such inputs."
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

        values = (tf.cast(values, dtype) - constants(center)) * constants(1 / width)
        values += constants(rest / width)
        # Before any comparison, which runtimes may make a minimum that loses NaN.
        is_missing = tf.math.is_nan(values)
        lower, upper = scaled(rule.lower), scaled(rule.upper)
        values = tf.where(values < lower, lower, values)
        values = tf.where(values > upper, upper, values)
        fill = np.clip(rule.fill, rule.lower, rule.upper)
        values = tf.where(is_missing, scaled(fill), values)
        # By way of float32: float64 is not cast to bfloat16 by every device.
        return tf.cast(tf.cast(values, "float32"), self.compute_dtype)
