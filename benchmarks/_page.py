"""The page of results: a section for each benchmark, and which record is old.

Made of benchmarks/results/NAME.json by the tables, and of the text around each in
NAME.md, whose part below a line "<!-- appendix -->" goes to the end of the page.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks._tables import TABLES, Result, versions_of

FOLDER = Path(__file__).resolve().parent
TEXTS = FOLDER / "results"
APPENDIX = "<!-- appendix -->\n"
# What begins a line that says of a record that it is old.
MARK = "*Older than what it measures:"


def of(name: str, result: Result) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Returns title, columns and rows of the table of a result."""
    if name not in TABLES:
        return []
    title = f"{name}; {result['device']}; {versions_of(result)}"
    columns = TABLES[name].columns.split(" | ")
    return [(title, columns, TABLES[name].rows(result))]


def git(*arguments: str) -> str:
    """Returns what git prints in the repository, nothing where it fails."""
    command = ["git", "-C", str(FOLDER), *arguments]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return ""
    return "" if found.returncode else found.stdout.strip()


def mark(name: str, results: Sequence[Result]) -> str:
    """Returns a line where what a record measures has changed since, else nothing."""
    paths = [f":/tfamp/{each}" for each in TABLES[name].measures.split()]
    newest = git("log", "-1", "--format=%h of %as", "--", *paths)
    lines = []
    for result in results:
        commit, date = result.get("commit"), result.get("date")
        if commit and not git("cat-file", "-t", commit):
            is_old = True  # rebased or never pushed: nobody knows what it was
        elif commit:
            is_old = bool(git("log", "-1", "--format=%h", f"{commit}..", "--", *paths))
        else:
            is_old = not date or date <= newest.rpartition(" ")[2]
        if newest and is_old:
            recorded = f"commit {commit}" if commit else date or "an unknown day"
            lines.append(f"{MARK} recorded at {recorded}, changed by {newest}.*")
    return "\n\n".join(dict.fromkeys(lines))


def section(name: str, results: Sequence[Result]) -> tuple[str, str]:
    """Returns the section of a benchmark, and what of it goes to the appendix."""
    first, table = results[0], TABLES[name]
    columns = table.columns.split(" | ")
    rows = [row for result in results for row in table.rows(result)]
    if len(results) > 1:
        columns = ["Device and versions", *columns]
        rows = [
            ["" if index else f"{each['device']}; {versions_of(each)}", *row]
            for each in results
            for index, row in enumerate(table.rows(each))
        ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    given = first["models"][next(iter(first["models"]))] if "models" in first else first
    template = (TEXTS / f"{name}.md").read_text(encoding="utf-8")
    text = template.format(
        **{**given, **table.words(first)},
        how=f"```bash\n{first['command']}\n```",
        table="\n".join(lines),
        versions_text=versions_of(given),
    )
    shown, _, later = text.partition(APPENDIX)
    title = shown.splitlines()[0].lstrip("# ")
    return shown.rstrip(), f"### {title}\n\n{later.strip()}" if later else ""


def page() -> str:
    """Returns the whole page."""
    rows, sections, appendix = [], [], []
    for name, table in TABLES.items():
        path = TEXTS / f"{name}.json"
        if not path.is_file():
            continue
        kept = json.loads(path.read_text(encoding="utf-8"))
        results = kept if isinstance(kept, list) else [kept]
        rows += [f"| {' | '.join(row)} |" for row in table.summary(results)]
        shown, later = section(name, results)
        sections += filter(None, [shown, mark(name, results)])
        appendix += [later] if later else []
    head = (TEXTS / "head.md").read_text(encoding="utf-8")
    table_text = "\n".join(["| What | Result | Goal |", "|---|---|---|", *rows])
    parts = [head.format(table=table_text).rstrip(), *sections]
    parts.append("## Appendix: why, and what went wrong")
    return "\n\n".join([*parts, *appendix]) + "\n"


def write(path: Path = FOLDER / "RESULTS.md") -> None:
    """Writes the page."""
    path.write_text(page(), encoding="utf-8")
    print(path)
