"""Distinct values of a column's sample: which become equal, and which are ids."""

import re

import numpy as np

from tfamp.data.health.profile import Profile

# Integers are taken for ids when they fill their range this densely.
_DENSE = 0.5
_ID_NAME = re.compile(r"(^|[_/\W])(id|ids|index|idx|key|code|zip|zipcode)$", re.I)


def distinct_values(profile: Profile, feature: int) -> np.ndarray:
    """Returns the distinct finite values of a feature in the sample, sorted."""
    values = profile.sample[:, feature]
    if values.dtype.kind not in "iub":
        values = values.astype(np.float64)
        values = values[np.isfinite(values)]
    return np.unique(values)


def merged_share(
    profile: Profile, feature: int
) -> tuple[float, tuple[float, float] | None]:
    """Returns the share of neighbouring distinct values that become equal, and two.

    Values that become inf are left out: they are the overflow's.
    """
    distinct = distinct_values(profile, feature)
    rounded = profile.rounding(distinct)
    held = np.isfinite(rounded)
    distinct, rounded = distinct[held], rounded[held]
    equal = np.flatnonzero(rounded[1:] == rounded[:-1])
    if not len(equal):
        return 0.0, None
    first = distinct[equal[0] : equal[0] + 2].tolist()
    return len(equal) / (len(distinct) - 1), (first[0], first[1])


def looks_like_ids(profile: Profile, feature: int) -> bool:
    """Whether whole numbers fill their range as ids do, or are called so.

    Drawn from a range of R ids, s values hold R (1 - exp(-s / R)) distinct ones.
    Small numbers, which every compute dtype holds, are not asked for.
    """
    if not (profile.column.is_integer or profile.is_integral[feature]):
        return False
    if not profile.num_finite[feature]:
        return False
    if _ID_NAME.search(profile.column.name):
        return True
    span = profile.high[feature] - profile.low[feature] + 1
    if span > 2 * profile.num_rows:
        return False
    expected = span * -np.expm1(-len(profile.sample) / span)
    return len(distinct_values(profile, feature)) >= _DENSE * float(expected)
