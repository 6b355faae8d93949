"""Looks at a comparison that goes on: how much error each of them may spend.

Who measures until a claim comes up will find one: with looks after 3, 5, 8 and 12 seeds
an interval that errs in 5 % of all comparisons errs in 12 %. So every look spends a
part of `ERROR_RATE` (alpha spending): the first one half of it, 2.5 %, each further one
a third of that before, 0.83 %, 0.28 % and so on, however many there are.

That adds up to 3.75 %, and the rest is needed: the number of seeds of a look may be
chosen by the last look, as the advice on more seeds does, and then the look errs more
often than it spends. Whoever chooses them so as to err as often as possible comes to
4.4 %; spending half of what is left at each look, they would come to 6.6 % (computed by
dynamic programming, `benchmarks/verdict_rates.py`).

Source: Slud & Wei, Two-sample repeated significance tests based on the modified
Wilcoxon statistic, JASA 77, 1982; Lan & DeMets, Discrete sequential boundaries for
clinical trials, Biometrika 70, 1983; Proschan & Hunsberger, Designed extension of
studies based on conditional power, Biometrics 51, 1995.
"""

from tfamp.evidence.intervals import ERROR_RATE


def rate_of(look: int, num_candidates: int = 1) -> float:
    """Returns the chance of a false claim that a look may have.

    Args:
        look: Number of the look, from 1.
        num_candidates: Policies that are judged at each look; they share the error,
            since the best of them is what a comparison comes to.

    Example:
        >>> [round(rate_of(look), 5) for look in (1, 2, 3)]
        [0.025, 0.00833, 0.00278]
    """
    return ERROR_RATE / 2 / 3 ** (look - 1) / num_candidates


def difference_rate_of(look: int, num_candidates: int = 1) -> float:
    """Returns the chance of a false claim of a difference, on each side.

    Of the error of a look a quarter goes to each of them: a better and a worse metric,
    a faster and a slower policy. With those of the other measures
    (`tfamp.evidence.effects`) they come to 5 % for a report.
    """
    return rate_of(look, num_candidates) / 4
