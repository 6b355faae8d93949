"""Rules on the range of numbers: NaN, inf, overflow, underflow, constant, scale."""

import math
from collections.abc import Iterator

import numpy as np

from tfamp.data.health.profile import (
    NOISY,
    Hits,
    Profile,
    Rounding,
    standardizing,
)
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

RULES = (
    *("nan", "inf", "overflow", "underflow", "subnormal", "constant"),
    *("unnormalized", "weights"),
)
# Below this a few tiny values among others are as good as 0: normalized data has
# 0.005 % of its values below float16's normal range.
_MIN_SHARE = 0.01
_MANY = 0.5
_SMALL = 0.01
# A column this many deviations away from 0 is mostly offset.
_MAX_OFFSET = 10.0


def find(profile: Profile, rounding: Rounding) -> Iterator[Finding]:
    """Yields what is wrong with the range of a column of numbers.

    The profile of targets and weights is that of float32, since losses are computed
    in it; `rounding` is that of the layers.
    """
    yield from _not_finite(profile)
    if profile.column.role == "target":
        yield from _unreachable(profile, rounding)
    yield from _overflow(profile)
    yield from _underflow(profile)
    yield from _constant(profile)
    if profile.column.role == "input":
        yield from _unnormalized(profile)
    if profile.column.role == "weight":
        yield from _weights(profile)


def _not_finite(profile: Profile) -> Iterator[Finding]:
    for rule, word, count, consequence in (
        ("nan", "NaN", profile.num_nan, "one is enough to make the loss NaN"),
        ("inf", "inf", profile.num_infinite, "they turn into NaN in the first layers"),
    ):
        found = Hits(profile, count > 0, count)
        if not found:
            continue
        many, whole = int(count[found.worst]), int(profile.count[found.worst])
        yield found.finding(
            rule,
            "error",
            f"holds {word} in {_share_of(many, whole)}: {consequence}, and with it "
            "every gradient of that step.",
            "Drop these examples, or fill the values: `Pipeline.filter`, or the layer "
            "that `tfamp.data.fit_statistics(...).as_layer()` gives.",
            figure=many / whole,
            details={"num_values": many},
        )


def _overflow(profile: Profile) -> Iterator[Finding]:
    count, rounding = profile.num_overflows, profile.rounding
    found = Hits(profile, count > 0, count)
    if not found:
        return
    i = found.worst
    largest = profile.largest[i]
    figures = (
        f"reaches {number(largest)}; {_share_of(int(count[i]), int(profile.count[i]))} "
        f"pass {number(rounding.format.max)} and become inf in {rounding.name}"
    )
    fix = standardizing(profile)
    severity: Severity = "error"
    text = f"{figures}; Normalization and Rescaling cast first, so they get inf."
    remedy = "Take the logarithm or clip before the model."
    if fix:
        remedy = "Standardize before the model (the finding's fix)."
    if profile.may_be_index:
        # Sequences of integers are tokens, as a rule; a lone one may be either.
        severity = "note" if profile.column.shape else "warning"
        text = (
            f"{figures}, in a layer that computes with them. Embedding and lookup "
            "layers take integers as they are."
        )
        remedy = "If they are quantities, standardize them before the model."
    yield found.finding(
        "overflow",
        severity,
        text,
        remedy,
        figure=largest,
        details={"num_values": int(count[i])},
        fix=fix,
    )


def _unreachable(profile: Profile, rounding: Rounding) -> Iterator[Finding]:
    """Targets that are fine for the loss, but that no output layer can give."""
    limit = rounding.format.max
    largest = profile.largest.astype(float)
    beyond = (largest > limit) & (profile.num_finite > 0)
    found = Hits(profile, beyond & (profile.num_overflows == 0), largest)
    if not found or profile.column.is_integer:
        return
    yield found.finding(
        "overflow",
        "warning",
        f"has targets up to {number(largest[found.worst])}; an output layer in "
        f"{rounding.name} ends at {number(limit)}, so the loss stays large or inf.",
        "Divide the targets by their standard deviation, or keep the output layer in "
        "float32, as `tfamp.enable` does.",
        figure=largest[found.worst],
    )


def _underflow(profile: Profile) -> Iterator[Finding]:
    rounding, nonzero = profile.rounding, np.maximum(profile.num_nonzero, 1)
    flushed = profile.num_flushed / nonzero
    found = Hits(profile, flushed >= _MIN_SHARE, flushed)
    # A shift cures small columns; of numbers of all sizes only a logarithm does.
    small = profile.high.astype(float).max() < _SMALL
    small = small and profile.low.astype(float).min() > -_SMALL
    fix = standardizing(profile) if small else None
    remedy = (
        "Standardize before the model (the finding's fix)."
        if fix
        else "Take its logarithm before the model, or scale it up."
    )
    if found:
        share = flushed[found.worst]
        yield found.finding(
            "underflow",
            "warning",
            f"turns into 0 in {rounding.name} for {format_share(share)} of its "
            f"non-zero values (below {rounding.format.smallest_subnormal / 2:.1e}): a "
            "logarithm or quotient of them is infinite.",
            remedy,
            figure=share,
            fix=fix,
        )
    subnormal = profile.num_subnormal / nonzero
    found = Hits(profile, subnormal >= _MIN_SHARE, subnormal)
    if found:
        share = subnormal[found.worst]
        yield found.finding(
            "subnormal",
            "warning" if share >= _MANY else "note",
            f"has {format_share(share)} of its non-zero values below "
            f"{rounding.format.smallest_normal:.1e}, where {rounding.name} holds "
            "fewer digits and some devices write 0.",
            remedy,
            figure=share,
            fix=fix,
        )


def _constant(profile: Profile) -> Iterator[Finding]:
    column = profile.column
    if column.role == "weight" or profile.num_rows < 2:
        return
    same = (profile.low == profile.high) & (profile.num_finite > 1)
    found = Hits(profile, same, profile.num_finite)
    if not found:
        return
    value, whole = profile.low[found.worst], bool(same.all())
    consequence = "it tells nothing, and dividing by its standard deviation gives NaN."
    remedy = "Drop it, or look at how it is read."
    if column.role == "target":
        consequence = "there is nothing to learn from it."
        remedy = "Look at how the targets are read."
    elif not whole:
        remedy = "Nothing, if they are borders of an image; else drop them."
    yield found.finding(
        "constant",
        "warning" if whole else "note",
        f"is {number(value)} in all {profile.num_rows:,} examples: {consequence}",
        remedy,
        figure=value,
    )


def _unnormalized(profile: Profile) -> Iterator[Finding]:
    """Offsets that cost digits, and float16's squares that overflow."""
    rounding, std = profile.rounding, profile.std
    large = profile.rms > math.sqrt(rounding.format.max)
    ids = large & [profile.looks_like_ids(i) for i in range(profile.num_features)]
    if profile.may_be_index or ids.any():
        return
    finite = (std > 0) & (profile.num_overflows == 0)
    # Layers take squares: normalization's variance, attention, losses.
    found = Hits(profile, finite & large, profile.rms)
    fix = standardizing(profile)
    remedy = "Standardize it (the finding's fix)." if fix else "Standardize or clip it."
    if found:
        rms = profile.rms[found.worst]
        yield found.finding(
            "unnormalized",
            "warning",
            f"is of size {number(rms)} (root mean square): squares and sums of such "
            f"numbers pass {rounding.name}'s {number(rounding.format.max)}.",
            remedy,
            figure=rms,
            fix=fix,
        )
        return
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offset = np.abs(profile.mean) / std
    # Noisier ones are the business of the rule on resolution.
    quiet = finite & (profile.noise < NOISY)
    found = Hits(profile, quiet & (offset >= _MAX_OFFSET), offset)
    if found:
        i = found.worst
        yield found.finding(
            "unnormalized",
            "note",
            f"lies at {number(profile.mean[i])} +- {number(std[i])}: the offset is "
            f"{number(offset[i])} times what varies, so {rounding.name} spends its "
            "digits on the offset, and training is slow.",
            remedy,
            figure=offset[i],
            fix=fix,
        )


def _weights(profile: Profile) -> Iterator[Finding]:
    no_weight = (profile.num_nonzero == 0) & (profile.num_nan == 0)
    found = Hits(profile, no_weight & no_weight.all(), profile.count)
    if found:
        yield found.finding(
            "weights",
            "error",
            "is 0 for every example: nothing is learned.",
            "Give positive weights, or leave them out.",
            figure=0.0,
        )
    found = Hits(profile, profile.low < 0, -profile.low.astype(float))
    if found:
        lowest = profile.low[found.worst]
        yield found.finding(
            "weights",
            "warning",
            f"goes down to {number(lowest)}: a negative weight makes training raise "
            "the loss of that example.",
            "Clip the weights at 0.",
            figure=lowest,
        )


def _share_of(part: int, whole: int) -> str:
    """Returns "3 of 100 values (3.0 %)"."""
    return f"{part:,} of {whole:,} values ({format_share(part / max(1, whole))})"
