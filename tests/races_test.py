"""Races between functions of known speeds, on a clock and noise that are made up."""

import math

import numpy as np
import pytest

from tfamp.tuning import races
from tfamp.tuning.races import Racer


def racer(name, seconds, noise, generator, drift=lambda number: 1.0):
    """Returns a racer whose turns take `seconds` a step, times noise and drift."""
    turns = iter(range(10_000))

    def run(steps):
        factor = math.exp(noise * generator.normal()) * drift(next(turns))
        return steps * seconds * factor

    return Racer(name, run, seconds)


def run(speeds, noise=0.02, seed=0, max_steps=5_000, drift=lambda number: 1.0):
    generator = np.random.default_rng(seed)
    racers = [racer(str(i), s, noise, generator, drift) for i, s in enumerate(speeds)]
    outcome = races.race(racers, goes_on=lambda steps: steps < max_steps, seed=seed)
    return racers, outcome


def test_a_slow_function_drops_out_and_the_order_is_clear():
    racers, outcome = run([0.1, 0.05, 0.4])
    assert outcome.is_clear
    assert len(racers[2].logs) <= 4
    mean, low, high = races.log_ratio(racers[0], racers[1])
    assert low < math.log(2) < high
    assert mean == pytest.approx(math.log(2), abs=0.05)


def test_equal_functions_end_as_equal_and_none_as_faster():
    wrong = 0
    for seed in range(60):
        racers, outcome = run([0.1, 0.1], noise=0.03, seed=seed)
        assert outcome.num_rounds <= 90
        wrong += races.log_ratio(racers[0], racers[1], 0.025)[1] > math.log1p(0.03)
    assert wrong == 0


def test_a_faster_function_is_found_in_nearly_all_races():
    """Of 60 races between 1.00, 0.90 and 0.70 of a time the last wins at least 57."""
    won = 0
    for seed in range(60):
        racers, _ = run([0.1, 0.09, 0.07], noise=0.05, seed=seed)
        ratio = races.log_ratio(racers[0], racers[2], 0.025)
        won += ratio[1] > 0
    assert won >= 57


def test_bursts_that_fall_on_one_function_do_not_hide_the_faster():
    """Of 20 rounds one in ten takes three times as long, for one function or both."""
    found = 0
    for seed in range(40):
        generator = np.random.default_rng(seed)
        logs = [
            math.log(seconds)
            + 0.02 * generator.normal(size=20)
            + math.log(3) * (generator.random(20) < 1 / 10)
            for seconds in (0.1, 0.08)
        ]
        slow, fast = (
            Racer("", lambda steps: 0.0, 0.1, dict(enumerate(each))) for each in logs
        )
        mean, low, _ = races.log_ratio(slow, fast, 0.025)
        found += low > 0
        assert abs(mean - math.log(0.1 / 0.08)) < 0.3
    assert found >= 36


def test_drift_that_all_share_does_not_count():
    racers, outcome = run([0.1, 0.1], noise=0.001, drift=lambda n: 1.0 + 0.2 * n)
    mean, low, high = races.log_ratio(racers[0], racers[1])
    assert outcome.is_clear
    assert abs(mean) < 0.01


def test_turns_are_long_enough_for_the_clock_and_not_longer():
    asked = []

    def noted(steps):
        asked.append(steps)
        return steps * 0.001

    fast = Racer("fast", noted, 0.001)
    fast.take_turn(0)
    slow = Racer("slow", lambda steps: asked.append(steps) or steps * 9.0, 9.0)
    slow.take_turn(0)
    assert asked == [20, 1]
    faster = Racer("faster", noted, 1e-5)
    faster.take_turn(0)
    assert asked[2] == 200  # 0.02 s would be 2,000 steps


def test_a_spent_budget_ends_the_race_undecided():
    racers, outcome = run([0.1, 0.1], noise=0.5, max_steps=4)
    assert not outcome.is_clear
    assert races.log_ratio(*racers, 0.05)[1] < 0 or outcome.num_rounds < 4
    assert races.log_ratio(Racer("a", float, 1.0), racers[0])[1:] == (
        -math.inf,
        math.inf,
    )
