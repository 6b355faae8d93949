"""The scale rule on numbers a reader can redo, and its tensor form against them."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from tfamp.loss_scale.rule import (
    ScaleRule,
    ScaleState,
    select,
)

GOOD, BAD = True, False


def scales(rule, start, verdicts):
    """Returns the scale after each of a row of steps, "+" for a finite one."""
    state, found = ScaleState(scale=start), []
    for verdict in verdicts:
        state = rule.after(state, is_finite=verdict == "+")
        found.append(state.scale)
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
}


@pytest.mark.parametrize(
    "settings, start, verdicts, expected", STORIES.values(), ids=STORIES
)
def test_stories(settings, start, verdicts, expected):
    rule = ScaleRule(initial_scale=start, **settings)
    assert scales(rule, start, verdicts) == pytest.approx(expected)


def test_the_defaults_never_leave_their_bounds():
    rule = ScaleRule(dynamic_growth_steps=1)
    assert scales(rule, 2.0**15, "-" * 1000)[-1] == 2.0**-14
    assert scales(rule, 2.0**15, "+" * 1000)[-1] == 2.0**24


def test_a_frozen_scale_stays_and_counts_its_streaks():
    state = ScaleState(scale=8.0, is_frozen=1)
    rule = ScaleRule(dynamic_growth_steps=1, max_consecutive_skips=2)
    for verdict, streak, stops in [(GOOD, 0, 0), (BAD, 1, 0), (BAD, 2, 1), (BAD, 1, 1)]:
        state = rule.after(state, is_finite=verdict)
        assert (state.scale, state.streak, state.num_stops) == (8, streak, stops)


RULES = {
    "default": ScaleRule(),
    "everything": ScaleRule(
        initial_scale=8.0,
        dynamic_growth_steps=3,
        growth_factor=4.0,
        backoff_factor=0.25,
        hysteresis=2,
        min_scale=2.0**-3,
        max_scale=2.0**9,
        max_consecutive_skips=5,
    ),
    "quick": ScaleRule(dynamic_growth_steps=1, max_consecutive_skips=2),
}


@pytest.mark.quick("everything-frozen")
@pytest.mark.parametrize("is_frozen", [0, 1], ids=["moving", "frozen"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_tensors_follow_the_numbers(rule, is_frozen):
    def as_tensors(state):
        kinds = {int: tf.int64, float: tf.float32}
        return ScaleState(*(tf.constant(x, kinds[type(x)]) for x in state))

    @tf.function
    def follow(state, finite):
        return tf.cond(
            finite,
            lambda: as_same(rule.after_finite(state, select), state),
            lambda: as_same(rule.after_non_finite(state, select), state),
        )

    def as_same(after, before):
        pairs = zip(after, before, strict=True)
        return ScaleState(*(tf.cast(x, y.dtype) for x, y in pairs))

    # Streaks of either kind, so that growths, floors and stops all come up.
    rng = np.random.default_rng(0)
    verdicts = np.repeat(rng.random(60) < 0.5, rng.integers(1, 8, 60)).tolist()
    state = ScaleState(8.0, is_frozen=is_frozen)
    tensors = as_tensors(state)
    for verdict in verdicts:
        state = rule.after(state, is_finite=verdict)
        tensors = follow(tensors, tf.constant(verdict))
        # All factors are powers of two, so float32 is exact.
        assert [x.numpy() for x in tensors] == list(state)


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
