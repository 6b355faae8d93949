"""`Statistics`: what `fit_statistics` found, and the constants of a layer from it."""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.box

from tfamp.data._elements import TENSOR
from tfamp.data.statistics.conditioning import (
    TRANSFORMS,
    ColumnRule,
    Condition,
    transformed,
)
from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.data.statistics.options import (
    check_rule,
    collapses,
    fill_text,
    fill_values,
    outlier_limits,
    per_column,
)
from tfamp.records import checks, console, units
from tfamp.records.record import TableRecord

_MAX_ROWS = 60
_TITLES = "Missing,Inf,Mean,Std,Min,1 %,Median,99 %,Max,Mode".split(",")
SCALES = ("standardize", "minmax")
_DEFAULTS = {"missing": "mean", "clip": (0.01, 0.99), "scale": "standardize"}


@dataclasses.dataclass(frozen=True)
class Statistics(TableRecord):
    """What the inputs of a dataset are like, column by column.

    `statistics["age"]` is the record of a column, `print(statistics)` a table, and
    `to_json` and `from_json` keep it with the model.

    Args:
        columns: One record each, in the order of the inputs.
        num_examples: How many examples were read.
        named: Whether inputs are a dict.
        reading: Whether elements were taken as batches, and why.

    Example:
        >>> import numpy as np
        >>> from tfamp.data.statistics import fit_statistics
        >>> statistics = fit_statistics({"age": np.array([20.0, 40.0])})
        >>> statistics["age"].array("mean"), statistics.quantile(0.5, "age")
        (30.0, 20.0)
    """

    columns: tuple[Column | TextColumn, ...]
    num_examples: int
    named: bool
    reading: str

    def __getitem__(self, name: str) -> Any:
        """Returns the record of a column.

        Raises:
            ValueError: There is none of this name.
        """
        for column in self.columns:
            if column.name == name:
                return column
        names = tuple(column.name for column in self.columns)
        raise ValueError(
            f"Unknown column {name!r}; expected one of {names!r}. "
            "Inputs that are one tensor are column 'x'."
        )

    def quantile(self, q: float, column: str = TENSOR) -> Any:
        """Returns the quantile of each feature of a column.

        Args:
            q: A fraction in [0, 1].
            column: Which one; may be left out where inputs are one tensor.

        Returns:
            An array `(features,)`; a number for a scalar column.

        Raises:
            ValueError: `q` is out of range, there is no such column, or it is text.
        """
        found = self[column]
        if isinstance(found, TextColumn):
            raise ValueError(
                f"Column {column!r} is text, which has no order; expected a column of "
                "numbers. Look at its `values` and `counts`."
            )
        return found.quantile(q)

    def as_layer(
        self,
        missing: Any = "mean",
        clip: Any = (0.01, 0.99),
        *,
        transform: Any = None,
        scale: Any = "standardize",
        columns: Sequence[str] | None = None,
        output: str = "concat",
        name: str | None = None,
    ) -> Condition:
        """Returns a layer that treats inputs by these statistics.

        In this order: missing values are filled, outliers are clipped, values are
        transformed, and scaled by what the training data is like after that. Each
        option but the last three is for all columns, or a dict by column; columns
        that a dict leaves out get the default.

        Args:
            missing: "mean", "median", "mode" or a number fills NaN and what was
                declared missing; None passes both on as NaN. The mean follows
                outliers, the median doesn't. A text fills missing text; text takes
                its mode for the three names.
            clip: Values beyond are set to the limit. (0.01, 0.99) or ("quantile",
                0.01, 0.99) limits at quantiles, ("zscore", 3.0) at so many standard
                deviations from the mean, ("iqr", 1.5) at so many quartile ranges
                beyond the quartiles, None nowhere: inf then passes through.
            transform: "log1p" for values above -1, "signed_log" for any, or None.
            scale: "standardize" for mean 0 and standard deviation 1, "minmax" for
                [0, 1], None for as it is. A constant feature becomes 0.
            columns: The columns of a dict to take, in the order to join them; None
                for all.
            output: "concat" joins the columns of a dict into one tensor, "dict"
                keeps them apart, which text needs.
            name: Of the layer.

        Returns:
            A layer for the model's inputs; see `Condition`.

        Raises:
            TypeError: An option is of the wrong type.
            ValueError: An option is unknown or doesn't suit a column.
        """
        chosen = self.columns
        if columns is not None:
            if not self.named or isinstance(columns, str):
                raise ValueError(
                    f"`columns` is {columns!r}; expected a tuple of names where inputs "
                    "are a dict, None otherwise. Correct it, or leave it out."
                )
            chosen = tuple(self[column] for column in columns)
        checks.choice("output", output, ("concat", "dict"))
        texts = tuple(c.name for c in chosen if isinstance(c, TextColumn))
        if texts and output == "concat":
            raise ValueError(
                f"Columns {texts!r} are text, which cannot be joined with numbers; "
                "expected `output='dict'`, or `columns` without them. Encode text with "
                "`keras.layers.StringLookup(vocabulary=statistics[name].vocabulary())`."
            )
        given = {"missing": missing, "clip": clip, "transform": transform}
        names = tuple(column.name for column in chosen)
        options = {
            key: per_column(key, option, names, _DEFAULTS.get(key))
            for key, option in {**given, "scale": scale}.items()
        }
        unclipped: list[str] = []
        rules = []
        for column in chosen:
            own = {key: option[column.name] for key, option in options.items()}
            rules.append(_rule(column, own, unclipped))
        if unclipped:
            warnings.warn(
                f"`clip` would make features {tuple(unclipped[:10])!r} constant, since "
                "nearly all of their values are equal; they are not clipped. To say so "
                f"yourself, pass `clip={{{unclipped[0].split('[')[0]!r}: None}}`.",
                stacklevel=2,
            )
        form: Any = output
        return Condition(rules, named=self.named, output=form, name=name)

    def table(self) -> str:
        """Returns a table with one row for each feature, at most 60 of them."""
        rows = [row for column in self.columns for row in _rows(column)]
        table = console.table(
            {"Feature": console.FOLD, **dict.fromkeys(_TITLES, console.RIGHT)},
            rows[:_MAX_ROWS],
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
        )
        lines = [line for line in console.text_of(table).splitlines() if line]
        if len(rows) > _MAX_ROWS:
            lines.append(f"... and {len(rows) - _MAX_ROWS} more features")
        lines.append(f"{self.num_examples:,} examples; {self.reading}.")
        return "\n".join(lines)


def _rows(column: Column | TextColumn) -> list[tuple[str, ...]]:
    """Returns the table's rows of a column, one for each feature."""
    if isinstance(column, TextColumn):
        total = column.count + column.missing
        distinct = "many" if column.distinct is None else f"{column.distinct:,}"
        share = units.format_share(column.missing / total)
        text = f"{column.name} (text, {distinct} distinct)"
        return [(text, share, *("",) * 8, column.mode or "open")]
    rows = []
    for feature in column.features:
        total = feature.count + feature.missing + feature.infinite
        name = f"{feature.name} (constant)" if feature.is_constant else feature.name
        share = units.format_share(feature.missing / total)
        low, high = feature.quantile(0.01), feature.quantile(0.99)
        values = (feature.mean, feature.std, feature.min, low, feature.median, high)
        numbers = (f"{value:.4g}" for value in (*values, feature.max))
        mode = "open" if feature.mode is None else f"{feature.mode:.4g}"
        rows.append((name, share, f"{feature.infinite:,}", *numbers, mode))
    return rows


def _rule(
    column: Column | TextColumn, options: Mapping[str, Any], unclipped: list[str]
) -> ColumnRule:
    """Returns the rule of a column by its `missing`, `clip`, `transform` and `scale`.

    Features that clipping would have made constant are added to `unclipped`.
    """
    transform, scale = options["transform"], options["scale"]
    if isinstance(column, TextColumn):
        return ColumnRule(
            name=column.name,
            text=True,
            scalar=column.scalar,
            missing_texts=column.missing_values,
            fill_text=fill_text(column, options["missing"]),
        )
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
            unclipped.append(feature.name)
        limits = (lower[place], upper[place])
        lowest = max(feature.min, limits[0])
        if transform == "log1p" and (lowest <= -1 or fill[place] <= -1):
            raise ValueError(
                f"`transform` is 'log1p', and feature {feature.name!r} has values down "
                f"to {min(lowest, fill[place]):g}; expected all above -1. Pass "
                "`transform='signed_log'`, which takes any number."
            )
        scalings.append(_scaling(feature, limits, transform, scale))
    center, width, offset, divisor = zip(*scalings, strict=True)
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
        offset=offset,
        scale=divisor,
    )


def _scaling(
    feature: Feature,
    limits: tuple[float, float],
    transform: str | None,
    scale: str | None,
) -> tuple[float, float, float, float]:
    """Returns center, width, offset and scale of a feature; see `ColumnRule`.

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
            return feature.mean, feature.std or 1.0, 0.0, 1.0
        return *_moved(clipped, weights, scale), 0.0, 1.0
    return 0.0, 1.0, *_moved(transformed(clipped, transform), weights, scale)


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
