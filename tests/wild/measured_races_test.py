"""How often `measure_policies` prefers a policy that takes the same time as float32.

The clock is made up, so that hundreds of measurements with known speeds take seconds:
everything behind it, from the rounds to the pick, is what a measurement runs.
"""

import collections
import math
import random

import pytest

from tfamp.tuning.measured_policies import POLICIES, PolicyTime, Racer, race

STEP_SECONDS = 0.005
EVERY_WAY = [PolicyTime(policy, xla) for xla in (False, True) for policy in POLICIES]


class Machine:
    """Steps whose times scatter, and whose clock is what they took together."""

    def __init__(self, seed, noise, gain=1.0, has_bursts=False, drift=0.0):
        self.random, self.noise, self.gain = random.Random(seed), noise, gain
        self.has_bursts, self.drift, self.now = has_bursts, drift, 0.0

    def seconds_of(self, steps, is_half):
        factor = math.exp(self.random.gauss(0.0, self.noise)) + self.drift * self.now
        if self.has_bursts and self.random.random() < 0.1:
            factor *= 1 + self.random.expovariate(1.0)
        seconds = STEP_SECONDS * steps * factor / (self.gain if is_half else 1.0)
        self.now += seconds
        return seconds

    def prepare(self, candidate):
        is_half = candidate.policy != "float32"
        return Racer(lambda steps: self.seconds_of(steps, is_half), STEP_SECONDS)


def picked(candidates, times, **how):
    """Returns how often each policy is the best of that many measurements."""
    found = collections.Counter()
    for seed in range(times):
        machine = Machine(seed, **how)
        given = (candidates, machine.prepare, 20.0, {})
        measured = race("model", *given, clock=lambda m=machine: m.now)
        found[measured.best.name] += 1
    return found


@pytest.mark.quick("2-even-0.02")
@pytest.mark.parametrize("noise", [0.02, 0.1])
@pytest.mark.parametrize("has_bursts", [False, True], ids=["even", "bursts"])
@pytest.mark.parametrize("number", [2, 6])
def test_of_policies_that_take_the_same_time_float32_is_kept(number, has_bursts, noise):
    times = 300
    found = picked(EVERY_WAY[:number], times, noise=noise, has_bursts=has_bursts)
    others = times - found["float32"]
    # 2 %, and what 300 draws may be off it by.
    assert others <= 0.02 * times + 2 * math.sqrt(0.02 * 0.98 * times)


def test_a_machine_that_gets_slower_slows_all_alike():
    assert picked(EVERY_WAY, 50, noise=0.01, drift=0.5)["float32"] == 50


def test_a_gain_of_less_than_5_percent_is_none():
    assert picked(EVERY_WAY[:2], 100, noise=0.003, gain=1.04)["float32"] == 100


@pytest.mark.parametrize(("gain", "noise"), [(1.1, 0.05), (1.3, 0.1)])
def test_a_gain_that_is_worth_a_change_is_picked(gain, noise):
    found = picked(EVERY_WAY[:2], 100, noise=noise, gain=gain)
    assert found["mixed_bfloat16"] >= 95
