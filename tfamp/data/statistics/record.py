"""`Statistics`: what `fit_statistics` found."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import rich.box

from tfamp.data._elements import TENSOR
from tfamp.data.statistics.building import build_layer
from tfamp.data.statistics.conditioning import Condition
from tfamp.data.statistics.features import Column, Feature, TextColumn
from tfamp.records import console, units
from tfamp.records.record import TableRecord

_MAX_ROWS = 60


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
            transform: "log1p" for values above -1, "signed_log" for any,
                "yeo-johnson" with a fitted exponent (needs scikit-learn), or None.
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
            ImportError: "yeo-johnson" without scikit-learn.
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
        options = {
            "missing": missing,
            "clip": clip,
            "transform": transform,
            "scale": scale,
        }
        return build_layer(
            chosen, named=self.named, options=options, output=output, name=name
        )

    def table(self) -> str:
        """Returns a table with one row for each feature, at most 60 of them."""
        rows = [row for column in self.columns for row in _rows(column)]
        titles = [*("Missing", "Inf", "Mean", "Std", "Min", "1 %", "Median")]
        titles += ["99 %", "Max", "Mode"]
        table = console.table(
            {"Feature": console.FOLD, **dict.fromkeys(titles, console.RIGHT)},
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
    """Returns the table's rows of a column."""
    if isinstance(column, TextColumn):
        total = column.count + column.missing
        distinct = "many" if column.distinct is None else f"{column.distinct:,}"
        share = units.format_share(column.missing / total)
        text = f"{column.name} (text, {distinct} distinct)"
        return [(text, share, *("",) * 8, column.mode or "open")]
    return [_row(feature) for feature in column.features]


def _row(feature: Feature) -> tuple[str, ...]:
    """Returns the table's row of a feature."""
    total = feature.count + feature.missing + feature.infinite
    values = (
        feature.mean,
        feature.std,
        feature.min,
        feature.quantile(0.01),
        feature.median,
        feature.quantile(0.99),
        feature.max,
    )
    name = f"{feature.name} (constant)" if feature.is_constant else feature.name
    return (
        name,
        units.format_share(feature.missing / total),
        f"{feature.infinite:,}",
        *(f"{value:.4g}" for value in values),
        "open" if feature.mode is None else f"{feature.mode:.4g}",
    )
