"""A comparison as text for a terminal and as Markdown for a comment."""

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report import sentences, tables
from tfamp.comparison.report.plans import (
    EVALUATION_COLUMNS,
    LAYER_COLUMNS,
    PlanSection,
    plan_sections,
)
from tfamp.comparison.report.rows import Cell, Row, rows
from tfamp.records import console, record

# Policies beside the reference that fit into the width; more get a table of their own.
_IN_A_TABLE = 2
# Letters of a cell, where so many policies stand beside the reference.
_CELL = {1: 44, 2: 30}
_LEGEND = (
    "+ better, - worse, = the same, ? not clear; means over seeds, their ratios, and "
    "where these may lie with 5 % error on each side"
)
# What fits in a comment on a pull request without being folded away.
MAX_LINES = 60
_MAX_ERRORS = 5
# Of a plan; the HTML report has all.
_MAX_LAYERS = 8
_MAX_NOTES = 5
# The settings that decide whether two reports can be held against each other.
_SETTINGS = ("Device", "Driver", "Versions", "Batch", "Seed", "Seeds", "Epochs", "TF32")
# What Markdown, HTML or GitHub's mentions would make something of.
_SPECIAL = re.compile(r"([\\`*_\[\]|~#])")
_MARKS = {"good": "✅", "neutral": "➖", "bad": "❌", "open": "❔"}


def table(evidence: Evidence) -> str:
    """Returns each measure under each policy as text, and the verdict last."""
    found = rows(evidence)
    starts = range(0, max(len(evidence.candidates), 1), _IN_A_TABLE)
    parts = [
        _part(evidence, found, evidence.candidates[start : start + _IN_A_TABLE])
        for start in starts
    ]
    parts += [part for each in plan_sections(evidence) for part in _of_plan(each)]
    if evidence.plans:
        parts.append("")
    top = sentences.best(evidence)
    lines = [
        _LEGEND,
        sentences.reference_sentence(evidence),
        sentences.failures(evidence),
        *(
            sentences.policy_sentence(evidence, policy)
            for policy in evidence.candidates
            if policy != top
        ),
        "" if top is None else sentences.advice(evidence, top),
        # Last, where the eye ends up.
        f"Verdict: {sentences.verdict_sentence(evidence)}",
    ]
    return console.text_of(*parts, *map(figures.plain, filter(None, lines)))


def _part(
    evidence: Evidence, found: tuple[Row, ...], chosen: tuple[str, ...]
) -> object:
    """Returns the table of some of the policies."""
    names = [sentences.named(evidence, p) for p in (evidence.reference, *chosen)]
    right = {"justify": "right", "overflow": "fold"}
    columns = {"": {**console.FOLD, "max_width": 29}, **dict.fromkeys(names, right)}
    lines: list[tuple[str, ...]] = []
    ends = []
    for heading, group in itertools.groupby(found, lambda row: row.group):
        lines.append((heading,))
        for row in group:
            cells = {cell.policy: cell for cell in row.cells}
            texts = [_cell_text(cells[policy], len(chosen)) for policy in chosen]
            lines.append((f"  {row.heading}", row.reference, *texts))
        ends.append(len(lines) - 1)
    part = _grid(columns, lines, title=evidence.title)
    for index in ends:
        part.rows[index].end_section = True
    return part


def _grid(
    columns: Mapping[str, Mapping[str, Any]],
    lines: Iterable[Sequence[str]],
    title: str | None = None,
) -> Any:
    """Returns a table with signs that any terminal can print, and no frame."""
    from rich import box

    rows = [tuple(map(figures.plain, line)) for line in lines]
    how: dict[str, Any] = {"box": box.SIMPLE, "show_edge": False, "pad_edge": False}
    return console.table(columns, rows, title=title, **how)


def _of_plan(section: PlanSection) -> tuple[object, ...]:
    """Returns how a plan was found: the layers that decided, the search, the cost."""
    first = section.layers[:_MAX_LAYERS]
    layers = _grid(
        {"layer": console.FOLD, **{column: {} for column in LAYER_COLUMNS}},
        first,
        title=f"How {section.label} was found",
    )
    columns: dict[str, dict[str, Any]] = dict.fromkeys(EVALUATION_COLUMNS, {})
    columns = {"evaluation": {}, **columns, "in float32": console.FOLD}
    search = _grid(columns, section.evaluations)
    rest = len(section.layers) - len(first)
    more = f"{rest} more layers in the HTML report." if rest > 0 else ""
    said = map(figures.plain, filter(None, (more, f"{section.found} {section.cost}")))
    return ("", layers, "", search, "", *said)


def _cell_text(cell: Cell, number: int) -> str:
    """Returns "1,903 1.90x (1.88 to 1.92) +", on two lines where it is longer."""
    between = f"({cell.interval})" if cell.interval else ""
    # A column of its own, so that figures of other rows stand under one another.
    sign = f"{cell.sign:1}" if cell.change else ""
    line = f"{cell.value} {cell.change:>6} {between} {sign}".rstrip()
    if len(line) <= _CELL[number]:
        return line
    return f"{cell.value} {cell.change:>6} {sign}\n{between}  "


def to_markdown(evidence: Evidence, path: str | os.PathLike[str] | None = None) -> str:
    """Returns a comparison as Markdown of at most `MAX_LINES` lines.

    It is fit for a comment on a pull request, and written to `path`, if given.
    """
    top = sentences.best(evidence)
    badge = sentences.badge(evidence, top)
    head = [
        f"## {escaped(evidence.title)}",
        "",
        f"{_MARKS[badge.kind]} **{badge.text}.** "
        f"{escaped(sentences.verdict_sentence(evidence))}",
    ]
    for policy in evidence.candidates:
        if policy != top:
            mark = _MARKS[sentences.badge(evidence, policy).kind]
            text = escaped(sentences.policy_sentence(evidence, policy))
            head += ["", f"{mark} {text}"]
    if failed := sentences.failures(evidence):
        head += ["", f"⚠️ {failed}"]
    tail = _tail(evidence)
    table = _table(evidence, MAX_LINES - len(head) - len(tail) - 1)
    text = "\n".join([*head, "", *table, *tail]) + "\n"
    if path is not None:
        record.write_text(path, text)
    return text


def escaped(text: str) -> str:
    """Returns a text that Markdown shows as it is, in one line."""
    one_line = " ".join(text.split())
    one_line = _SPECIAL.sub(r"\\\1", one_line)
    one_line = one_line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An "@name" in a comment calls a person; with this between it does not.
    return one_line.replace("@", "@\u200b")


def _table(evidence: Evidence, room: int) -> list[str]:
    """Returns the rows that fit into `room` lines, the first ones before others."""
    found = rows(evidence)
    policies = (evidence.reference, *evidence.candidates)
    names = [sentences.named(evidence, policy) for policy in policies]
    # Beside the two lines of the head and two that say what is left out.
    room -= 4
    kept = found
    if len(found) > room:
        # The ends of the latencies say least.
        middle = [row for row in found if not re.match("latency_p9", row.name)]
        kept = tuple(middle[: max(room, 0)])
    lines = _markdown_table(names, map(_cells, kept))
    if left := len(found) - len(kept):
        noun = "row" if left == 1 else "rows"
        lines += ["", f"{left} more {noun} in the HTML report."]
    return lines if found else []


def _markdown_table(names: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """Returns the head of a table with columns of these names, and its lines."""
    return [
        f"| | {' | '.join(map(escaped, names))} |",
        f"|:--|{'--:|' * len(names)}",
        *(f"| {' | '.join(line)} |" for line in lines),
    ]


def _cells(row: Row) -> list[str]:
    inference = row.group == "Inference"
    heading = f"inference {row.heading}" if inference else row.heading
    return [escaped(heading), escaped(row.reference), *map(_text, row.cells)]


def _text(cell: Cell) -> str:
    """Returns "1,903 · **1.90×** (1.88 to 1.92) better"."""
    parts = [escaped(cell.value)]
    if cell.change:
        between = f" ({cell.interval})" if cell.interval else ""
        effect = f" {cell.effect}" if cell.effect else ""
        parts.append(f"**{cell.change}**{between}{effect}")
    return " · ".join(parts)


def _tail(evidence: Evidence) -> list[str]:
    """Returns errors, notes and where it was measured, each in a line."""
    failed = [run for run in evidence.runs if not run.is_finished]
    lines = [""]
    for run in failed[:_MAX_ERRORS]:
        error = escaped(sentences.shortened(run.error))
        name = escaped(evidence.label(run.policy))
        lines.append(f"- {name}, seed {run.seed}, failed: {error}")
    if len(failed) > _MAX_ERRORS:
        lines.append(f"- {len(failed) - _MAX_ERRORS} more failed.")
    lines += [f"- {escaped(note)}" for note in evidence.notes[:_MAX_NOTES]]
    if len(evidence.notes) > _MAX_NOTES:
        lines.append(f"- {len(evidence.notes) - _MAX_NOTES} more notes in the report.")
    settings = [
        f"{name.lower() if name != 'TF32' else name} {escaped(value)}"
        for name, value in tables.setting_rows(evidence)
        if name in _SETTINGS
    ]
    reference = escaped(sentences.reference_sentence(evidence))
    measured = f" Measured with {'; '.join(settings)}." if settings else ""
    lines += ["", f"<sub>{reference}{measured}</sub>"]
    if evidence.context is not None and evidence.context.command:
        command = " ".join(evidence.context.command.split()).replace("`", "'")
        lines += ["", f"`{command}`"]
    return lines
