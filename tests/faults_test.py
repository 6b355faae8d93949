"""The known set: its size, and that `tfamp.triage` names the cause of every step."""

import pytest

import tfamp
from tests.wild.fault_cases import CASES
from tests.wild.fault_steps import FAILURES


def test_the_set_is_as_large_as_it_is_said_to_be():
    assert sum(not case.is_healthy for case in CASES) >= 100
    assert sum(case.is_healthy for case in CASES) >= 75
    assert len({case.name for case in CASES}) == len(CASES)
    assert {failure.cause for failure in FAILURES} == {
        *("data", "model", "learning rate", "optimizer"),
        *("loss scale", "precision", "none"),
    }


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_a_failing_step_is_told_with_its_cause_and_layer(failure):
    found = tfamp.triage(*failure.build(0))
    assert found.cause == failure.cause
    assert not failure.layer or found.layer == failure.layer
