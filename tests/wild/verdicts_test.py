"""Verdicts of `tfamp.compare`: what defaults decide, how often, and what they say."""

import re

import numpy as np
import pytest

from tests import made_evidence
from tfamp.comparison.verdict import Examples, judge

REPORTS = 300
POLICIES = ("float32", "mixed_bfloat16")
# Standard errors of a rate of 5 % in so many reports, twice.
NOISE = 2 * (0.05 * 0.95 / REPORTS) ** 0.5
SAME = np.zeros(3)


def rng_of(*words):
    return np.random.default_rng([*map(ord, "".join(map(str, words)))])


def speeds(rng, ratio, noise, seeds=3):
    """Ratios of runs whose own speeds scatter by `noise` from run to run."""
    logs = np.log(ratio) + rng.normal(0, noise, seeds) - rng.normal(0, noise, seeds)
    return np.exp(logs)


def flipped(rng, examples, lost, won, seeds=3, scatter=0.0):
    """Right answers won (1) and lost (-1) under a policy, by seed and example."""
    drawn = rng.random((seeds, examples))
    lost = np.clip(lost + rng.normal(0, scatter, (seeds, 1)), 0, 1)
    return (drawn > 1 - won).astype(float) - (drawn < lost)


def said(rng, speed=None, changes=None, losses=None):
    """The verdict on a policy; what is not given is the same as the reference."""
    examples = None if changes is None else Examples.of(changes, is_rate=True)
    differences = changes.mean(axis=1) if changes is not None else SAME
    tolerance = 0.005
    if losses is not None:
        differences, tolerance = losses, 0.05
    ratios = speeds(rng, 2.0, 0.01) if speed is None else speed
    return judge(differences, ratios, tolerance=tolerance, examples=examples)


def part(words, report, reports=REPORTS):
    rng = rng_of(*words)
    return sum(bool(report(rng)) for _ in range(reports)) / reports


# Power: what is there is said.


@pytest.mark.quick("1.3-better")
@pytest.mark.parametrize(("ratio", "word"), [(1.3, "better"), (1 / 1.3, "worse")])
def test_a_policy_1_3_times_as_fast_or_slow_is_called_so_with_three_seeds(ratio, word):
    def report(rng):
        return said(rng, speeds(rng, ratio, 0.05)).speed_effect == word

    assert part(("speed", word), report) >= 0.95


def test_a_policy_that_takes_three_and_a_half_times_as_long_is_slower():
    for ratios in ([0.24, 0.28, 0.35], [0.31, 0.28, 0.27]):
        assert judge(SAME, ratios, tolerance=0.005).answer == "slower"
        # Whether it is as accurate matters no more.
        assert judge([0.02, -0.02, 0.0], ratios, tolerance=0.005).answer == "slower"
        assert judge([-0.1, -0.1, -0.11], ratios, tolerance=0.005).answer == "worse"


EQUAL = {
    "2 % of predictions differ": lambda rng: {
        "changes": flipped(rng, 3300, 0.01, 0.01)
    },
    "a loss with paired noise of 2 %": lambda rng: {"losses": rng.normal(0, 0.02, 3)},
}


@pytest.mark.parametrize("name", EQUAL)
def test_an_equal_policy_is_called_equivalent_with_three_seeds(name):
    def report(rng):
        return said(rng, **EQUAL[name](rng)).answer == "equivalent and faster"

    assert part((name,), report) >= 0.8


# False claims: what is not there is seldom said.

# Lost, won, and by how much the part that is lost scatters over seeds.
LOST = {
    "3,300 examples of which 2 % flip": (0.0125, 0.0075),
    "only lost ones": (0.005, 0.0),
    "seeds that scatter": (0.0125, 0.0075, 3, 0.003),
}


@pytest.mark.quick("3,300 examples of which 2 % flip")
@pytest.mark.parametrize("given", LOST.values(), ids=LOST)
def test_a_policy_that_loses_the_tolerance_is_seldom_called_equivalent(given):
    def report(rng):
        changes = flipped(rng, 3300, *given)
        return "equivalent" in said(rng, changes=changes).answer

    assert part(("lost", *given), report) <= 0.05 + NOISE


def test_examples_that_every_seed_loses_are_counted_once():
    def report(rng):
        changes = flipped(rng, 2000, 0.0, 0.0) - (rng.random(2000) < 0.005)
        return "equivalent" in said(rng, changes=changes).answer

    assert part(("shared",), report) <= 0.05 + NOISE


@pytest.mark.quick("2-0.01")
@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_policy_as_fast_is_seldom_called_faster_or_slower(noise, seeds):
    rng = rng_of("same", noise, seeds)
    found = [
        judge([0.0] * seeds, speeds(rng, 1.0, noise, seeds), tolerance=0.005).answer
        for _ in range(REPORTS)
    ]
    assert found.count("equivalent and faster") / REPORTS <= 0.05 + NOISE
    assert found.count("slower") / REPORTS <= 0.05 + NOISE


# What is undecided says what would decide.


def test_too_few_examples_say_how_many_or_which_tolerance():
    found = said(rng_of("few"), changes=np.zeros((3, 50)))
    assert found.answer == "undecided"
    # 1 - 0.05 ** (1 / 598) is 0.005: where none of 598 is lost, no more are.
    assert 598 <= found.examples_needed <= 700
    assert f"{found.examples_needed} validation examples" in found.needs
    # Likewise 1 - 0.05 ** (1 / 50) is 0.058.
    assert found.tolerance_needed == pytest.approx(0.059)
    assert "a tolerance of 0.059 would decide" in found.needs
    shown = Examples.of(np.zeros((3, 50)), is_rate=True)
    again = judge(SAME, [2.0, 2.0, 2.1], tolerance=0.059, examples=shown)
    assert again.answer == "equivalent and faster"


@pytest.mark.quick("2")
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_every_undecided_verdict_says_what_would_decide(seeds):
    rng = rng_of("open", seeds)
    for _ in range(50):
        changes = flipped(rng, 500, 0.02, 0.02, seeds)
        ratios = speeds(rng, 1.05, 0.1, seeds)
        given = {"tolerance": 0.005, "examples": Examples.of(changes, is_rate=True)}
        found = judge(changes.mean(axis=1), ratios, **given)
        assert (found.answer == "undecided") == bool(found.needs)


# As a user sees it: a policy that is slow here.


def test_a_policy_that_is_slow_is_slower_and_its_ratio_that_of_the_printed_numbers():
    policies = dict(zip(POLICIES, ((1, 0.98), (0.3, 0.98)), strict=True))
    slow = made_evidence.evidence(policies)
    assert slow.verdict == "slower"
    speed = slow.ratio("examples_per_second", "mixed_bfloat16")
    assert slow.verdicts["mixed_bfloat16"].speed == speed
    lines = slow.table().splitlines()
    rows = [lines.index(next(x for x in lines if x.startswith(p))) for p in POLICIES]
    before, after, ratio = (
        float(re.findall(r"[\d,.]+", line)[0].replace(",", ""))
        for line in (
            lines[rows[0]].removeprefix(POLICIES[0]),
            lines[rows[1]].removeprefix(POLICIES[1]),
            lines[rows[1] + 1],
        )
    )
    # It has two digits.
    assert ratio == pytest.approx(after / before, rel=0.05)
