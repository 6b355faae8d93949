"""The layer that treats inputs at serving as the training data was treated."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfamp.data.statistics.options import suits
from tfamp.records import checks
from tfamp.records.record import Record

# A float32 center may be off by this part of the width, half of float32's spacing at
# 1: what is near it is subtracted without rounding, so that is all the error.
_MAX_CENTER_ERROR = 2**-24
# Beside a smaller width a quotient by it in float32 is not exact to its last digits.
_LEAST_WIDTH = float(np.finfo(np.float32).smallest_normal)
# A transform rounds to 2**-24 of its result, so this far from 0 beside its scale
# float32 is still right to a millionth of a standard deviation.
_MAX_OFFSET = 16
# All are monotonic, so clipping before one or behind it takes the same values.
TRANSFORMS = ("log1p", "signed_log")
# What float32 holds without loss.
_FITS_FLOAT32 = ("bfloat16", "float16", "float32", "int8", "uint8", "int16", "uint16")


@dataclasses.dataclass(frozen=True)
class ColumnRule(Record):
    """What the layer does to one column, feature by feature.

    Args:
        name: Of the column.
        text: Whether it holds strings: these are filled and nothing else.
        scalar: Whether an example has one value, without an axis.
        missing_values: Numbers that stand for a missing value, besides NaN.
        missing_texts: Texts that do.
        fill: What is written for a missing value; NaN to leave it as NaN.
        fill_text: What is written for a missing text; None to leave it.
        lower: Smaller values become this; -inf for no limit.
        upper: Larger ones become this; inf for no limit.
        center: Subtracted before the transform.
        width: What is divided by before the transform.
        transform: One of `TRANSFORMS`; None for none.
        offset: Subtracted behind the transform.
        scale: What is divided by behind the transform.
    """

    name: str
    text: bool
    scalar: bool
    missing_values: tuple[float, ...] = ()
    missing_texts: tuple[str, ...] = ()
    fill: tuple[float, ...] = ()
    fill_text: str | None = None
    lower: tuple[float, ...] = ()
    upper: tuple[float, ...] = ()
    center: tuple[float, ...] = ()
    width: tuple[float, ...] = ()
    transform: str | None = None
    offset: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.transform is not None:
            checks.choice("transform", self.transform, TRANSFORMS)

    def work_dtype(self, dtype: Any) -> str:
        """Returns the dtype to compute in before the offset is off.

        float64 where float32 would lose digits: inputs that it cannot hold, such as
        64-bit timestamps, and transforms of what is far from 0 beside its spread.
        Runtimes of phones have no float64, so all else does with float32.
        """
        if tf.as_dtype(dtype).name not in _FITS_FLOAT32:
            return "float64"
        with np.errstate(over="ignore"):
            has_range = np.isfinite(
                np.array([*self.center, *self.width], np.float32)
            ).all()
        offset, scale = np.array(self.offset), np.array(self.scale)
        is_far = (np.abs(offset) > _MAX_OFFSET * scale).any()
        if self.has_rests:
            is_far |= self.transform is not None
            is_far |= (np.array(self.width) < _LEAST_WIDTH).any()
        return "float32" if has_range and not is_far else "float64"

    @property
    def has_rests(self) -> bool:
        """Whether float32 constants are off by too much of the width."""
        _, rest = parts(self.center)
        return bool((np.abs(rest) > _MAX_CENTER_ERROR * np.array(self.width)).any())


def _rule_from(values: Mapping[str, Any]) -> ColumnRule:
    """Returns the rule in a model's file, of an earlier version too.

    These wrote an exponent, which only a transform that is gone had a use for.
    """
    return ColumnRule.from_dict({k: v for k, v in values.items() if k != "power"})


def parts(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns values in float32, and in float64 what that leaves, 0 if not finite.

    Example:
        >>> near, rest = parts([0.1])
        >>> float(near[0]) + float(rest[0]), bool(abs(rest[0]) < 2**-27)
        (0.1, True)
    """
    exact = np.array(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        near = exact.astype(np.float32)
        rest = exact - near.astype(np.float64)
    return near, np.where(np.isfinite(rest), rest, 0.0)


@keras.saving.register_keras_serializable(package="tfamp")
class Condition(keras.layers.Layer):
    """Fills missing values, limits outliers, transforms and scales, feature by feature.

    Made by `Statistics.as_layer`, and the first layer of a model: its constants are
    part of the model's file, so serving does to a value what training did.

    It takes inputs in their own dtype and computes in float32, or float64 where that
    would lose digits, whatever the dtype policy; only the result is in the compute
    dtype. A feature with mean 5e4 and standard deviation 1 has 3 distinct values in
    float16; here it is scaled first. To keep the digits of 64-bit inputs up to the
    layer, declare `keras.Input(..., dtype="float64")` or "int64": Keras casts to
    float32 otherwise, and casts float64 NumPy arrays in `fit` in any case.

    Inputs are a tensor `(..., features)`, or a dict of columns: `(batch, features)`,
    or `(batch,)` and `(batch, 1)` for scalars. Other keys of a dict are not looked
    at. Single examples, without the batch axis, are taken as well, so it also works
    in `Dataset.map`. Nothing is trained.

    Args:
        rules: A `ColumnRule`, or its dict, for each column.
        named: Whether inputs are a dict.
        output: "concat" joins the columns of a dict along the last axis, in the
            order of `rules`, `(batch, all features)`; "dict" keeps them apart. A
            lone tensor keeps its shape.
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
        output: Literal["concat", "dict"] = "concat",
        **kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, trainable=False, **kwargs)
        self.rules = tuple(
            rule if isinstance(rule, ColumnRule) else _rule_from(rule) for rule in rules
        )
        self.named = named
        self.output_form = output
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
        columns = {
            rule.name: self._condition(inputs[rule.name], rule) for rule in self.rules
        }
        if self.output_form == "dict":
            return columns
        for rule in self.rules:
            values = columns[rule.name]
            # (batch, 1) comes from `keras.Input(shape=(1,))` and has its axis already.
            has_axis = (values.shape.rank or 0) > 1 and values.shape[-1] == 1
            if rule.scalar and not has_axis:
                columns[rule.name] = tf.expand_dims(values, -1)
        return tf.concat([columns[name] for name in names], axis=-1)

    def get_config(self) -> dict[str, Any]:
        """Returns all constants, exactly."""
        config = super().get_config()
        # Fixed by this class.
        config.pop("trainable", None)
        return {
            **config,
            "rules": [rule.to_dict() for rule in self.rules],
            "named": self.named,
            "output": self.output_form,
        }

    def _condition(self, values: Any, rule: ColumnRule) -> tf.Tensor:
        """Returns a column, filled, limited, transformed and scaled."""
        values = tf.convert_to_tensor(values)
        check_column(values, rule)
        if rule.text:
            return fill_missing_text(values, rule)
        dtype = rule.work_dtype(values.dtype)

        def constants(field: tuple[float, ...]) -> tf.Tensor:
            return tf.constant(field[0] if rule.scalar else field, dtype)

        missing = is_missing_tensor(values, rule.missing_values)
        values = tf.cast(values, dtype)
        values = tf.where(missing, constants(rule.fill), values)
        # A comparison with NaN is false: NaN stays NaN, unlike in some minimums.
        lower, upper = constants(rule.lower), constants(rule.upper)
        has_rests = dtype == "float32" and rule.has_rests
        if has_rests:
            is_low = values < constants(_float32_bound(rule.lower, np.inf))
            is_high = values > constants(_float32_bound(rule.upper, -np.inf))
        else:
            is_low, is_high = values < lower, values > upper
        values = tf.where(is_low, lower, values)
        values = tf.where(is_high, upper, values)
        values -= constants(rule.center)
        if has_rests:
            chosen = ((missing, rule.fill), (is_low, rule.lower), (is_high, rule.upper))
            # TensorFlow's optimizer makes products of quotients, with other last bits.
            values *= constants(tuple(1 / np.array(rule.width)))
            values += _rest(rule, chosen, constants)
        else:
            values /= constants(rule.width)
        if rule.transform is not None:
            values = transformed(values, rule.transform)
            values = (values - constants(rule.offset)) / constants(rule.scale)
        # By way of float32: float64 is not cast to bfloat16 by every device.
        return tf.cast(tf.cast(values, "float32"), self.compute_dtype)


def _rest(
    rule: ColumnRule,
    chosen: Iterable[tuple[tf.Tensor, tuple[float, ...]]],
    constants: Callable[[tuple[float, ...]], tf.Tensor],
) -> tf.Tensor:
    """Returns what a column lacks as its constants are in float32, over its width.

    It is added to what is scaled: two sums with constants in a row are made one by
    TensorFlow's optimizer, which would round it away. `chosen` are masks, and what
    stands there in place of the values.
    """
    _, center = parts(rule.center)
    width = np.array(rule.width)
    rest = constants(tuple(-center / width))
    for where, values in chosen:
        _, own = parts(values)
        rest = tf.where(where, constants(tuple((own - center) / width)), rest)
    return rest


def _float32_bound(values: tuple[float, ...], toward: float) -> tuple[float, ...]:
    """Returns bounds that float32 numbers are beyond where they are beyond the exact.

    Example:
        >>> _float32_bound((2.0 + 2**-30,), np.inf)[0] - 2.0 == 2**-22
        True
    """
    near, rest = parts(values)
    is_inside = rest > 0 if toward > 0 else rest < 0
    moved = np.nextafter(near, np.float32(toward))
    return tuple(np.where(is_inside, moved, near).tolist())


def check_column(values: tf.Tensor, rule: ColumnRule) -> None:
    """Raises unless a column has the kind and the features of its rule."""
    if rule.text != (values.dtype == tf.string):
        expected = "text" if rule.text else "numbers"
        raise TypeError(
            f"Column {rule.name!r} is of dtype {values.dtype.name}; expected {expected}"
            ", as its statistics are of. Convert it, or fit statistics again."
        )
    if rule.scalar or rule.text:
        return
    size = values.shape[-1] if values.shape.rank else None
    if values.shape.rank == 0 or size not in (None, len(rule.fill)):
        raise ValueError(
            f"Column {rule.name!r} has shape {tuple(values.shape)}; expected a last "
            f"axis of {len(rule.fill)} features, as in its statistics. Fit them on "
            "inputs of this shape."
        )


def is_missing_tensor(values: tf.Tensor, missing_values: Sequence[float]) -> tf.Tensor:
    """Returns the same as `options.is_missing`, of a tensor."""
    is_float = values.dtype.is_floating
    missing = tf.math.is_nan(values) if is_float else tf.zeros_like(values, tf.bool)
    for value in missing_values:
        if suits(value, values.dtype.as_numpy_dtype):
            constant = tf.cast(tf.constant(value, "float64"), values.dtype)
            missing = tf.logical_or(missing, tf.equal(values, constant))
    return missing


def fill_missing_text(values: tf.Tensor, rule: ColumnRule) -> tf.Tensor:
    """Returns text with the missing ones filled."""
    if rule.fill_text is None:
        return values
    for text in rule.missing_texts:
        values = tf.where(tf.equal(values, text), rule.fill_text, values)
    return values


def transformed(values: Any, kind: str | None) -> Any:
    """Returns transformed values, of an array or a tensor; the last axis is features.

    "log1p" is log(1 + x), "signed_log" sign(x) log(1 + |x|).

    Example:
        >>> transformed(np.array([-1.0, 1.0]), "signed_log").round(3)
        array([-0.693,  0.693])
    """
    math: Any = tf.math if tf.is_tensor(values) else np
    if kind == "log1p":
        return math.log1p(values)
    if kind == "signed_log":
        return math.sign(values) * math.log1p(math.abs(values))
    return values
