"""Features of a column: distinct values, ids, one finding of several, figures."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np

from tfamp.data.health.profile import Profile
from tfamp.records.findings import Finding, Fix, Severity
from tfamp.records.units import format_share

# Integers above this are no rows of an embedding table: it would have more
# parameters than the largest ones in use.
_MAX_INDEX = 2**27
# With values so many deviations away, all others would end up next to 0.
_MAX_STANDARDIZED = 100.0
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


def place(profile: Profile, feature: int) -> str:
    """Returns the name of one feature: "x[3]", or the column's own."""
    name = profile.column.name
    return name if profile.num_features == 1 else f"{name}[{feature}]"


@dataclasses.dataclass(frozen=True)
class Hits:
    """The features of a column that a rule fires for.

    Attributes:
        profile: The column.
        mask: Which features.
        worst: The feature to put into the message.
    """

    profile: Profile
    mask: np.ndarray
    worst: int

    @property
    def column(self) -> str:
        """The feature if it is the only one, else the column."""
        one = int(self.mask.sum()) == 1
        return place(self.profile, self.worst) if one else self.profile.column.name

    @property
    def name(self) -> str:
        """The worst feature and how many there are, to begin a sentence with."""
        name, number = place(self.profile, self.worst), int(self.mask.sum())
        if number == 1:
            return name
        return f"{name} (worst of {number} of {self.profile.num_features} features)"

    def finding(
        self,
        rule: str,
        severity: Severity,
        message: str,
        remedy: str,
        *,
        figure: float,
        details: Mapping[str, int | float | str | None] | None = None,
        fix: Fix | None = None,
    ) -> Finding:
        """Returns the finding, with the number of features among its details."""
        return Finding(
            rule,
            severity,
            f"{self.name} {message}",
            remedy,
            column=self.column,
            figure=float(figure),
            details={"num_features": int(self.mask.sum()), **(details or {})},
            fix=fix,
        )


def hits(profile: Profile, mask: np.ndarray, score: np.ndarray) -> Hits | None:
    """Returns the features of a mask, the highest score as the worst; None if empty."""
    if not mask.any():
        return None
    comparable = np.where(mask, np.nan_to_num(score, posinf=1e308), -np.inf)
    return Hits(profile, mask, int(np.argmax(comparable)))


def may_be_index(profile: Profile) -> bool:
    """Whether a column can be rows of an embedding table or codes of categories."""
    if not profile.column.is_integer:
        return False
    return min(profile.low) >= 0 and max(profile.high) <= _MAX_INDEX


def standardizing(profile: Profile) -> Fix | None:
    """Returns the fix that takes mean and standard deviation out of an input column.

    None where that does not help, or would turn codes of categories into numbers.
    """
    column = profile.column
    if column.role != "input" or column.is_text or may_be_index(profile):
        return None
    if any(looks_like_ids(profile, i) for i in range(profile.num_features)):
        return None
    std = np.where(profile.std > 0, profile.std, 1.0)
    distance = np.maximum(
        profile.high.astype(float) - profile.mean,
        profile.mean - profile.low.astype(float),
    )
    usable = np.isfinite(profile.std).all() and (profile.num_finite > 0).all()
    if not usable or (distance / std).max() > _MAX_STANDARDIZED:
        return None
    return Fix(
        column.name,
        "standardize",
        "float32",
        "subtracted in float64, before anything rounds; serve with the same numbers",
        tuple(profile.mean.tolist()),
        tuple(std.tolist()),
    )


def number(value: int | float) -> str:
    """Returns a number with at most four digits that matter; integers as they are.

    Example:
        >>> number(2**60 + 1), number(0.123456), number(65504.0), number(1e-9)
        ('1,152,921,504,606,846,977', '0.1235', '65,504', '1e-09')
    """
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.4g}"


def share_of(part: int, whole: int) -> str:
    """Returns "3 of 100 values (3.0 %)"."""
    return f"{part:,} of {whole:,} values ({format_share(part / max(1, whole))})"
