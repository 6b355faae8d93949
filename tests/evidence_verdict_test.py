"""Verdicts: intervals by hand, each answer, its sentence, and the way to JSON.

How often they claim what is not so is in `wild/verdicts_test.py`.
"""

import math

import numpy as np
import pytest

from tfamp.comparison.verdict import judge
from tfamp.trials.statistics import interval

SAME_SPEED = (1.0, 1.0, 1.0)
TOLERANCE = 0.005


def test_the_interval_is_the_one_of_the_t_table():
    # Quantile 0.95 of Student's t with 2 degrees of freedom, from a printed table.
    half = 2.920 * 1.0 / math.sqrt(3)
    found = interval([1.0, 2.0, 3.0])
    assert found.estimate == 2.0
    assert found.low == pytest.approx(2.0 - half, abs=1e-3)
    assert found.high == pytest.approx(2.0 + half, abs=1e-3)


# By hand: with three seeds the half width is 2.920 / sqrt(3) = 1.686 deviations.
FASTER, NOT_FASTER = "equivalent and faster", "equivalent, not faster"
NONE, FAST = [0.0] * 3, [2.0, 2.0, 2.1]
ANSWERS = {
    "same and faster": ([0.001, 0.0, -0.001], [1.9, 2.0, 2.1], FASTER),
    "same and as fast": ([0.001, 0.0, -0.001], SAME_SPEED, NOT_FASTER),
    "faster in the noise": (NONE, [0.9, 1.1, 1.3], "undecided"),
    "a gain too small to count": (NONE, [1.01, 1.0, 1.01], NOT_FASTER),
    "a sure gain too small to count": (NONE, [1.002] * 3, NOT_FASTER),
    "slower": (NONE, [0.5, 0.5, 0.51], "slower"),
    "slower by too little to count": (NONE, [0.97, 0.971, 0.972], NOT_FASTER),
    "slower, and maybe less accurate": ([-0.02, 0.0, 0.02], [0.5, 0.5, 0.51], "slower"),
    "slower and less accurate": ([-0.011, -0.012, -0.01], [0.5, 0.5, 0.51], "worse"),
    "better counts as same": ([0.19, 0.2, 0.21], FAST, FASTER),
    "1 % worse": ([-0.011, -0.012, -0.01], FAST, "worse"),
    "too little to be sure": ([-0.006, -0.007, -0.005], SAME_SPEED, "undecided"),
    "noise": ([-0.02, 0.0, 0.02], FAST, "undecided"),
    "at the tolerance": ([-0.005] * 3, SAME_SPEED, NOT_FASTER),
    "just beyond it": ([-0.00501] * 3, SAME_SPEED, "worse"),
}


@pytest.mark.parametrize("differences, ratios, answer", ANSWERS.values(), ids=ANSWERS)
def test_each_case_has_its_answer(differences, ratios, answer):
    assert judge(differences, ratios, tolerance=TOLERANCE).answer == answer


def test_the_sentence_has_the_figures():
    verdict = judge([0.001, 0.0, -0.001], [1.9, 2.0, 2.1], tolerance=TOLERANCE)
    assert str(verdict) == (
        "equivalent and faster; the metric loses at most 0.00169, where 0.005 is "
        "allowed; 2.00 times (1.84 to 2.17) as many examples/s"
    )
    better = judge([0.1, 0.1, 0.1], SAME_SPEED, tolerance=TOLERANCE)
    assert better.reason.startswith("the metric loses nothing, where")
    worse = judge([-0.011, -0.012, -0.01], SAME_SPEED, tolerance=TOLERANCE)
    assert str(worse) == (
        "worse; the metric loses 0.00931 or more, where 0.005 is allowed; 1.00 times "
        "(1.00 to 1.00) as many examples/s"
    )


def of_spread(values, number, spread):
    """So many values with the mean of some, and that deviation."""
    drawn = np.random.default_rng(0).normal(size=number)
    return np.mean(values) + spread * (drawn - drawn.mean()) / drawn.std(ddof=1)


def test_as_many_seeds_as_it_asks_for_decide():
    values = of_spread([0.0], 4, 0.01)
    missing = judge(values, [1.0] * 4, tolerance=TOLERANCE).more_seeds
    for number, answer in {4 + missing: NOT_FASTER, 3 + missing: "undecided"}.items():
        again = of_spread([0.0], number, 0.01)
        found = judge(again, [1.0] * number, tolerance=TOLERANCE)
        assert found.answer == answer


def test_a_loss_of_just_the_tolerance_is_told_by_no_number_of_seeds():
    differences = [-0.005 - 0.01, -0.005 + 0.01]
    found = judge(differences, [1.0, 1.0], tolerance=TOLERANCE)
    assert (found.answer, found.more_seeds) == ("undecided", None)
    # Quantile 6.314 of one degree of freedom: 0.005 + 6.314 * 0.01 = 0.0681.
    assert found.needs == "a tolerance of 0.069 would decide"
