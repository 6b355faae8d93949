"""Verdicts: intervals by hand, each answer, error rates over simulated comparisons."""

import math

import numpy as np
import pytest

from tfamp.comparison import verdict as verdict_module
from tfamp.comparison.verdict import Verdict, judge, more_seeds
from tfamp.trials.intervals import Interval, interval

pytest.importorskip("scipy")

SAME_SPEED = (1.0, 1.0, 1.0)
TOLERANCE = 0.005
NUM_COMPARISONS = 200
# Of 200 comparisons, false at 5 % each, so many or fewer are false in 99.9 of 100.
MOST_FALSE = 20


def test_the_interval_is_the_one_of_the_t_table():
    # Quantile 0.95 of Student's t with 2 degrees of freedom, from a printed table.
    half = 2.920 * 1.0 / math.sqrt(3)
    found = interval([1.0, 2.0, 3.0])
    assert found.estimate == 2.0
    assert found.low == pytest.approx(2.0 - half, abs=1e-3)
    assert found.high == pytest.approx(2.0 + half, abs=1e-3)


def test_the_ratio_is_a_geometric_mean():
    speed = judge([0.0, 0.0], [1.0, 4.0], tolerance=TOLERANCE).speed
    assert speed.estimate == pytest.approx(2.0)
    # Of logarithms 0 and log 4: quantile 50.92 of t with one degree of freedom, an
    # eighth of 5 % on each side.
    half = 50.92 * (math.log(4) / math.sqrt(2)) / math.sqrt(2)
    assert math.log(speed.high / 2) == pytest.approx(half, rel=1e-3)


# By hand: with three seeds the half width is 4.303 / sqrt(3) = 2.484 deviations, for a
# difference 8.86 / sqrt(3) = 5.12.
FASTER, NOT_FASTER = "equivalent and faster", "equivalent, not faster"
NONE, FAST = [0.0] * 3, [2.0, 2.0, 2.1]
ANSWERS = {
    "same and faster": ([0.001, 0.0, -0.001], [1.9, 2.0, 2.1], FASTER),
    "same and as fast": ([0.001, 0.0, -0.001], SAME_SPEED, NOT_FASTER),
    "faster in the noise": (NONE, [0.9, 1.1, 1.3], "undecided"),
    "a gain too small to count": (NONE, [1.01, 1.0, 1.01], NOT_FASTER),
    "a sure gain too small to count": (NONE, [1.002] * 3, NOT_FASTER),
    "slower": (NONE, [0.5, 0.5, 0.51], NOT_FASTER),
    "better counts as same": ([0.19, 0.2, 0.21], FAST, FASTER),
    "1 % worse": ([-0.011, -0.012, -0.01], FAST, "worse"),
    "too little to be sure": ([-0.01, -0.011, -0.009], SAME_SPEED, "undecided"),
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
        "equivalent and faster; the metric loses at most 0.00248, where 0.005 is "
        "allowed; 2.00 times (1.55 to 2.58) as many examples/s"
    )
    better = judge([0.1, 0.1, 0.1], SAME_SPEED, tolerance=TOLERANCE)
    assert better.reason.startswith("the metric loses nothing, where")
    worse = judge([-0.011, -0.012, -0.01], SAME_SPEED, tolerance=TOLERANCE)
    assert str(worse) == (
        "worse; the metric loses 0.00852 or more, where 0.005 is allowed; 1.00 times "
        "(1.00 to 1.00) as many examples/s"
    )


def test_a_verdict_comes_back_from_json():
    verdict = judge([-0.02, 0.0, 0.02], SAME_SPEED, tolerance=TOLERANCE)
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert isinstance(verdict.quality, Interval)


# Seeds that are missing


def test_as_many_seeds_as_it_asks_for_decide():
    rng = np.random.default_rng(0)
    values = rng.normal(0, 1, 4)
    # Values of which mean and deviation are known: 0 and 0.01.
    values = 0.01 * (values - values.mean()) / values.std(ddof=1)
    missing = judge(values, [1.0] * 4, tolerance=TOLERANCE).more_seeds
    whole = np.resize(values, 4 + missing)
    whole = 0.01 * (whole - whole.mean()) / whole.std(ddof=1)
    answer = judge(whole, [1.0] * len(whole), tolerance=TOLERANCE, look=2).answer
    assert answer == "equivalent, not faster"
    one_less = whole[:-1]
    one_less = 0.01 * (one_less - one_less.mean()) / one_less.std(ddof=1)
    verdict = judge(one_less, [1.0] * len(one_less), tolerance=TOLERANCE, look=2)
    assert verdict.answer == "undecided"
    # A look that decides nothing has spent its error, so the next one needs more.
    assert verdict.more_seeds > 1


def test_a_loss_of_just_the_tolerance_is_told_by_no_number_of_seeds():
    differences = [-0.005 - 0.01, -0.005 + 0.01]
    assert more_seeds(differences, tolerance=TOLERANCE) is None
    text = str(judge(differences, [1.0, 1.0], tolerance=TOLERANCE))
    assert text.startswith("undecided; the metric may lose")


def test_as_many_seeds_as_it_asks_for_tell_faster_from_not_faster():
    ratios = [0.95, 1.25, 1.05]
    verdict = judge([0.0] * 3, ratios, tolerance=TOLERANCE)
    assert verdict.answer == "undecided"
    logs = np.log(ratios)

    def with_number(number):
        values = np.resize(logs, number)
        values = logs.mean() + (values - values.mean()) * (
            logs.std(ddof=1) / values.std(ddof=1)
        )
        return judge([0.0] * number, np.exp(values), tolerance=TOLERANCE, look=2)

    enough = 3 + verdict.more_seeds
    assert with_number(enough).answer == "equivalent and faster"
    assert with_number(enough - 1).answer == "undecided"


# Error rates


@pytest.fixture
def answers(monkeypatch):
    """Answers on comparisons whose truth is known: seeds scatter by 0.4 %."""
    # Most of the time goes to how many more seeds would decide, which is not asked.
    monkeypatch.setattr(verdict_module, "_more", lambda *_: None)

    def found(*, mean, ratio, seeds, spread=0.004):
        rng = np.random.default_rng(42)
        return [
            judge(
                rng.normal(mean, spread, seeds),
                ratio * np.exp(rng.normal(0, 0.03, seeds)),
                tolerance=TOLERANCE,
            ).answer
            for _ in range(NUM_COMPARISONS)
        ]

    return found


@pytest.mark.parametrize("seeds", [2, 5, 10])
def test_what_is_worse_by_the_tolerance_is_seldom_called_equivalent(seeds, answers):
    found = answers(mean=-TOLERANCE, ratio=2.0, seeds=seeds)
    assert sum("equivalent" in answer for answer in found) <= MOST_FALSE
    # At the border itself "worse" is as false a claim.
    assert found.count("worse") <= MOST_FALSE


def test_what_is_1_percent_worse_is_never_called_equivalent_and_mostly_worse(answers):
    found = answers(mean=-0.01, ratio=2.0, seeds=10)
    assert sum("equivalent" in answer for answer in found) == 0
    assert found.count("worse") > 0.7 * NUM_COMPARISONS


@pytest.mark.parametrize("seeds", [3, 10])
def test_what_is_the_same_is_never_called_worse_and_seldom_faster(seeds, answers):
    found = answers(mean=0.0, ratio=1.0, seeds=seeds)
    assert found.count("worse") == 0
    assert found.count("equivalent and faster") <= MOST_FALSE


@pytest.mark.parametrize("seeds", [3, 10])
def test_what_is_faster_by_5_percent_is_seldom_called_not_faster(seeds, answers):
    found = answers(mean=0.01, ratio=1.0501, seeds=seeds)
    assert found.count("equivalent, not faster") <= MOST_FALSE


def test_what_is_the_same_is_mostly_called_not_faster(answers):
    found = answers(mean=0.0, ratio=1.0, seeds=20)
    assert found.count("equivalent, not faster") > 0.85 * NUM_COMPARISONS


def test_what_is_the_same_and_faster_is_mostly_called_so(answers):
    found = answers(mean=0.0, ratio=1.5, seeds=10)
    assert found.count("equivalent and faster") > 0.9 * NUM_COMPARISONS


def test_noise_is_undecided(answers):
    found = answers(mean=0.0, ratio=2.0, seeds=5, spread=0.05)
    # Either of the two claims about the metric comes up by chance.
    assert found.count("undecided") >= NUM_COMPARISONS - 2 * MOST_FALSE
