"""Percent and remaining time of a run of the suite, instead of a dot for each test."""

import time
from collections.abc import Callable, Mapping

import pytest

# What a test is taken for whose seconds are not in `tests/durations.json`.
DEFAULT_SECONDS = 0.01
# In a log, where a line can't be drawn over.
STEP_SECONDS = 15.0
# Before this share of the work is done, its pace says little.
MIN_SHARE = 0.02


class Progress:
    """Draws one line that changes on a terminal, four lines a minute in a log.

    Args:
        seconds: What each test took when last measured, by name.
        num_processes: How many share the tests.
        choice: How the tests were chosen, for the first line.
        write: Takes text.
        is_terminal: Whether a line may be drawn over itself.
        clock: Returns seconds.
    """

    def __init__(
        self,
        seconds: Mapping[str, float],
        num_processes: int,
        choice: str = "",
        *,
        write: Callable[[str], object],
        is_terminal: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._num_processes = max(1, num_processes)
        self._choice = choice
        self._write = write
        self._is_terminal = is_terminal
        self._clock = clock
        self._names: list[str] = []
        self._total = self._done = self._start = self._shown = 0.0
        self._num_done = self._num_failed = 0

    def _expected(self, name: str) -> float:
        return self._seconds.get(name, 0.0) + DEFAULT_SECONDS

    def begin(self, names: list[str]) -> None:
        """Takes the tests that are going to run; the same ones again change nothing."""
        if not self._names:
            self._names = names
            self._total = sum(map(self._expected, names))
            self._start = self._shown = self._clock()
            self._line(f"Running {len(names)} tests, {self._choice}\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids) -> None:
        self.begin(list(ids))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.begin([item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        """Counts what pytest counts, without its letters."""
        if hasattr(report, "wasxfail"):
            return None
        if report.passed:
            return "passed" if report.when == "call" else "", "", ""
        if report.skipped:
            return "skipped", "", "SKIPPED"
        is_call = report.when == "call"
        return ("failed", "", "FAILED") if is_call else ("error", "", "ERROR")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._line(f"FAILED {report.nodeid}\n")
        if report.when == "teardown":
            self._num_done += 1
            self._done += self._expected(report.nodeid)
            self._show()

    def text(self) -> str:
        """Returns percent, counts and the time that is left."""
        share = self._done / self._total if self._total else 1.0
        elapsed = self._clock() - self._start
        left = self._total / self._num_processes - elapsed
        if share > MIN_SHARE:
            left = elapsed * (1 / share - 1)
        minutes, seconds = divmod(round(max(0.0, left)), 60)
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        return (
            f"{share:4.0%}  {self._num_done} of {len(self._names)} tests{failed}, "
            f"{minutes}:{seconds:02d} left"
        )

    def _show(self) -> None:
        if self._is_terminal:
            self._line(self.text())
        elif self._clock() >= self._shown + STEP_SECONDS:
            self._shown = self._clock()
            self._line(self.text() + "\n")

    def _line(self, text: str) -> None:
        self._write(f"\r\033[K{text}" if self._is_terminal else text)

    def pytest_sessionfinish(self) -> None:
        if self._is_terminal:
            self._line("")
