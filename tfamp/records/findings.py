"""What a check found: where, how bad, with which figure, and what to do about it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from tfamp.records import checks, console
from tfamp.records.record import Record, TableRecord

Severity = Literal["error", "warning", "note"]
# Worst first: the order that findings are kept and printed in.
SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding(Record):
    """One thing that is wrong, or good to know.

    `rule` is stable, for filters; an "error" spoils the result or stops training.
    `figure` decided; `details` has more, and "documentation", the address of a page.
    """

    rule: str
    severity: Severity
    message: str
    remedy: str
    layer: str | None = None
    column: str | None = None
    figure: float | None = None
    details: dict[str, int | float | str | None] = dataclasses.field(
        default_factory=dict, hash=False
    )

    def __post_init__(self) -> None:
        """Checks the severity, which sorting relies on."""
        checks.choice("severity", self.severity, SEVERITIES)

    @property
    def place(self) -> str:
        """The layer or column, "" if the finding is about neither."""
        return self.layer or self.column or ""


@dataclasses.dataclass(frozen=True)
class Findings(TableRecord):
    """Everything that one check found, kept worst first; false when that is nothing.

    `title` says what was checked, `rules` which ran, `skipped` why others could not.

    Example:
        >>> small = Finding("constant", "note", "x/a is 0 everywhere.", "Drop it.")
        >>> worse = Finding("nan", "error", "3 of 100 are NaN.", "Fill them.")
        >>> found = Findings((small, worse), title="100 examples")
        >>> [finding.rule for finding in found], len(found.errors)
        (['nan', 'constant'], 1)
    """

    findings: tuple[Finding, ...] = ()
    title: str = ""
    rules: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Sorts by severity; equal ones keep their order."""
        ordered = sorted(self.findings, key=lambda f: SEVERITIES.index(f.severity))
        object.__setattr__(self, "findings", tuple(ordered))

    def __iter__(self) -> Iterator[Finding]:
        """Returns an iterator over the findings, worst first."""
        return iter(self.findings)

    def __len__(self) -> int:
        """Returns the number of findings of any severity."""
        return len(self.findings)

    def __getitem__(self, index: int) -> Finding:
        """Returns one finding; 0 is the worst."""
        return self.findings[index]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Those that spoil the result or stop training."""
        return self.of(severity="error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Those that are likely to harm."""
        return self.of(severity="warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Those that are good to know."""
        return self.of(severity="note")

    def of(
        self, *, rule: str | None = None, severity: Severity | None = None
    ) -> tuple[Finding, ...]:
        """Returns the findings of a rule, a severity, both or all."""
        return tuple(
            each
            for each in self.findings
            if rule in (None, each.rule) and severity in (None, each.severity)
        )

    def table(self) -> str:
        """Returns a table of at most 110 columns, or one line if there is nothing."""
        lines = [f"Not checked: {reason}" for reason in self.skipped]
        if not self.findings:
            count = f" by {len(self.rules)} rules" if self.rules else ""
            title = f"{self.title or 'Check'}: nothing found{count}."
            return "\n".join([title, *lines])
        known = (finding.details.get("documentation") for finding in self.findings)
        explained = [f"See {page}" for page in dict.fromkeys(known) if page]
        groups: dict[tuple[object, ...], list[str]] = {}
        for each in self.findings:
            # What harms is told of each place, a note once for all.
            place = None if each.severity == "note" else each.place
            key = (each.severity, place, each.rule, each.message, each.remedy)
            groups.setdefault(key, []).append(each.place)
        rows = [
            (severity, f"{at} and {len(others)} more" if others else at, *texts)
            for (severity, _, *texts), (at, *others) in groups.items()
        ]
        columns = {
            "severity": console.WHOLE,
            "where": {**console.FOLD, "max_width": 24},
            "rule": {**console.FOLD, "max_width": 18},
            "found": {**console.FOLD, "ratio": 3},
            "remedy": {**console.FOLD, "ratio": 2},
        }
        table = console.table(columns, rows, title=self.title, show_lines=True)
        return "\n".join([console.text_of(table), *explained, *lines])
