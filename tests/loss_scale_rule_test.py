"""The scale rule on numbers a reader can redo."""

import functools
import math
import re

import pytest
import tensorflow as tf

from tfamp.loss_scale.rule import ScaleRule, ScaleState


def scales(rule, start, verdicts):
    """Returns the scale after each of a row of steps, "+" for a finite one."""
    return [float(state.scale) for state in states(rule, verdicts, scale=start)]


def states(rule, verdicts, **start):
    """Returns the states that a graph makes of a row of steps."""
    names = ("after_non_finite", "after_finite")
    kinds = {int: tf.int64, float: tf.float32}
    state = [tf.constant(x, kinds[type(x)]) for x in ScaleState(**start)]

    @functools.cache
    def traced(name):
        return tf.function(lambda *state: getattr(rule, name)(ScaleState(*state)))

    found = []
    for verdict in verdicts:
        after = traced(names[verdict == "+"])(*state)
        state = [tf.cast(x, y.dtype) for x, y in zip(after, state, strict=True)]
        found.append(ScaleState(*state))
    return found


SLOW = {"dynamic_growth_steps": 100}
SECOND = {"dynamic_growth_steps": 2}
STORIES = {
    "halves at each overflow": ({}, 400, "----", [200, 100, 50, 25]),
    "doubles every second step": (SECOND, 2, "++++++", [2, 4, 4, 8, 8, 16]),
    "an overflow starts the count again": (SECOND, 8, "+-++", [8, 4, 4, 8]),
    "an overflow does not climb back": (SLOW, 8, "+-+++", [8, 4, 4, 4, 4]),
    "hysteresis counts overflows, in a row or not": (
        *({"hysteresis": 2}, 8, "-+---", [8, 8, 4, 4, 2]),
    ),
    "hysteresis starts again when the scale grows": (
        *({"hysteresis": 2, **SECOND}, 8, "-++-", [8, 8, 16, 16]),
    ),
    "the floor holds": ({"min_scale": 0.25}, 1, "----", [0.5, 0.25, 0.25, 0.25]),
    "the ceiling holds": (
        *({"dynamic_growth_steps": 1, "max_scale": 6.0}, 2, "+++", [4, 6, 6]),
    ),
    "factors of one's own": (
        {"dynamic_growth_steps": 1, "growth_factor": 3.0, "backoff_factor": 0.1},
        *(10, "+-", [30, 3]),
    ),
    "a stop gives the scale back": (
        *({"max_consecutive_skips": 3}, 8, "----", [4, 2, 8, 4]),
    ),
    "a stop starts the hysteresis again": (
        {"max_consecutive_skips": 3, "hysteresis": 2},
        *(8, "-----", [8, 4, 8, 8, 4]),
    ),
}


@pytest.mark.parametrize(
    "settings, start, verdicts, expected", STORIES.values(), ids=STORIES
)
def test_stories(settings, start, verdicts, expected):
    rule = ScaleRule(initial_scale=start, **settings)
    assert scales(rule, float(start), verdicts) == pytest.approx(expected)


def test_the_defaults_never_leave_their_bounds():
    rule = ScaleRule(dynamic_growth_steps=1)
    assert scales(rule, 2.0**15, "-" * 40)[-8:] == [2.0**-14] * 8
    assert scales(rule, 2.0**15, "+" * 20)[-8:] == [2.0**24] * 8


def test_a_frozen_scale_stays_and_counts_its_streaks():
    rule = ScaleRule(dynamic_growth_steps=1, max_consecutive_skips=2)
    found = states(rule, "+---", scale=8.0, is_frozen=1)
    counts = [(int(each.streak), int(each.num_stops)) for each in found]
    assert counts == [(0, 0), (1, 0), (2, 1), (1, 1)]
    assert {float(each.scale) for each in found} == {8.0}


WRONG = {
    "growth steps": ({"dynamic_growth_steps": 0}, "`dynamic_growth_steps` is 0"),
    "growth factor": ({"growth_factor": 1.0}, "`growth_factor` is 1.0; expected a nu"),
    "backoff factor": ({"backoff_factor": 1.0}, "`backoff_factor` is 1.0"),
    "hysteresis": ({"hysteresis": 0}, "`hysteresis` is 0"),
    "floor": ({"min_scale": 0.0}, "`min_scale` is 0.0"),
    "ceiling": ({"max_scale": math.inf}, "`max_scale` is inf"),
    "bounds": ({"min_scale": 8.0, "max_scale": 4.0}, "a number in [8.0, 4.0]"),
    "skips": ({"max_consecutive_skips": 0}, "`max_consecutive_skips` is 0"),
    "accumulation": ({"accumulation_steps": 0}, "`accumulation_steps` is 0"),
    "scale": ({"initial_scale": 0.0}, "`initial_scale` is 0.0"),
    "scale above the ceiling": (
        {"initial_scale": 2.0**25},
        "`initial_scale` is 33554432.0; expected a number in [",
    ),
    "static scale that float32 cannot divide by": (
        {"initial_scale": 1e-40, "dynamic": False},
        "`initial_scale` is 1e-40; expected a number in [",
    ),
}


@pytest.mark.parametrize("settings, message", WRONG.values(), ids=WRONG)
def test_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ScaleRule(**settings)
