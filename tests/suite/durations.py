"""What each test took when the suite was last measured, in `tests/durations.json`.

`make durations` runs the whole suite and writes the file. Tests are listed by file,
with the seconds of setup, call and teardown; what took less than `FAST_SECONDS` in all
is left out, which keeps the file small and its changes readable.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.suite.sampling import FAST_SECONDS

PATH = Path(__file__).parents[1] / "durations.json"
PHASES = ("setup", "call", "teardown")
DIGITS = 2


def load(path: Path = PATH) -> dict[str, float]:
    """Returns the seconds of each slow test, by the name that pytest gives it."""
    return {
        f"{file}::{test}": sum(phases)
        for file, tests in json.loads(path.read_text(encoding="utf-8")).items()
        for test, phases in tests.items()
    }


def merged(
    before: Mapping[str, Mapping[str, list[float]]],
    measured: Mapping[str, Mapping[str, float]],
    collected: Iterable[str] | None,
) -> dict[str, dict[str, list[float]]]:
    """Returns what the file is to hold: new figures, and old ones of what did not run.

    Tests that are gone from a file that was collected are dropped.

    Args:
        before: What the file holds: seconds of the phases, by file and test.
        measured: Seconds by phase, by the name that pytest gives a test.
        collected: Names of all tests that were found, run or not; None where a run
            does not know them, which drops nothing.

    Example:
        >>> before = {"a": {"old": [0, 1, 0], "gone": [0, 1, 0]}}
        >>> merged(before, {"a::new": {"call": 0.126}}, ["a::new", "a::old"])
        {'a': {'new': [0.0, 0.13, 0.0], 'old': [0, 1, 0]}}
    """
    names = set(collected or ())
    found = {name.partition("::")[0] for name in names}
    files: dict[str, dict[str, list[float]]] = {
        file: {
            test: seconds
            for test, seconds in tests.items()
            if file not in found or f"{file}::{test}" in names
        }
        for file, tests in before.items()
    }
    for name, phases in measured.items():
        file, _, test = name.partition("::")
        tests = files.setdefault(file, {})
        tests.pop(test, None)
        if sum(phases.values()) >= FAST_SECONDS:
            tests[test] = [round(phases.get(p, 0.0), DIGITS) for p in PHASES]
    return {
        file: dict(sorted(tests.items()))
        for file, tests in sorted(files.items())
        if tests
    }


def write(
    measured: Mapping[str, Mapping[str, float]],
    collected: Iterable[str] | None,
    path: Path = PATH,
) -> None:
    """Puts what a run measured into the file, one test a line."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    files = merged(before, measured, collected)
    blocks = (
        f"{json.dumps(file)}: {{\n"
        + ",\n".join(f"{json.dumps(t)}: {json.dumps(s)}" for t, s in tests.items())
        + "\n}"
        for file, tests in files.items()
    )
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")


class Recorder:
    """Listens to a run and writes what each test took when it ends."""

    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole
        self._measured: dict[str, dict[str, float]] = {}

    def pytest_runtest_logreport(self, report) -> None:
        phases = self._measured.setdefault(report.nodeid, {})
        phases[report.when] = phases.get(report.when, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        write(self._measured, self._measured if self._is_whole else None)
