"""A short run has the headline cases, the fast ones and some of every test."""

import itertools
import subprocess
import sys

import pytest

from tests.suite import durations, sampling, selection
from tests.suite.imports import ROOT
from tests.suite.sampling import Case

SEEDS = [str(seed) for seed in range(20)]
SLOW = 0.4


def matrix(*sizes, seconds=SLOW, anchors=()):
    """Returns the cases of a test with so many values of each of its parameters."""
    found = []
    for values in itertools.product(*map(range, sizes)):
        name = f"f::t[{'-'.join(map(str, values))}]"
        by_name = {f"p{i}": value for i, value in enumerate(values)}
        is_anchor = sampling.is_anchor(name, anchors)
        found.append(Case(name, by_name, seconds, is_anchor))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_anchors_run_whatever_the_seed_is(seed):
    cases = matrix(10, 10, anchors=["3-7", "9-*"])
    found = sampling.chosen(cases, seed, seconds=0.0)
    assert {"f::t[3-7]", *(f"f::t[9-{i}]" for i in range(10))} == set(found)


@pytest.mark.parametrize("seed", SEEDS)
def test_fast_cases_are_never_thinned(seed):
    fast = matrix(30, seconds=sampling.FAST_SECONDS - 0.01)
    assert sampling.chosen(fast, seed, seconds=0.0) == [case.name for case in fast]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_slow_case_of_each_test_runs_even_beside_fast_ones(seed):
    cases = [Case("f::t[fast]"), *matrix(5), Case("f::alone", seconds=99.0)]
    found = sampling.chosen(cases, seed, seconds=0.0)
    assert {"f::t[fast]", "f::alone"} < set(found)
    assert len(found) == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_every_pair_of_values_comes_up_while_the_seconds_last(seed):
    cases = matrix(4, 3, 2)
    found = set(sampling.chosen(cases, seed, seconds=len(cases) * SLOW))
    pairs = set().union(*(case.pairs() for case in cases if case.name in found))
    assert pairs == set().union(*(case.pairs() for case in cases))
    # All 24 cases are not needed for the 12 + 8 + 6 pairs.
    assert len(found) < 18


def test_slow_cases_take_no_more_than_their_seconds():
    assert len(sampling.chosen(matrix(100), "any", seconds=1.0)) == 2


def test_the_seed_decides_and_nothing_else():
    cases = matrix(50)
    once, again = (sampling.chosen(cases, "a", 1.0) for _ in range(2))
    assert once == again
    with_another = [*cases, *(Case(f"f::other[{i}]") for i in range(9))]
    assert sampling.chosen(with_another, "a", 1.0)[: len(once)] == once
    assert len({tuple(sampling.chosen(cases, seed, 1.0)) for seed in SEEDS}) > 10


def test_a_thin_run_has_one_case_of_each_test_that_is_not_slow():
    cases = [*matrix(5, seconds=0.1), Case("f::alone"), Case("f::slow", seconds=1.0)]
    found = sampling.one_of_each(cases, "any", max_seconds=0.4)
    assert len(found) == 2
    assert "f::alone" in found
    assert len({sampling.one_of_each(cases, s, 0.4)[0] for s in SEEDS}) > 2


CONFTEST = """
from tests.suite import selection

pytest_addoption = selection.add_options


def pytest_configure(config):
    config.addinivalue_line("markers", "anchors(*patterns): always run")
    config.addinivalue_line("markers", "whole(why): not in a short run")
    config.addinivalue_line("markers", "odd: every other case")
    config.pluginmanager.register(selection.Selection())
"""
TESTS = """
import pytest


@pytest.mark.anchors("7")
@pytest.mark.parametrize(
    "i", [pytest.param(i, marks=pytest.mark.odd if i % 2 else ()) for i in range(8)]
)
def test_many(i):
    pass


@pytest.mark.whole("`test_many` tests the same")
def test_long():
    pass
"""


def run(folder, *arguments, tests=TESTS):
    """Returns what a suite of two tests lists, its slow cases being known as such."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\npython_files = *_test.py\n")
    (folder / "x_test.py").write_text(tests)
    recorded = {f"x_test.py::test_many[{i}]": {"call": SLOW} for i in range(8)}
    path = folder / "durations.json"
    durations.write(recorded, recorded, path)
    program = (
        "import pathlib, sys, pytest; from tests.suite import durations; "
        f"known = durations.load(pathlib.Path({str(path)!r})); "
        "durations.load = lambda: known; sys.exit(pytest.main(sys.argv[1:]))"
    )
    quiet = ["-q", "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-c", program, *quiet, *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    listed = [line for line in done.stdout.splitlines() if "::" in line]
    return [line.removeprefix("x_test.py::") for line in listed], done


def test_options_choose_after_marks_and_words_have(tmp_path):
    short, _ = run(tmp_path, "--seed=a")
    num_slow = int(sampling.TEST_SECONDS / SLOW)
    assert len(short) == 1 + num_slow
    assert "test_many[7]" in short and "test_long" not in short
    # Of the even cases none is an anchor and none was chosen before `-m`.
    even, _ = run(tmp_path, "--seed=a", "-m", "not odd")
    assert len(even) == num_slow and set(even) <= {
        f"test_many[{i}]" for i in (0, 2, 4, 6)
    }
    whole, _ = run(tmp_path, "--whole")
    assert len(whole) == 9
    named, _ = run(tmp_path, "x_test.py::test_long")
    assert named == ["test_long"]
    parts = [run(tmp_path, "--whole", f"--shard={i}/2")[0] for i in (1, 2)]
    assert sorted(parts[0] + parts[1]) == sorted(whole)


def test_a_process_reads_its_options_once(pytestconfig):
    first = selection.Choice.of(pytestconfig)
    assert selection.Choice.of(pytestconfig) is first


@pytest.mark.parametrize(
    "tests, arguments, message",
    [
        (TESTS.replace('"7"', '"9"'), [], "match no case: x_test.py::test_many: 9"),
        (TESTS, ["--shard=3/2"], "Got --shard=3/2; expected I/N with I from 1 to N"),
        (TESTS, ["--shard=half"], "Got --shard=half; expected I/N"),
    ],
    ids=["anchor without a case", "shard beyond the last", "shard in words"],
)
def test_what_cannot_be_chosen_is_an_error(tmp_path, tests, arguments, message):
    _, done = run(tmp_path, *arguments, tests=tests)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert message in done.stderr
