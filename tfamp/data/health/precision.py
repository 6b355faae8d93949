"""Rules on columns of numbers: range, and what rounding takes away."""

import math
from collections.abc import Iterator

import numpy as np

from tfamp.data.health.profile import NOISY, Hits, Profile, Rounding, standardizing
from tfamp.records import formats
from tfamp.records.findings import Finding, Severity
from tfamp.records.units import format_share, number

RULES = (
    *("nan", "inf", "overflow", "underflow", "constant", "unnormalized"),
    *("resolution", "ids", "weights"),
)
# Below this a few tiny values among others are as good as 0: normalized data has
# 0.005 % of its values below float16's normal range.
_MIN_SHARE = 0.01
_SMALL = 0.01
# Rounding noise of half the deviation: a fifth of what the layer sees is noise.
_SPOILED = 0.5
_STANDARDIZE = "Standardize before the model, in float64 (the finding's fix)."


def find(profile: Profile, compute: Rounding) -> Iterator[Finding]:
    """Yields what is wrong with a column of numbers.

    The profile of targets and weights is that of float32: losses are computed in it,
    and `compute` is what the layers compute in.
    """
    role = profile.column.role
    yield from _not_finite(profile)
    yield from _overflow(profile)
    yield from _underflow(profile)
    if role != "weight":
        yield from _constant(profile)
    if role == "weight":
        yield from _weights(profile)
    if role == "target":
        yield from _unreachable(profile, compute)
    if role == "input":
        yield from _unnormalized(profile)
        yield from _resolution(profile)
        yield from _ids(profile)


def _not_finite(profile: Profile) -> Iterator[Finding]:
    for rule, word, count, consequence in (
        ("nan", "NaN", profile.num_nan, "one is enough to make the loss NaN"),
        ("inf", "inf", profile.num_infinite, "they turn into NaN in the first layers"),
    ):
        if found := Hits(profile, count > 0, count):
            many, whole = int(count[found.worst]), int(profile.count[found.worst])
            yield found.finding(
                rule,
                "error",
                f"holds {word} in {_share_of(many, whole)}: {consequence}, and with it "
                "every gradient of that step.",
                "Drop these examples (`Pipeline.filter`), or fill the values by the "
                "layer that `tfamp.data.fit_statistics(...).as_layer()` gives.",
                many / whole,
            )


def _overflow(profile: Profile) -> Iterator[Finding]:
    count, rounding = profile.num_overflows, profile.rounding
    found = Hits(profile, count > 0, count)
    if not found:
        return
    i, fix = found.worst, standardizing(profile)
    text = (
        f"reaches {number(profile.largest[i])}; "
        f"{_share_of(int(count[i]), int(profile.count[i]))} "
        f"pass {number(rounding.format.max)} and become inf in {rounding.name}"
    )
    severity: Severity = "error"
    remedy = _STANDARDIZE if fix else "Take the logarithm or clip before the model."
    if profile.may_be_index:
        # Sequences of integers are tokens, as a rule; a lone one may be either.
        severity = "note" if profile.column.shape else "warning"
        text += ", in a layer that computes with them; Embedding takes integers as is."
        remedy = "If they are quantities, standardize them before the model."
    else:
        text += "; Normalization and Rescaling cast first, so they get inf."
    yield found.finding("overflow", severity, text, remedy, profile.largest[i], fix)


def _underflow(profile: Profile) -> Iterator[Finding]:
    rounding = profile.rounding
    flushed = profile.num_flushed / np.maximum(profile.num_nonzero, 1)
    if found := Hits(profile, flushed >= _MIN_SHARE, flushed):
        # A shift cures small columns; of numbers of all sizes only a logarithm does.
        is_small = profile.largest.astype(float).max() < _SMALL
        fix = standardizing(profile) if is_small else None
        share = flushed[found.worst]
        yield found.finding(
            "underflow",
            "warning",
            f"turns into 0 in {rounding.name} for {format_share(share)} of its "
            f"non-zero values (below {rounding.format.smallest_subnormal / 2:.1e}): a "
            "logarithm or quotient of them is infinite.",
            _STANDARDIZE if fix else "Take its logarithm before the model.",
            share,
            fix,
        )


def _constant(profile: Profile) -> Iterator[Finding]:
    same = (profile.low == profile.high) & (profile.num_finite > 1)
    if profile.num_rows > 1 and (found := Hits(profile, same, profile.num_finite)):
        value, whole = profile.low[found.worst], bool(same.all())
        yield found.finding(
            "constant",
            "warning" if whole else "note",
            f"is {number(value)} in all {profile.num_rows:,} examples: it tells "
            "nothing, and dividing by its standard deviation gives NaN.",
            "Look at how it is read, or drop it; borders of images are fine.",
            value,
        )


def _unreachable(profile: Profile, compute: Rounding) -> Iterator[Finding]:
    """Targets that are fine for the loss, but that no output layer can give."""
    limit, largest = compute.format.max, profile.largest.astype(float)
    beyond = (largest > limit) & (profile.num_finite > 0)
    found = Hits(profile, beyond & (profile.num_overflows == 0), largest)
    if found and not profile.column.is_integer:
        yield found.finding(
            "overflow",
            "warning",
            f"has targets up to {number(largest[found.worst])}; an output layer in "
            f"{compute.name} ends at {number(limit)}, so the loss stays large or inf.",
            "Divide the targets by their standard deviation, or keep the output layer "
            "in float32, as `tfamp.enable` does.",
            largest[found.worst],
        )


def _weights(profile: Profile) -> Iterator[Finding]:
    none = (profile.num_nonzero == 0) & (profile.num_nan == 0)
    if found := Hits(profile, none & none.all(), profile.count):
        text = "is 0 for every example: nothing is learned."
        yield found.finding("weights", "error", text, "Give positive weights.", 0.0)
    if found := Hits(profile, profile.low < 0, -profile.low.astype(float)):
        lowest = profile.low[found.worst]
        text = f"goes down to {number(lowest)}: training raises the loss there."
        yield found.finding("weights", "warning", text, "Clip them at 0.", lowest)


def _unnormalized(profile: Profile) -> Iterator[Finding]:
    """Numbers whose squares overflow: normalization's variance, attention, losses."""
    rounding = profile.rounding
    large = profile.rms > math.sqrt(rounding.format.max)
    if profile.may_be_index or not large.any():
        return
    varies = (profile.std > 0) & (profile.num_overflows == 0)
    found = Hits(profile, varies & large, profile.rms)
    if found and not any(map(profile.looks_like_ids, np.flatnonzero(large).tolist())):
        fix, rms = standardizing(profile), profile.rms[found.worst]
        yield found.finding(
            "unnormalized",
            "warning",
            f"is of size {number(rms)} (root mean square): squares and sums of such "
            f"numbers pass {rounding.name}'s {number(rounding.format.max)}.",
            _STANDARDIZE if fix else "Standardize or clip it.",
            rms,
            fix,
        )


def _resolution(profile: Profile) -> Iterator[Finding]:
    """Rounding errors that are large against what varies."""
    std, rounding, noise = profile.std, profile.rounding, profile.noise
    if found := Hits(profile, noise >= NOISY, noise):
        i, fix = found.worst, standardizing(profile)
        largest = min(profile.largest[i], rounding.format.max)
        step = formats.spacing(rounding.format, float(largest))
        yield found.finding(
            "resolution",
            "error" if noise[i] >= _SPOILED else "warning",
            f"lies at {number(profile.mean[i])} +- {number(std[i])}, where "
            f"{rounding.name} has steps of {number(step)}: rounding adds noise of "
            f"{format_share(noise[i])} of the standard deviation. A Normalization "
            "layer casts first, so it comes too late.",
            _STANDARDIZE if fix else "Count from the smallest value, before the model.",
            noise[i],
            fix,
        )


def _ids(profile: Profile) -> Iterator[Finding]:
    """Ids and codes that become equal."""
    limit, dtype = profile.rounding.max_integer, profile.rounding.name
    shares = np.zeros(profile.num_features)
    beyond = profile.is_integral & (profile.largest > limit) & (profile.num_finite > 0)
    for i in np.flatnonzero(beyond & (profile.noise < NOISY)).tolist():
        if profile.looks_like_ids(i):
            shares[i] = profile.merged_share(i)
    if found := Hits(profile, shares > 0, shares):
        yield found.finding(
            "ids",
            "note" if profile.column.is_integer else "warning",
            f"looks like ids up to {number(profile.high[found.worst])}; {dtype} holds "
            f"integers up to {number(limit)}, so in a layer that computes in it "
            f"{format_share(shares[found.worst])} of neighbours become one.",
            "Give them to Embedding or a lookup layer alone, as an int32 column, with "
            "`keras.Input(..., dtype='int32')`: float32 merges them from 2**24 on.",
            shares[found.worst],
        )


def _share_of(part: int, whole: int) -> str:
    """Returns "3 of 100 values (3.0 %)"."""
    return f"{part:,} of {whole:,} values ({format_share(part / max(1, whole))})"
