"""Rules on columns of numbers: range, what rounding takes away, wide dtypes."""

import math
from collections.abc import Iterator

import numpy as np

from tfamp.data.health.profile import NOISY, Hits, Profile, Rounding, standardizing
from tfamp.records import formats
from tfamp.records.findings import Finding, Fix, Severity
from tfamp.records.units import format_share, number

RULES = (
    *("nan", "inf", "overflow", "underflow", "subnormal", "constant", "unnormalized"),
    *("resolution", "ids", "merged", "int64", "float64"),
)
# Below this a few tiny values among others are as good as 0: normalized data has
# 0.005 % of its values below float16's normal range.
_MIN_SHARE = 0.01
_MANY = 0.5
_SMALL = 0.01
# A column this many deviations away from 0 is mostly offset.
_MAX_OFFSET = 10.0
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
    """Yields what is wrong with a column of numbers.

    The profile of targets and weights is that of float32: losses are computed in it.
    """
    yield from _not_finite(profile)
    yield from _overflow(profile)
    yield from _underflow(profile)
    yield from _constant(profile)
    if profile.column.role == "input":
        yield from _unnormalized(profile)
        yield from _resolution(profile)
        yield from _merged(profile)
    yield from _wide(profile)


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


def _share_of(part: int, whole: int) -> str:
    """Returns "3 of 100 values (3.0 %)"."""
    return f"{part:,} of {whole:,} values ({format_share(part / max(1, whole))})"
