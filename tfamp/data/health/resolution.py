"""Rules on what rounding to the compute dtype takes away, and on wide dtypes."""

from collections.abc import Iterator

import numpy as np

from tfamp.data.health.profile import (
    NOISY,
    Hits,
    Profile,
    Rounding,
    standardizing,
)
from tfamp.records import formats
from tfamp.records.findings import Finding, Fix
from tfamp.records.units import format_share, number

RULES = ("resolution", "ids", "merged", "int64", "float64")
# Rounding noise of half the deviation: a fifth of what the layer sees is noise.
_SPOILED = 0.5
# float32's noise, below which it is as good as float64.
_EXACT_ENOUGH = 1e-3
# Distinct neighbours that become one number, where values recur.
_MANY_MERGED = 0.1
# A column of measurements hardly repeats a value this often.
_RECURS = 4
_FLOAT32 = Rounding(formats.FLOAT32)


def find(profile: Profile) -> Iterator[Finding]:
    """Yields what rounding loses in a column of numbers."""
    if profile.column.role == "input":
        yield from _resolution(profile)
        yield from _merged(profile)
    yield from _wide(profile)


def _resolution(profile: Profile) -> Iterator[Finding]:
    """Rounding errors that are large against what varies."""
    std, rounding, noise = profile.std, profile.rounding, profile.noise
    found = Hits(profile, noise >= NOISY, noise)
    if not found:
        return
    i = found.worst
    largest = min(profile.largest[i], rounding.format.max)
    fix = standardizing(profile)
    yield found.finding(
        "resolution",
        "error" if noise[i] >= _SPOILED else "warning",
        f"lies at {number(profile.mean[i])} +- {number(std[i])}, where {rounding.name} "
        f"has steps of {number(formats.spacing(rounding.format, float(largest)))}: "
        f"rounding adds noise of {format_share(noise[i])} of the standard deviation, "
        f"and {format_share(profile.merged_share(i)[0])} of neighbouring values "
        "become equal. A Normalization layer casts first, so it comes too late.",
        "Standardize before the model, in float64 (the finding's fix)."
        if fix
        else "Subtract an offset before the model, or count from the smallest value.",
        figure=noise[i],
        details={"mean": float(profile.mean[i]), "std": float(std[i])},
        fix=fix,
    )


def _merged(profile: Profile) -> Iterator[Finding]:
    """Ids, codes and recurring values that become equal."""
    limit, dtype = profile.rounding.max_integer, profile.rounding.name
    shares, ids = np.zeros(profile.num_features), np.zeros(profile.num_features, bool)
    pairs: dict[int, tuple[float, ...]] = {}
    integral = profile.is_integral | profile.column.is_integer
    held = integral & (profile.largest <= limit)
    asked = ~held & (profile.num_finite > 0) & (profile.noise < NOISY)
    for i in np.flatnonzero(asked).tolist():
        share, pairs[i] = profile.merged_share(i)
        ids[i] = integral[i] and share > 0 and profile.looks_like_ids(i)
        recurs = len(profile.distinct_values(i)) * _RECURS <= len(profile.sample)
        if ids[i] or (share >= _MANY_MERGED and (integral[i] or recurs)):
            shares[i] = share
    found = Hits(profile, ids, shares)
    if found:
        pair = " and ".join(map(number, pairs[found.worst]))
        whole = profile.column.is_integer
        yield found.finding(
            "ids",
            "note" if whole else "warning",
            f"looks like ids up to {number(profile.high[found.worst])}; {dtype} holds "
            f"integers up to {number(limit)}, so in a layer that computes in it "
            f"{format_share(shares[found.worst])} of neighbours become one ({pair}).",
            "Give them to Embedding or a lookup layer alone, as int32, with "
            "`keras.Input(..., dtype='int32')`: a float32 input merges them from 2**24."
            if whole
            else "Deliver them as an int32 column of their own, for an Embedding.",
            figure=shares[found.worst],
        )
    found = Hits(profile, (shares > 0) & ~ids, shares)
    if found:
        yield found.finding(
            "merged",
            "note",
            f"has values that recur, and {dtype} makes one of "
            f"{format_share(shares[found.worst])} of neighbouring ones. The rounding "
            "is small against the standard deviation, so as a quantity they are fine.",
            "Nothing for quantities; codes belong into an int32 column of their own.",
            figure=shares[found.worst],
        )


def _wide(profile: Profile) -> Iterator[Finding]:
    """Dtypes of 8 bytes, of which the model makes 4 or less anyway."""
    column, name = profile.column, profile.column.name
    if column.dtype in ("int64", "uint64") and column.role == "input":
        low, high = min(profile.low), max(profile.high)
        interval = f"[{number(low)}, {number(high)}]"
        fits = -(2**31) <= low and high < 2**31
        fix = Fix(name, "cast", "int32", f"exact: values lie in {interval}")
        yield Finding(
            "int64",
            "note",
            f"{name} is {column.dtype}, 8 bytes a value, with values in {interval}: "
            "twice the memory and transfer, and `keras.Input` without a dtype makes "
            "float32 of it.",
            "Cast to int32 in the pipeline (the finding's fix)."
            if fits
            else "It does not fit int32: hash ids into a smaller range; standardize "
            "quantities.",
            column=name,
            figure=float(max(abs(low), abs(high))),
            fix=fix if fits else None,
        )
    if column.dtype == "float64":
        noise = _noise_in_float32(profile)
        exact = noise is not None and noise < _EXACT_ENOUGH
        reason = f"rounding is {0.0 if noise is None else noise:.1e} of the deviation"
        yield Finding(
            "float64",
            "note",
            f"{name} is float64; Keras makes float32 of it, so half of the memory and "
            "transfer is for nothing.",
            "Cast to float32 in the pipeline (the finding's fix)."
            if exact
            else "float32 loses digits of it: standardize first, then cast.",
            column=name,
            figure=noise,
            fix=Fix(name, "cast", "float32", reason) if exact else None,
        )


def _noise_in_float32(profile: Profile) -> float | None:
    """Returns float32's rounding error against the deviation; None if it breaks.

    From the sample, feature by feature, the worst of them.
    """
    values = np.asarray(profile.sample, np.float64)
    ends = np.array([*profile.low, *profile.high], float)
    # An end that is inf stands for a feature without a finite value.
    if not values.size or np.isinf(_FLOAT32(ends)).any():
        return None
    integers = profile.is_integral & (profile.std > 0)
    if (integers & (profile.largest > _FLOAT32.max_integer)).any():
        return None
    rounded = _FLOAT32(values)
    if ((rounded == 0) & (values != 0)).any():
        return None
    # NaN rounds to NaN and adds nothing.
    errors = np.sqrt((np.nan_to_num(rounded - values) ** 2).mean(axis=0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(errors > 0, errors / profile.std, 0.0).max())
