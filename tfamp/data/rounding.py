"""What a compute dtype does to a column of numbers: one pass over it, then rules.

A column is cut into features: entries of the last axis of vectors, sequences and
images of few channels. All figures are arrays with one entry for each feature.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.data._examples import Column, Numbers, RowSample
from tfamp.records import checks, formats
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

RULES = "nan inf overflow underflow constant unnormalized resolution".split()
_MAX_FEATURES, _MAX_CHANNELS = 2048, 16
# A sample this large finds a drift of 0.1 with near certainty, in 32 MiB at most.
_SAMPLE_ROWS, _MIN_SAMPLE_ROWS, _SAMPLE_VALUES = 20_000, 1000, 4 * 2**20
# Rounding noise against the standard deviation: from 1/20 on, a layer sees it, from a
# half on a fifth of what it sees is noise.
_NOISY, _SPOILED = 0.05, 0.5
# Normalized data has 0.005 % of its values below float16's normal range.
_MIN_SHARE = 0.01
_MAX_INDEX = 2**27
_POLICIES = {"mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
_STANDARDIZE = (
    "Standardize it first, in float64: `tfamp.data.fit_statistics(...).as_layer()` "
    "behind a `keras.Input` of the column's own dtype."
)
_FILL = (
    "Drop these examples (`Pipeline.filter`), or fill the values by the layer that "
    "`tfamp.data.fit_statistics(...).as_layer()` gives."
)


def format_of(compute_dtype: Any) -> formats.Format:
    """Returns the format of a dtype, a policy's name or a `keras.DTypePolicy`."""
    name = getattr(compute_dtype, "compute_dtype", compute_dtype)
    options = ("float32", "float16", "bfloat16", *_POLICIES)
    name = checks.choice("compute_dtype", name, options)
    return formats.FORMATS[_POLICIES.get(name, name)]


def rounded_to(form: formats.Format, values: np.ndarray) -> np.ndarray:
    """Returns values rounded to a compute dtype, in float64."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        single = values.astype(np.float32)
        dtype = tf.as_dtype(form.name).as_numpy_dtype
        return single.astype(dtype).astype(np.float64)


class Profile(Numbers):
    """Gathers the figures of one column, chunk by chunk."""

    def __init__(self, column: Column, form: formats.Format) -> None:
        shape = column.shape
        limit = _MAX_CHANNELS if len(shape) > 2 else _MAX_FEATURES
        is_cut = shape and shape[-1] and shape[-1] <= limit and not column.is_text
        super().__init__(int(shape[-1] or 1) if is_cut else 1)
        self.column, self.form, self.num_rows = column, form, 0
        zeros = np.zeros(self.num_features, np.int64)
        self.num_nonzero = self.num_overflows = self.num_flushed = zeros
        self._errors = np.zeros(self.num_features)
        share = _SAMPLE_VALUES // self.num_features
        self.sample = RowSample(max(_MIN_SAMPLE_ROWS, min(_SAMPLE_ROWS, share)))

    def update(self, chunk: np.ndarray) -> None:
        """Takes the next examples, shape (rows, ...)."""
        self.num_rows += len(chunk)
        if not chunk.size:
            return
        cut = chunk.reshape(len(chunk), -1, self.num_features)
        if self.column.is_text or cut.shape[1] == 1:
            self.sample.add(cut[:, 0])
        else:
            held = np.isfinite(cut)
            with np.errstate(invalid="ignore"):
                totals = cut.sum(axis=1, dtype=np.float64, where=held)
                self.sample.add(totals / held.sum(axis=1))
        if not self.column.is_text:
            self.add(cut.reshape(-1, self.num_features))

    def look(self, values: np.ndarray) -> None:
        """Counts what the compute dtype does to a block of values."""
        nonzero = values != 0
        self.num_nonzero = self.num_nonzero + nonzero.sum(axis=1)
        exact = 2 ** (self.form.mantissa_bits + 1)  # all integers up to here are
        if self.is_integral.all() and np.abs(values).max() <= exact:
            return
        rounded = rounded_to(self.form, values)
        overflows = np.isinf(rounded)
        self.num_overflows = self.num_overflows + overflows.sum(axis=1)
        self.num_flushed = self.num_flushed + (nonzero & (rounded == 0)).sum(axis=1)
        errors = np.where(overflows, 0.0, rounded - values)
        self._errors = self._errors + (errors * errors).sum(axis=1)

    @property
    def noise(self) -> np.ndarray:
        """The rounding error against the standard deviation, 0 where nothing varies."""
        rounded = np.maximum(self.num_finite - self.num_overflows, 1)
        error, std = np.sqrt(self._errors / rounded), np.sqrt(self.variance)
        varies = (std > 0) & np.isfinite(std)
        return np.where(varies, error / np.where(varies, std, 1.0), 0.0)

    def place(self, feature: int) -> str:
        """Returns the name of one feature: "x[3]", or the column's own."""
        name = self.column.name
        return name if self.num_features == 1 else f"{name}[{feature}]"

    def finding(
        self,
        rule: str,
        severity: Severity,
        mask: np.ndarray,
        score: np.ndarray,
        text: Callable[[int], str],
        remedy: str,
    ) -> Iterator[Finding]:
        """Yields the finding on the features of a mask, of the worst."""
        num_hit = int(mask.sum())
        if not num_hit:
            return
        comparable = np.where(mask, np.nan_to_num(score, posinf=1e308), -np.inf)
        worst = int(np.argmax(comparable))
        column = name = self.place(worst)
        if num_hit > 1:
            column = self.column.name
            name += f" (worst of {num_hit} of {self.num_features} features)"
        message, figure = f"{name} {text(worst)}", float(score[worst])
        yield Finding(rule, severity, message, remedy, column=column, figure=figure)


def find(profile: Profile) -> Iterator[Finding]:
    """Yields what is wrong with a column of numbers."""
    column, form, count = profile.column, profile.form, profile.count
    std, noise, finding = np.sqrt(profile.variance), profile.noise, profile.finding
    largest = np.maximum(np.abs(profile.low), np.abs(profile.high))

    def share_of(part: np.ndarray, i: int) -> str:
        return (
            f"{part[i]:,} of {count[i]:,} values ({format_share(part[i] / count[i])})"
        )

    def broken(word: str, part: np.ndarray) -> Iterator[Finding]:
        def text(i: int) -> str:
            spoils = "one is enough to make the loss NaN, and every gradient with it"
            return f"holds {word} in {share_of(part, i)}: {spoils}."

        share = part / np.maximum(count, 1)
        yield from finding(word.lower(), "error", part > 0, share, text, _FILL)

    yield from broken("NaN", profile.num_nan)
    yield from broken("inf", profile.num_infinite)
    in_table = profile.low.min() >= 0 and profile.high.max() <= _MAX_INDEX
    may_be_index = "int" in column.dtype and bool(in_table)
    severity: Severity = "error"
    then = "Normalization and Rescaling cast first, so they get inf."
    if may_be_index:
        severity = "note" if column.shape else "warning"
        then = "Embedding takes integers as they are."
    yield from finding(
        *("overflow", severity, profile.num_overflows > 0, largest),
        lambda i: (
            f"reaches {number(largest[i])}; {share_of(profile.num_overflows, i)} pass "
            f"{number(form.max)} and become inf in {form.name}; {then}"
        ),
        _STANDARDIZE,
    )
    flushed = profile.num_flushed / np.maximum(profile.num_nonzero, 1)
    yield from finding(
        *("underflow", "warning", flushed >= _MIN_SHARE, flushed),
        lambda i: (
            f"turns into 0 in {form.name} for {format_share(flushed[i])} of its "
            f"non-zero values (below {form.smallest_subnormal / 2:.1e}): a logarithm "
            "or quotient of them is infinite."
        ),
        "Take its logarithm before the model, or standardize it.",
    )
    same = (profile.low == profile.high) & (profile.num_finite > 1)
    if profile.num_rows > 1 and column.role != "weight":
        yield from finding(
            *("constant", "warning" if same.all() else "note", same, profile.low),
            lambda i: (
                f"is {number(profile.low[i])} in all {profile.num_rows:,} examples: it "
                "tells nothing, and dividing by its standard deviation gives NaN."
            ),
            "Look at how it is read, or drop it; borders of images are fine.",
        )
    if column.role != "input":
        return
    # Normalization's variance, attention and losses square what they get.
    rms = np.sqrt(profile.variance + profile.mean**2)
    large = (rms > math.sqrt(form.max)) & (std > 0) & (profile.num_overflows == 0)
    if not may_be_index:
        yield from finding(
            *("unnormalized", "warning", large, rms),
            lambda i: (
                f"is of size {number(rms[i])} (root mean square): squares and sums of "
                f"such numbers pass {form.name}'s {number(form.max)}."
            ),
            _STANDARDIZE,
        )
    yield from finding(
        *("resolution", "error" if noise.max() >= _SPOILED else "warning"),
        *(noise >= _NOISY, noise),
        lambda i: (
            f"lies at {number(profile.mean[i])} +- {number(std[i])}, where {form.name} "
            f"has steps of {number(formats.spacing(form, min(largest[i], form.max)))}: "
            f"rounding adds noise of {format_share(noise[i])} of the standard "
            "deviation. A Normalization layer casts first, so it comes too late."
        ),
        _STANDARDIZE,
    )
