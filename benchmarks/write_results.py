"""Writes benchmarks/RESULTS.md from what the benchmarks left in benchmarks/results.

A result is NAME.json, or a list of results from several devices; the text around its
table is NAME.md, whose part below a line "<!-- appendix -->" goes to the end of the
page. Time: a second.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from benchmarks import _tables
from benchmarks._tables import Result, by_policy, interval_text, ratio_text

FOLDER = Path(__file__).resolve().parent
TEXTS = FOLDER / "results"
APPENDIX = "<!-- appendix -->\n"
Row = tuple[str, str, str]


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
        versions_text=_tables.versions_of(given),
    )
    shown, _, later = text.partition(APPENDIX)
    title = shown.splitlines()[0].lstrip("# ")
    return shown.rstrip(), f"### {title}\n\n{later.strip()}" if later else ""


def _device(result: Result) -> str:
    return f"{result['device']}; {_tables.versions_of(result)}"


# The words that texts have a place for, beside the values of the result itself.


def _equal_policies(result: Result) -> dict[str, Any]:
    told = [
        f"report {each['report']} ({each['kind']}): "
        + ", ".join(f"{name} {effect}" for name, effect in each["measures"].items())
        for each in result["told_apart"]
    ]
    return {
        "policies": " and ".join(result["policies"]),
        "apart": f"{len(told)} of {result['reports']}",
        "told": f" In {'; in '.join(told)}." if told else "",
        "answers": ", ".join(f"{n} {word}" for word, n in result["answers"].items()),
    }


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


def _resident(result: Result) -> dict[str, Any]:
    rows = list(by_policy(result))
    far = [f"{case}, {policy}" for case, policy, found in rows if not found["met"]]
    return {
        "allocator": " and ".join(dict.fromkeys(row[2]["allocator"] for row in rows)),
        "missed": f"Beyond it: {'; '.join(far)}." if far else "All are within it.",
    }


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
        f"{goal['reached']:g}{_missed(goal['met'])}."
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
            f"{_missed(result['met'])}. Measuring ResNet50 at 96x96 in batches of 16 "
            f"took {large['seconds']} s; required: at most {large['required']:g} s"
            f"{_missed(large['met'])}. Picked at least once: {', '.join(picks)}."
        ),
    }


WORDS: dict[str, Callable[[Result], dict[str, Any]]] = {
    "equal_policies": _equal_policies,
    "fastest_policy": _fastest_policy,
    "freeze": _freeze,
    "guards": _guards,
    "guilty_layers": _guilty_layers,
    "guilty_layers_further": _guilty_layers,
    "resident": _resident,
    "training": _training,
    "tuner": _tuner,
}


# The summary: what was measured, what came out, and the goal.


def _range(values: Iterable[float], digits: int = 2) -> str:
    low, *_, high = sorted(values) * 2
    text = f"{low:.{digits}f}"
    return text if text == f"{high:.{digits}f}" else f"{text} to {high:.{digits}f}"


def _missed(*met: bool) -> str:
    return "" if all(met) else ", missed"


def _cases(results: Sequence[Result]) -> list[Any]:
    return [found for result in results for found in result["cases"].values()]


def _predictions(what: str, results: Sequence[Result]) -> list[Row]:
    ratios = [found["ratio"] for _, _, found in by_policy(results[0])]
    goal = f"within {results[0]['goal']:.0%} of 1"
    return [(f"{what}, predicted over measured", _range(ratios), goal)]


def _found(what: str, results: Sequence[Result]) -> list[Row]:
    rows = []
    for key, words in (("found", "faults found exactly"), ("alarms", "false alarms")):
        counts = [
            own[key]
            for half in ("develop", "final")
            for own in results[0][half]["sensitivity"].values()
        ]
        right, total = map(sum, zip(*counts, strict=True))
        rows.append((f"{what}: {words}", f"{right} of {total}", ""))
    return rows


def _of_loss_scale(results: Sequence[Result]) -> list[Row]:
    rows = []
    for mode, goal in (("graph", "below Keras's"), ("XLA", "at most 1.20")):
        own = [
            found
            for result in results
            for name, found in result["cases"].items()
            if name.endswith(mode)
        ]
        ours, theirs = (
            _range(each[side]["ratio"] for each in own) for side in ("tfamp", "keras")
        )
        what = f"A step of Adam with a loss scale over a bare one, {mode}"
        rows.append((what, f"{ours} (Keras's: {theirs})", goal))
    return rows


def _of_pipeline(results: Sequence[Result]) -> list[Row]:
    return [
        (
            f"Examples/s, {name.replace(' / ', ' over ')}",
            interval_text(found, 1 if found["ratio"] >= 10 else 2),
            f"{found['goal']:g}{_missed(found['met'])}",
        )
        for name, found in results[0]["ratios"].items()
        if found["goal"] is not None
    ]


def _of_training(results: Sequence[Result]) -> list[Row]:
    rows = []
    for policy in ("auto", "mixed_bfloat16"):
        own = {n: each[policy] for n, each in results[0]["goals"].items()}
        found = ", ".join(f"{n} {ratio_text(each['ratio'])}" for n, each in own.items())
        goal = f"at least {next(iter(own.values()))['goal']}"
        goal += _missed(*(each["met"] for each in own.values()))
        rows.append((f"Training, {policy} over stock mixed_bfloat16", found, goal))
    return rows


SUMMARIES: dict[str, Callable[[Sequence[Result]], list[Row]]] = {
    "enable_overhead": lambda results: [
        (
            f"A {what} under tfamp over stock Keras",
            ", ".join(interval_text(result[key]) for result in results),
            f"at most {results[0][key]['goal']:.2f}",
        )
        for key, what in (("step", "training step"), ("build", "build of 200 layers"))
    ],
    "loss_scale": _of_loss_scale,
    "pipeline": _of_pipeline,
    "training": _of_training,
    "equal_policies": lambda results: [
        (
            "Reports that tell equal policies apart",
            f"{len(results[0]['told_apart'])} of {results[0]['reports']}",
            "at most 5 %",
        )
    ],
    "callbacks_cost": lambda results: [
        (
            "A step with Throughput and DeviceStats over one without",
            _range(found["both"]["ratio"] for found in _cases(results)),
            f"at most {results[0]['goal']}",
        )
    ],
    "guilty_layers": lambda results: _found("Models with known faults", results),
    "guilty_layers_further": lambda results: _found("Further models", results),
    "guards": lambda results: [
        (
            "A step with FlightRecorder and NanRecovery over one without",
            _range(found["both"]["ratio"] for found in _cases(results)),
            f"at most {results[0]['goal']}"
            + _missed(*(found["met"] for found in _cases(results))),
        )
    ],
    "shadow_pass": lambda results: [
        (
            "Seconds of `tfamp.sensitivity` on ten million parameters",
            _range(
                own["slowest"]
                for found in _cases(results)
                for own in found.values()
                if isinstance(own, dict)
            ),
            f"at most {results[0]['goal']:g}",
        )
    ],
    "freeze": lambda results: [
        (
            f"Predictions/s, frozen over float32, {case} at batch {size}",
            interval_text(found["frozen"], 2),
            f"{found['goal']}{_missed(found['met'])}",
        )
        for case, size, found in by_policy(results[0])
        if size != "bytes" and found["goal"]
    ],
    "tuner": lambda results: [
        (
            goal["what"],
            f"{goal['reached']:g}",
            f"at {'most' if name == 'evaluations' else 'least'} {goal['required']:g}"
            + _missed(goal["met"]),
        )
        for name, goal in results[0]["goals"].items()
    ],
    "fastest_policy": lambda results: [
        (
            "Tries in which `measure_policies` picks the fastest, or one within 3 %",
            f"{results[0]['right']:.2f}",
            f"at least {results[0]['required']:g}{_missed(results[0]['met'])}",
        ),
        (
            "Seconds of measuring ResNet50 at 96x96",
            f"{results[0]['resnet50']['seconds']:g}",
            f"at most {results[0]['resnet50']['required']:g}"
            + _missed(results[0]["resnet50"]["met"]),
        ),
    ],
    "memory": lambda results: _predictions("Memory of a step", results),
    "resident": lambda results: _predictions("Size of a process", results),
    "remat": lambda results: [
        (
            "Memory of a step with `tfamp.remat` over one without",
            _range(found["memory"] for _, _, found in by_policy(results[0])),
            f"at most {results[0]['goal']}",
        ),
        (
            "Time of a step with `tfamp.remat` over one without",
            _range(found["time"] for _, _, found in by_policy(results[0])),
            "",
        ),
    ],
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
