"""How often `measure_policies` prefers a policy that takes the same time as float32.

The clock is made up, so that hundreds of measurements with known speeds take seconds:
everything behind it, from the rounds to the pick, is what a measurement runs.
"""

import collections
import math
import random

import pytest

from tfamp.tuning.measured_policies import Measuring
from tfamp.tuning.races import Candidate, Prepared, Racer

STEP_SECONDS = 0.005
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
EVERY_WAY = [Candidate(policy, xla) for xla in (False, True) for policy in POLICIES]


class Machine:
    """Steps whose times scatter, and whose clock is what they took together."""

    def __init__(self, seed, noise, gain=1.0, has_bursts=False):
        self.random, self.noise, self.gain = random.Random(seed), noise, gain
        self.has_bursts, self.now = has_bursts, 0.0

    def seconds_of(self, steps, is_half):
        factor = math.exp(self.random.gauss(0.0, self.noise))
        if self.has_bursts and self.random.random() < 0.1:
            factor *= 1 + self.random.expovariate(1.0)
        seconds = STEP_SECONDS * steps * factor / (self.gain if is_half else 1.0)
        self.now += seconds
        return seconds

    def prepare(self, candidate):
        is_half = candidate.policy != "float32"
        racer = Racer(
            candidate.name, lambda steps: self.seconds_of(steps, is_half), STEP_SECONDS
        )
        return Prepared(candidate, racer, 0.1, "")

    def probe(self, candidate, num_examples):
        return STEP_SECONDS


def started(machine):
    return Measuring("model", machine, 20.0, 200, clock=lambda: machine.now)


def picked(candidates, times, **machine):
    """Returns how often each policy is the best of that many measurements."""
    found = collections.Counter()
    for seed in range(times):
        measuring = started(Machine(seed, **machine))
        found[measuring.run(candidates, {}).best.policy] += 1
    return found


@pytest.mark.quick("2-even-0.02")
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("has_bursts", [False, True], ids=["even", "bursts"])
@pytest.mark.parametrize("number", [2, 6])
def test_of_policies_that_take_the_same_time_float32_is_kept(number, has_bursts, noise):
    times = 300
    candidates = EVERY_WAY[:number]
    others = 0
    for seed in range(times):
        machine = Machine(seed, noise, has_bursts=has_bursts)
        measuring = Measuring(
            "model", machine, 20.0, 200, clock=lambda m=machine: m.now
        )
        others += measuring.run(candidates, {}).chosen != 0
    # 2 %, and what 300 draws may be off it by.
    assert others <= 0.02 * times + 2 * math.sqrt(0.02 * 0.98 * times)


@pytest.mark.quick("1.02")
@pytest.mark.parametrize("gain", [1.02, 1.04])
def test_a_gain_of_less_than_5_percent_is_none(gain):
    found = picked(EVERY_WAY[:2], 100, noise=0.003, gain=gain)
    assert found["float32"] == 100


@pytest.mark.quick("1.1-0.05")
@pytest.mark.parametrize(("gain", "noise"), [(1.1, 0.05), (1.3, 0.1), (2.0, 0.1)])
def test_a_gain_that_is_worth_a_change_is_picked(gain, noise):
    found = picked(EVERY_WAY[:2], 100, noise=noise, gain=gain)
    assert found["mixed_bfloat16"] >= 95
