"""What the tests of the corpus ask of each program, and the table of their cases."""

import fnmatch
from collections.abc import Iterable, Mapping
from pathlib import Path

import keras
import pytest

from tests.wild import corpus
from tests.wild.programs.registry import Program


def cases(programs: Iterable[Program], failures: Mapping[str, str]) -> list:
    """Returns programs, ways and policies as the cases of a test.

    Args:
        programs: What is run.
        failures: Why a case fails today, by a pattern of what stands between the
            brackets; one that passes all the same is an error.
    """
    found = []
    for program in programs:
        for way in corpus.WAYS if program.is_built else ("enable",):
            for policy in corpus.POLICIES:
                name = f"{program}-{way}-{policy}"
                why = [w for p, w in failures.items() if fnmatch.fnmatchcase(name, p)]
                marks = [pytest.mark.xfail(reason=w, strict=True) for w in why[:1]]
                found.append(pytest.param(program, way, policy, id=name, marks=marks))
    return found


def check(
    program: Program, way: str, policy: str, loader: corpus.Loader, folder: Path
) -> corpus.Outcome:
    """Runs a program under tfamp, compares it with float32 and loads it elsewhere."""
    outcome = corpus.run(program, way, policy)
    reference = corpus.float32(program)
    # One seed tells half as much as the median of three.
    limit = 2 * program.tolerance
    assert corpus.distance(outcome.last_loss, reference.last_loss) <= limit
    assert outcome.in_half() == set()
    if not program.unsaved:
        path = corpus.save(outcome, program.name, folder)
        assert loader.difference(path) == ""
    keras.utils.clear_session()
    return outcome
