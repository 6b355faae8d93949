"""`tfamp compare`: trains under several policies, tells the verdict, reports."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tfamp
from tfamp.cli._flags import MAX_MEMORY, Call, Command, Flag, Outcome, one_of, some_of
from tfamp.cli._flags import sizes as read_sizes
from tfamp.cli.tools import TARGET
from tfamp.comparison.evidence import Evidence
from tfamp.records import checks, units
from tfamp.trials.intervals import effect_of_ratio
from tfamp.trials.run_records import Run
from tfamp.trials.variant import short_names

# Words of --fail_on.
_FAILURES = ("worse", "slower", "not_faster", "undecided", "failed")
# Flags that are arguments of `tfamp.compare` under the same names.
_ARGUMENTS = (
    *("policies", "seeds", "epochs", "tolerance", "metric", "better"),
    *("latency_batch_sizes", "exports", "timeout_seconds", "resume", "title"),
)


def _compare(call: Call) -> Outcome:
    # Not after hours of training.
    for module in ("jinja2", "matplotlib.figure"):
        checks.require(module, extra="report", purpose="The report")
    values = call.values
    out = Path(values["out"] or time.strftime("tfamp-report-%Y%m%d-%H%M%S"))
    total = None if values["resume"] else len(values["policies"]) * values["seeds"]
    file = sys.stderr if values["json"] == "-" else sys.stdout
    lines = _Lines(values["policies"], total, file)
    found = tfamp.compare(
        call.argument,
        profile_steps=values["profile_steps"] if values["profile"] else 0,
        max_memory_bytes=values["max_memory"],
        directory=out / "runs",
        command=shlex.join(["tfamp", "compare", *call.argv]),
        on_run=lines.show,
        **{name: values[name] for name in _ARGUMENTS},
    )
    found.to_json(out / "report.json")
    found.to_markdown(out / "report.md")
    found.to_html(out / "report.html")
    problems = failures(found, values["fail_on"])
    text = f"{found.table()}\nReport: {out / 'report.html'}"
    return Outcome(found, text, problems, is_bad=bool(problems))


def failures(found: Evidence, fail_on: Sequence[str]) -> list[str]:
    """Returns a sentence for each policy and word of --fail_on that applies to it."""
    sentences = []
    for policy, verdict in found.verdicts.items():
        applies = {
            "worse": verdict.answer == "worse",
            "slower": verdict.speed.high < 1,
            "not_faster": effect_of_ratio(verdict.speed, more_is_better=True)
            != "better",
            "undecided": verdict.answer == "undecided",
            "failed": any(
                not run.is_finished for run in found.runs if run.policy == policy
            ),
        }
        sentences += [
            f"{found.label(policy)} is {word.replace('_', ' ')}: {verdict}"
            for word in fail_on
            if applies[word]
        ]
    return sentences


class _Lines:
    """Prints a line for each finished run where no bar on a terminal shows them.

    Args:
        policies: What is compared.
        total: Runs to come, None if unknown.
        file: Where to.
    """

    def __init__(self, policies: Sequence[str], total: int | None, file: Any) -> None:
        self._names = short_names(policies)
        self._total, self._done, self._file = total, 0, file
        self._began = time.monotonic()

    def show(self, run: Run) -> None:
        """Prints what a run came to, and about how long the rest takes."""
        self._done += 1
        if sys.stderr.isatty():
            return
        text = f"failed: {run.error}"
        if run.is_finished:
            metrics = "  ".join(f"{k} {v:.4f}" for k, v in run.final_metrics.items())
            text = f"{units.format_rate(run.examples_per_second)}  {metrics}"
        place = f"[{self._done}]"
        if self._total is not None:
            seconds = (time.monotonic() - self._began) / self._done
            left = units.format_seconds(seconds * (self._total - self._done))
            place, text = f"[{self._done}/{self._total}]", f"{text}  ({left} left)"
        name = self._names.get(run.policy, run.policy)
        line = f"{place} {name}, seed {run.seed}: {text}"
        print(line, file=self._file, flush=True)


_COMMAND = Command(
    "compare",
    "Trains what a function builds under each policy and seed, each in a fresh "
    "process, and says which policies are as accurate as float32 and faster. Writes "
    "report.html, report.json and report.md. `module:build` names a function that "
    "returns a compiled model with its data, (model, train, validation); it gets "
    "`seed` and `epochs` where it has arguments of these names. Ctrl-C keeps the runs "
    "that are finished.\n\nEnds with status 0, 1 if --fail_on applies or the runs "
    "fail, 2 if called wrongly.",
    _compare,
    (
        Flag(
            *("policies", "list", ["float32", "auto"]),
            "What to compare, such as float32,float32+xla,auto,keras:mixed_bfloat16.",
        ),
        Flag("seeds", "integer", 3, "Runs of each policy.", {"lower_bound": 1}),
        Flag("epochs", "integer", 1, "Passes over the data.", {"lower_bound": 1}),
        Flag("out", "string", None, "Folder for report and runs; else a new one."),
        Flag("tolerance", "float", 0.005, "Loss of the metric that counts as none."),
        Flag("metric", "string", None, "Metric of quality; else the first one."),
        Flag("better", one_of("max", "min"), None, "Which metric is better: max, min."),
        Flag(
            *("fail_on", some_of(*_FAILURES), []),
            f"End with status 1 if a policy is one of {', '.join(_FAILURES)}.",
        ),
        Flag("latency_batch_sizes", read_sizes, [1, 8, 32], "Sizes to time."),
        Flag(
            *("exports", "list", []),
            "What to export the reference to, such as 'onnx,onnx int8,litert int8'.",
        ),
        Flag("profile", "bool", False, "Show operations by time, too."),
        Flag("profile_steps", "integer", 5, "Steps to profile.", {"lower_bound": 1}),
        MAX_MEMORY._replace(
            help="Search for the largest batch that stays below, such as 16GB."
        ),
        Flag("timeout_seconds", "float", None, "The most that a run may take."),
        Flag("resume", "bool", False, "Go on with the runs in --out."),
        Flag("title", "string", None, "What the report is called."),
    ),
    TARGET,
    interrupted="stopped before two runs could be compared; `--resume` with the same "
    "--out goes on.",
)
COMMANDS = {"compare": _COMMAND}
