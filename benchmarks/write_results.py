"""Writes benchmarks/RESULTS.md from what the benchmarks left in benchmarks/results.

A result is NAME.json, or a list of results from several devices; the text around its
table is NAME.md, whose part below a line "<!-- appendix -->" goes to the end of the
page. Time: a second.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import _serving_tables, _tables
from benchmarks._summaries import SUMMARIES
from benchmarks._texts import (
    Result,
    by_policy,
    missed,
    ratio_text,
    versions_of,
)

FOLDER = Path(__file__).resolve().parent
TEXTS = FOLDER / "results"
APPENDIX = "<!-- appendix -->\n"


def section(name: str, results: Sequence[Result]) -> tuple[str, str]:
    """Returns the section of a benchmark, and what of it goes to the appendix."""
    first = results[0]
    columns, rows_of = _tables.TABLES[name]
    rows = [row for result in results for row in rows_of(result)]
    if len(results) > 1:
        columns = ("Device and versions", *columns)
        rows = [
            [_device(result) if not index else "", *row]
            for result in results
            for index, row in enumerate(rows_of(result))
        ]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    given = first["models"][next(iter(first["models"]))] if "models" in first else first
    command = f"```bash\n{first['command']}\n```"
    template = (TEXTS / f"{name}.md").read_text(encoding="utf-8")
    text = template.format(
        **{**given, **WORDS.get(name, lambda _: {})(first)},
        how=command,
        table="\n".join(lines),
        versions_text=versions_of(given),
    )
    shown, _, later = text.partition(APPENDIX)
    title = shown.splitlines()[0].lstrip("# ")
    return shown.rstrip(), f"### {title}\n\n{later.strip()}" if later else ""


def _device(result: Result) -> str:
    return f"{result['device']}; {versions_of(result)}"


# The words that texts have a place for, beside the values of the result itself.


def _guilty_layers(result: Result) -> dict[str, Any]:
    causes = [
        f"{split}: cause {' of '.join(map(str, found['causes']))}, layer "
        f"{' of '.join(map(str, found['layers']))}"
        for split in ("develop", "final")
        for found in [result[split]["triage"]]
    ]
    missed = [
        f"- {' '.join(str(row[k]) for k in ('case', 'dtype') if k in row)}, seed "
        f"{row['seed']} ({split}): expected {row['expected']} {row['wanted']}, got "
        f"{row['found']} {row['guilty']}"
        for split in ("develop", "final")
        for row in result[split]["missed"]
    ]
    return {"triage": "; ".join(causes), "missed": "\n".join(missed) or "None."}


def _guards(result: Result) -> dict[str, Any]:
    missed = [case for case, found in result["cases"].items() if not found["met"]]
    turns = {found["turns"] for found in result["cases"].values()}
    return {
        "turns": " or ".join(map(str, sorted(turns))),
        "missed": f"Above it: {', '.join(missed)}." if missed else "All are below it.",
    }


def _freeze(result: Result) -> dict[str, Any]:
    shares = [
        f"{found['frozen'] / found['float32']:.2f} of the bytes in the {case}"
        for case, size, found in by_policy(result)
        if size == "bytes"
    ]
    return {"bytes": " and ".join(shares)}


def _training(result: Result) -> dict[str, Any]:
    """Returns a sentence for each goal, with what missed it."""
    sentences = []
    for policy, what in (("auto", '"auto"'), ("mixed_bfloat16", "Our mixed_bfloat16")):
        each = {n: own[policy] for n, own in result["goals"].items() if policy in own}
        if not each:
            continue
        least = next(iter(each.values()))["goal"]
        met = ", ".join(name for name, found in each.items() if found["met"])
        text = f"{what} was to reach {least} of stock mixed_bfloat16 on each model. "
        text += f"Met: {met or 'none'}."
        for name, found in each.items():
            if not found["met"]:
                is_noise = "" if found["ruled_out"] else ", which the noise allows"
                text += f" {name}: {ratio_text(found['ratio'])}{is_noise}."
        sentences.append(text)
    return {"goals_text": "\n\n".join(sentences)}


def _tuner(result: Result) -> dict[str, Any]:
    sentences = [
        f"{goal['what']}: required {goal['required']:g}, reached "
        f"{goal['reached']:g}{missed(goal['met'])}."
        for goal in result["goals"].values()
    ]
    runs = [run for own in result["cases"].values() for run in own]
    given_up = sum(run["is_float32"] for run in runs)
    dearer = sum(run["kept"] < run["greedy_kept"] for run in runs)
    told = f"Of {len(runs)} plans {given_up} are float32; greedy search saved more in "
    return {
        "number": len(result["cases"]),
        "goals_text": " ".join([*sentences, f"{told}{dearer}."]),
    }


def _fastest_policy(result: Result) -> dict[str, Any]:
    number, tries = sum(each["right"] for each in result["tries"]), result["tries"]
    large = result["resnet50"]
    picks = sorted({each["picked"] for each in tries})
    return {
        "number": len(tries),
        "goals_text": (
            f"The fastest policy, or one within 3 % of it, was picked in {number} of "
            f"{len(tries)} tries; required: {result['required']:.0%}"
            f"{missed(result['met'])}. Measuring ResNet50 at 96x96 in batches of 16 "
            f"took {large['seconds']} s; required: at most {large['required']:g} s"
            f"{missed(large['met'])}. Picked at least once: {', '.join(picks)}."
        ),
    }


WORDS: dict[str, Callable[[Result], dict[str, Any]]] = {
    "fastest_policy": _fastest_policy,
    "freeze": _freeze,
    "guards": _guards,
    "guilty_layers": _guilty_layers,
    "guilty_layers_further": _guilty_layers,
    "inference": _serving_tables.inference_words,
    "serving": _serving_tables.serving_words,
    "training": _training,
    "tuner": _tuner,
}


def page(folder: Path = TEXTS) -> str:
    """Returns the whole page."""
    rows, sections, appendix = [], [], []
    for name, summary in SUMMARIES.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        kept = json.loads(path.read_text(encoding="utf-8"))
        results = kept if isinstance(kept, list) else [kept]
        rows += [f"| {' | '.join(row)} |" for row in summary(results)]
        shown, later = section(name, results)
        sections.append(shown)
        appendix += [later] if later else []
    head = (TEXTS / "head.md").read_text(encoding="utf-8")
    table = "\n".join(["| What | Result | Goal |", "|---|---|---|", *rows])
    parts = [head.format(table=table).rstrip(), *sections]
    parts.append("## Appendix: why, and what went wrong")
    return "\n\n".join([*parts, *appendix]) + "\n"


def main(argv: Sequence[str]) -> None:
    """Writes the file and prints its path."""
    settings = flags.FlagValues()
    place = str(FOLDER / "RESULTS.md")
    flags.DEFINE_string("output", place, "File.", flag_values=settings)
    settings(argv)
    Path(settings.output).write_text(page(), encoding="utf-8")
    print(settings.output)
