"""Quantiles and bounds, held against SciPy, and how often they are too low."""

import numpy as np
import pytest

from tfamp.trials import statistics as bounds

stats = pytest.importorskip("scipy.stats", reason="the limits to compare with")


@pytest.mark.parametrize("rate", [0.05, 0.025, 0.002, 0.0001])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 200, 5000])
def test_the_quantile_is_students(rate, degrees):
    exact = stats.t.isf(rate, degrees)
    assert bounds.student_quantile(rate, degrees) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("rate", [0.05, 0.025 / 12])
@pytest.mark.parametrize("number", [10, 600, 5000])
@pytest.mark.parametrize("hits", [0, 1, 9])
def test_the_limit_of_a_fraction_is_that_of_the_binomial(hits, number, rate):
    exact = stats.beta.isf(rate, hits + 1, number - hits)
    found = bounds.difference_limit(hits, 0, number, rate)
    assert found == pytest.approx(exact, rel=1e-6)


def test_what_is_lost_each_time_may_be_lost_always():
    assert bounds.difference_limit(7, 0, 7, 0.05) == 1.0


def rate_too_low(number, difference, won, rate):
    """Returns how often the limit is below the true difference, by the trinomial."""
    counts_won = np.arange(stats.binom.isf(1e-6, number, won) + 1 if won else 1)
    most = int(stats.binom.ppf(0.5, number, difference + won)) + 2
    total = 0.0
    for count in counts_won.astype(int):
        lost = np.arange(most)
        # What is still claimed for the most lost is claimed for fewer, too.
        low, high = -1, most - 1
        while high > low + 1:
            middle = (low + high) // 2
            limit = bounds.difference_limit(middle, count, number, rate)
            low, high = (middle, high) if limit < difference else (low, middle)
        inside = stats.binom.pmf(lost, number - count, (difference + won) / (1 - won))
        total += stats.binom.pmf(count, number, won) * inside[: low + 1].sum()
    return float(total)


@pytest.mark.parametrize("rate", [0.025, 0.025 / 12], ids=["at the end", "of twelve"])
@pytest.mark.parametrize("won", [0.0, 0.001, 0.01])
@pytest.mark.parametrize("number", [750, 1500, 3000])
def test_a_limit_is_too_low_no_more_often_than_it_says(number, won, rate):
    assert rate_too_low(number, 0.005, won, rate) <= 1.06 * rate
