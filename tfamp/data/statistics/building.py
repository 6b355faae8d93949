"""From statistics to the constants of a layer."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfamp.data.statistics.conditioning import ColumnRule, Condition
from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.data.statistics.limits import (
    check_rule,
    collapses,
    fill_text,
    fill_values,
    outlier_limits,
)
from tfamp.data.statistics.missing import per_column
from tfamp.data.statistics.transforms import TRANSFORMS, fit_power, transform_array
from tfamp.records import checks

SCALES = ("standardize", "minmax")
# From `build_layer` over `Statistics.as_layer` to the caller.
_STACKLEVEL = 3


def build_layer(
    columns: Sequence[Column | TextColumn],
    *,
    named: bool,
    options: Mapping[str, Any],
    output: str,
    name: str | None,
) -> Condition:
    """Returns the layer of `Statistics.as_layer`; see there.

    Args:
        columns: Statistics of the columns it takes.
        named: Whether inputs are a dict.
        options: `missing`, `clip`, `transform` and `scale`: for all, or by column.
        output: "concat" or "dict".
        name: Of the layer.
    """
    checks.choice("output", output, ("concat", "dict"))
    texts = tuple(column.name for column in columns if isinstance(column, TextColumn))
    if texts and output == "concat":
        raise ValueError(
            f"Columns {texts!r} are text, which cannot be joined with numbers; "
            "expected `output='dict'`, or `columns` without them. Encode text with "
            "`keras.layers.StringLookup(vocabulary=statistics[name].vocabulary())`."
        )
    names = tuple(column.name for column in columns)
    defaults = {"missing": "mean", "clip": (0.01, 0.99), "scale": "standardize"}
    chosen = {
        key: per_column(key, option, names, defaults.get(key))
        for key, option in options.items()
    }
    rules, kept = list[ColumnRule](), list[str]()
    for column in columns:
        picked = {key: values[column.name] for key, values in chosen.items()}
        if isinstance(column, TextColumn):
            rules.append(_text_rule(column, picked["missing"]))
        else:
            rules.append(_number_rule(column, picked, kept))
    if kept:
        warnings.warn(
            f"`clip` would make features {tuple(kept[:10])!r} constant, since nearly "
            "all of their values are equal; they are not clipped. To say so yourself, "
            f"pass `clip={{{kept[0].split('[')[0]!r}: None}}`.",
            stacklevel=_STACKLEVEL,
        )
    return Condition(rules, named=named, output=output, name=name)  # type: ignore[arg-type]


def _text_rule(column: TextColumn, missing: Any) -> ColumnRule:
    return ColumnRule(
        name=column.name,
        text=True,
        scalar=column.scalar,
        missing_texts=column.missing_values,
        fill_text=fill_text(column, missing),
    )


def _number_rule(
    column: Column, options: Mapping[str, Any], kept: list[str]
) -> ColumnRule:
    """Returns the rule of a column of numbers.

    Args:
        column: The statistics.
        options: `missing`, `clip`, `transform` and `scale` of this column.
        kept: Gathers the features that clipping would have made constant.
    """
    transform, scale = options["transform"], options["scale"]
    if transform is not None:
        checks.choice("transform", transform, TRANSFORMS)
    if scale is not None:
        checks.choice("scale", scale, SCALES)
    fill = fill_values(column, options["missing"])
    lower, upper = outlier_limits(column, check_rule("clip", options["clip"]))
    scalings = []
    for place, feature in enumerate(column.features):
        if collapses(feature, lower[place], upper[place]):
            lower[place], upper[place] = -np.inf, np.inf
            kept.append(feature.name)
        limits = (lower[place], upper[place])
        if transform == "log1p":
            _check_log1p(feature, fill[place], limits)
        scalings.append(_scaling(feature, limits, transform, scale))
    center, width, power, offset, divisor = zip(*scalings, strict=True)
    return ColumnRule(
        name=column.name,
        text=False,
        scalar=column.scalar,
        missing_values=column.missing_values,
        fill=tuple(fill.tolist()),
        lower=tuple(lower.tolist()),
        upper=tuple(upper.tolist()),
        center=center,
        width=width,
        transform=transform,
        power=power,
        offset=offset,
        scale=divisor,
    )


def _check_log1p(feature: Feature, fill: float, limits: tuple[float, float]) -> None:
    """Raises if log(1 + x) is not defined for what comes out of the clip."""
    lowest = max(feature.min, limits[0])
    if lowest > -1 and not fill <= -1:
        return
    raise ValueError(
        f"`transform` is 'log1p', and feature {feature.name!r} has values down to "
        f"{min(lowest, fill):g}; expected all above -1. Pass "
        "`transform='signed_log'` or 'yeo-johnson', which take any number."
    )


def _scaling(
    feature: Feature,
    limits: tuple[float, float],
    transform: str | None,
    scale: str | None,
) -> tuple[float, float, float, float, float]:
    """Returns center, width, power, offset and scale of a feature; see `ColumnRule`.

    The exact moments serve values that stay as they are. Otherwise mean and
    standard deviation are those of the clipped, transformed values that the record
    holds: outliers that are clipped don't stretch the scale.
    """
    values, weights = feature.weighted_values()
    # Thinned values may lack the ends, which "minmax" needs.
    values = np.concatenate([[feature.min], values, [feature.max]])
    weights = np.concatenate([[0], weights, [0]])
    clipped = np.clip(values, *limits)
    if transform is None:
        if scale == "standardize" and (clipped == values).all():
            return feature.mean, feature.std or 1.0, 1.0, 0.0, 1.0
        return *_moved(clipped, weights, scale), 1.0, 0.0, 1.0
    center, width, power = 0.0, 1.0, 1.0
    if transform == "yeo-johnson":
        # The power bends at 0, so that is where the values have to be.
        center, width = _moved(clipped, weights, "standardize")
        clipped = (clipped - center) / width
        power = fit_power(clipped, weights)
    bent = transform_array(clipped, transform, power)
    return center, width, power, *_moved(bent, weights, scale)


def _moved(
    values: np.ndarray, weights: np.ndarray, scale: str | None
) -> tuple[float, float]:
    """Returns what to subtract and to divide by; a constant feature becomes 0."""
    if scale is None:
        return 0.0, 1.0
    if scale == "minmax":
        return float(values[0]), float(values[-1] - values[0]) or 1.0
    mean = float(np.average(values, weights=weights))
    variance = float(np.average((values - mean) ** 2, weights=weights))
    return mean, float(np.sqrt(variance)) or 1.0
