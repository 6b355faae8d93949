"""What the ratio of a measure comes to: better, worse, the same, or not clear."""

import math
from typing import Literal

from tfamp.evidence.intervals import Interval

Effect = Literal["better", "worse", "as good", "same", "unclear", "one seed", ""]
# A gain of less than this is none: changing the policy has its own cost.
MIN_GAIN = 1.05


def effect_of_ratio(found: Interval, *, more_is_better: bool) -> Effect:
    """Returns what the interval of a ratio comes to.

    A difference is said where the interval rules out none at all and the estimate is
    at least `MIN_GAIN` away from it; "same" where a difference of `MIN_GAIN` is ruled
    out.

    Example:
        >>> effect_of_ratio(Interval(1.9, 1.8, 2.0), more_is_better=False)
        'worse'
        >>> effect_of_ratio(Interval(1.01, 1.0, 1.02), more_is_better=True)
        'same'
        >>> effect_of_ratio(Interval(1.0, 0.9, 1.1), more_is_better=True)
        'unclear'
    """
    if not all(map(math.isfinite, (found.estimate, found.low, found.high))):
        return "one seed"
    if 1 / MIN_GAIN < found.low and found.high < MIN_GAIN:
        return "same"
    if found.low > 1 and found.estimate >= MIN_GAIN:
        return "better" if more_is_better else "worse"
    if found.high < 1 and found.estimate <= 1 / MIN_GAIN:
        return "worse" if more_is_better else "better"
    return "unclear"
