"""Chooses which cases of a parametrized test run, so that no headline is left out.

`make test` has seconds for each test, not a number of cases. The cases that a test
names as its anchors always run, and so do all that take less than `FAST_SECONDS`. The
slow rest is chosen so that every pair of two parameters' values comes up, as long as
the seconds last; the order is drawn from a seed, the commit's by default, so that
another commit tries other cases and the same commit the same ones.
"""

import dataclasses
import fnmatch
import itertools
import random
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

FAST_SECONDS = 0.05
# For the slow cases of one test that are not its anchors.
TEST_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """One case of a test.

    Args:
        name: As pytest gives it, "file::test[case]".
        values: Index of the value of each parameter, by the parameter's name.
        seconds: What it took when the suite was last measured; 0 if it was not.
        is_anchor: Whether it runs whatever the seed is.
    """

    name: str
    values: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    is_anchor: bool = False

    def pairs(self) -> set[tuple[tuple[str, int], ...]]:
        """Returns each pair of parameters with their values, or the only value."""
        values = sorted(self.values.items())
        return set(itertools.combinations(values, min(2, len(values))))


def test_of(name: str) -> str:
    """Returns the test that a case is of, by the names that pytest gives them."""
    return name.split("[")[0]


def is_anchor(name: str, patterns: Iterable[str]) -> bool:
    """States whether one of the patterns matches what stands between the brackets.

    Example:
        >>> is_anchor("file::test[Adam-graph]", ["SGD-*", "Adam-*"])
        True
    """
    case = name.partition("[")[2].removesuffix("]")
    return any(fnmatch.fnmatchcase(case, pattern) for pattern in patterns)


def chosen(cases: Sequence[Case], seed: str, seconds: float) -> list[str]:
    """Returns the names of the cases that run, in the order in which they came.

    Args:
        cases: Cases of any number of tests.
        seed: What the choice among slow cases is drawn from.
        seconds: For the slow cases of one test, at least one of which runs.

    Example:
        >>> slow = [Case(f"t[{i}]", {"i": i}, seconds=0.4) for i in range(9)]
        >>> len(chosen(slow, "any", seconds=1.0))
        2
    """
    tests: dict[str, list[Case]] = {}
    for case in cases:
        tests.setdefault(test_of(case.name), []).append(case)
    kept = {name for group in tests.values() for name in _kept(group, seed, seconds)}
    return [case.name for case in cases if case.name in kept]


def _kept(cases: Sequence[Case], seed: str, seconds: float) -> set[str]:
    always = [c for c in cases if c.is_anchor or c.seconds < FAST_SECONDS]
    rest = [case for case in cases if case not in always]
    # Of its own for each test: one more test does not change the others' choice.
    random.Random(f"{seed} {test_of(cases[0].name)}").shuffle(rest)
    missing = set().union(*(case.pairs() for case in rest))
    missing -= set().union(*(case.pairs() for case in always))
    kept = {case.name for case in always}
    has_slow = any(case.seconds >= FAST_SECONDS for case in always)
    while rest and (missing or not has_slow):
        affordable = [case for case in rest if case.seconds <= seconds]
        if not affordable and has_slow:
            break
        best = max(affordable or rest, key=lambda case: len(case.pairs() & missing))
        seconds -= best.seconds
        missing -= best.pairs()
        kept.add(best.name)
        rest.remove(best)
        has_slow = True
    return kept


def one_of_each(cases: Sequence[Case], seed: str, max_seconds: float) -> list[str]:
    """Returns the name of one case of each test, without the slower tests.

    The choice differs from test to test, so that graph and eager, float32 and float16
    all come up.

    Args:
        cases: Cases of any number of tests.
        seed: What the choice is drawn from.
        max_seconds: Slower cases are left out.
    """
    tests: dict[str, list[str]] = {}
    for case in cases:
        if case.seconds <= max_seconds:
            tests.setdefault(test_of(case.name), []).append(case.name)
    return [random.Random(f"{seed} {t}").choice(names) for t, names in tests.items()]


def commit_of(folder: Path) -> str:
    """Returns the commit that a clone stands at, or "none" outside one."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return found.stdout.strip()
