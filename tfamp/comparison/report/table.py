"""The table of a comparison for a terminal."""

import itertools

from tfamp.comparison.evidence.evidence import Evidence
from tfamp.comparison.report import figures, sentences
from tfamp.comparison.report.rows import Cell, Row, rows
from tfamp.records import console

# Policies beside the reference that fit into the width; more get a table of their own.
_IN_A_TABLE = 2
# Letters of a cell, where so many policies stand beside the reference.
_CELL = {1: 44, 2: 30}
_LEGEND = (
    "+ better, - worse: 5 % error in a report; = the same, ? not clear; "
    "ranges: 5 % error on each side"
)


def table(evidence: Evidence) -> str:
    """Returns each measure under each policy as text, and the verdict last.

    Args:
        evidence: What was measured.

    Returns:
        Lines of at most 110 columns.
    """
    found = rows(evidence)
    starts = range(0, max(len(evidence.candidates), 1), _IN_A_TABLE)
    parts = [
        _part(evidence, found, evidence.candidates[start : start + _IN_A_TABLE])
        for start in starts
    ]
    lines = [
        _LEGEND,
        sentences.reference_sentence(evidence),
        sentences.failures(evidence),
    ]
    top = sentences.best(evidence)
    lines += [
        sentences.policy_sentence(evidence, policy)
        for policy in evidence.candidates
        if policy != top
    ]
    if top is not None:
        lines += [sentences.advice(evidence, top)]
    # Last, where the eye ends up.
    lines += [f"Verdict: {sentences.verdict_sentence(evidence)}"]
    return console.text_of(*parts, *map(figures.plain, filter(None, lines)))


def _part(
    evidence: Evidence, found: tuple[Row, ...], chosen: tuple[str, ...]
) -> object:
    """Returns the table of some of the policies."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    part = Table(
        title=Text(evidence.title, overflow="fold"),
        title_justify="left",
        box=box.SIMPLE,
        show_edge=False,
        pad_edge=False,
    )
    part.add_column("", overflow="fold", max_width=29)
    for name in (evidence.reference, *chosen):
        part.add_column(
            Text(sentences.named(evidence, name)), justify="right", overflow="fold"
        )
    for heading, group in itertools.groupby(found, lambda row: row.group):
        part.add_row(Text(heading, style="bold"))
        for row in group:
            cells = {cell.policy: cell for cell in row.cells}
            texts = [_text(cells[policy], len(chosen)) for policy in chosen]
            values = (f"  {row.heading}", row.reference, *texts)
            part.add_row(*(Text(figures.plain(value)) for value in values))
        part.add_section()
    return part


def _text(cell: Cell, number: int) -> str:
    """Returns "1,903 1.90x (1.88 to 1.92) +", on two lines where it is longer."""
    between = f"({cell.interval})" if cell.interval else ""
    # A column of its own, so that figures of other rows stand under one another.
    sign = f"{cell.sign:1}" if cell.change else ""
    line = f"{cell.value} {cell.change:>6} {between} {sign}".rstrip()
    if len(line) <= _CELL[number]:
        return line
    return f"{cell.value} {cell.change:>6} {sign}\n{between}  "
