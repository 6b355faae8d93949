"""Bounds on means and fractions that were estimated from a few values.

They need no SciPy: timing and exports do without it. A `rate` is the chance that the
true value lies beyond the bound.
"""

import functools
import math
import statistics

# Halvings until the search for a bound stands still.
_HALVINGS = 60
# Degrees of freedom beyond which the expansion of t is exact to six digits.
_MANY_DEGREES = 200


@functools.lru_cache(maxsize=4096)
def student_quantile(rate: float, degrees: int) -> float:
    """Returns what Student's t exceeds with a chance of `rate`, at most a half.

    Source: Abramowitz & Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4;
    for many degrees 26.7.5.

    Example:
        >>> [round(student_quantile(0.025, degrees), 3) for degrees in (1, 2, 9)]
        [12.706, 4.303, 2.262]
    """
    if degrees < 1:
        return math.inf
    if degrees > _MANY_DEGREES:
        z = statistics.NormalDist().inv_cdf(1 - rate)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        return z + (z**3 + z) / 4 / degrees + second / degrees**2
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, degrees) > rate else (low, middle)
    return math.sqrt(degrees) * math.tan(high)


def _tail(angle: float, degrees: int) -> float:
    """Returns the chance beyond t = sqrt(degrees) * tan(angle)."""
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0 if degrees == 1 else term
    for factor in range(2 + is_odd, degrees - 1, 2):
        term *= (factor - 1) / factor * cosine**2
        total += term
    within = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return (1 - within) / 2


def fraction_limit(hits: int, number: int, rate: float) -> float:
    """Returns the fraction of which at most `hits` of a number are seen at that rate.

    Source: Clopper & Pearson, The use of confidence or fiducial limits illustrated in
    the case of the binomial, Biometrika 26, 1934.

    Example:
        >>> [round(fraction_limit(*each, 0.05), 5) for each in ((0, 598), (1, 947))]
        [0.005, 0.005]
    """
    if hits >= number:
        return 1.0
    logarithms = [
        math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
        for k in range(hits + 1)
    ]

    def chance(fraction: float) -> float:
        log_in, log_out = math.log(fraction), math.log1p(-fraction)
        terms = (
            each + k * log_in + (number - k) * log_out
            for k, each in enumerate(logarithms)
        )
        return math.fsum(map(math.exp, terms))

    low, high = hits / number, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > rate else (low, middle)
    return high


def difference_limit(lost: int, won: int, number: int, rate: float) -> float:
    """Returns what a true fraction lost minus won is below, of paired examples.

    Where nothing is won it is the exact limit of a binomial fraction. Else it is that
    of a score test, whose rate is within 6 % of the one that was asked for, or below it
    (computed from the trinomial distribution for 150 to 10,000 examples).

    Source: Tango, Equivalence test and confidence interval for the difference in
    proportions for the paired-sample design, Statistics in Medicine 17, 1998.

    Example:
        >>> [round(difference_limit(each, 5, 1000, 0.025), 4) for each in (0, 5, 10)]
        [-0.0012, 0.0073, 0.0139]
    """
    if not won:
        return fraction_limit(lost, number, rate)
    z = statistics.NormalDist().inv_cdf(1 - rate)

    def is_ruled_out(difference: float) -> bool:
        a = 2 * number
        b = -lost - won + (2 * number - lost + won) * difference
        c = -won * difference * (1 - difference)
        share_won = (math.sqrt(b * b - 4 * a * c) - b) / (2 * a)
        variance = number * (2 * share_won + difference * (1 - difference))
        return number * difference - (lost - won) >= z * math.sqrt(max(variance, 0.0))

    low, high = (lost - won) / number, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_ruled_out(middle) else (middle, high)
    return high
