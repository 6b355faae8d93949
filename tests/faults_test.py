"""The models and steps that the tools are judged by are what they are said to be."""

import pytest
import tensorflow as tf

from tests.wild.fault_cases import CASES
from tests.wild.fault_steps import FAILURES, step


def test_the_set_is_as_large_as_it_is_said_to_be():
    assert sum(not case.is_healthy for case in CASES) >= 100
    assert sum(case.is_healthy for case in CASES) >= 75
    assert len({case.name for case in CASES}) == len(CASES)
    assert {failure.cause for failure in FAILURES} == {
        *("data", "model", "learning rate", "optimizer"),
        *("loss scale", "precision", "none"),
    }


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_failing_step_is_not_finite_and_a_healthy_one_is(failure):
    model, batch = failure.build(0)
    try:
        is_finite = step(model, batch)
    except tf.errors.InvalidArgumentError:  # a label that is no class
        is_finite = False
    assert is_finite == (failure.cause == "none")
