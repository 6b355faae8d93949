"""`tfamp compare`: trains under several policies, tells the verdict, reports."""

import functools
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from tfamp.cli import _flags
from tfamp.comparison.evidence import Evidence
from tfamp.records import checks, units
from tfamp.trials.intervals import effect_of_ratio
from tfamp.trials.run_records import Run

_COMMAND = "tfamp compare"
_PURPOSE = """\
Trains what a function builds under each policy and seed, each in a fresh process, and
says which policies are as accurate as float32 and faster. Writes report.html,
report.json and report.md. `module:build` names a function that returns a compiled
model with its data, (model, train, validation); it gets `seed` and `epochs` where it
has arguments of these names. Ctrl-C keeps the runs that are finished.

Ends with status 0, 1 if --fail_on applies or the runs fail, 2 if called wrongly."""
# Word of --fail_on -> whether it applies to a policy.
_FAILURES = ("worse", "slower", "not_faster", "undecided", "failed")
_EXIT_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: The arguments after "compare".

    Returns:
        The exit status, as the help says.
    """
    values = _define()

    def work(target: str) -> _flags.Outcome:
        with _flags.reading():
            fail_on = [
                checks.choice("--fail_on", word.replace("-", "_"), _FAILURES)
                for word in values.fail_on
            ]
            sizes = [_whole(text) for text in values.latency_batch_sizes]
            max_memory = _flags.max_memory(values)
        command = shlex.join(["tfamp", "compare", *argv])
        found, report = run(
            target, values, sizes=sizes, max_memory=max_memory, command=command
        )
        problems = failures(found, fail_on)
        text = f"{found.table()}\nReport: {report}"
        return _flags.Outcome(text, problems, is_bad=bool(problems))

    try:
        return _flags.run(argv, values, work, command=_COMMAND, purpose=_PURPOSE)
    except KeyboardInterrupt:
        print(
            f"{_COMMAND}: stopped before two runs could be compared; `--resume` with "
            f"the same --out goes on.",
            file=sys.stderr,
        )
        return _EXIT_INTERRUPTED


def run(
    target: str,
    values: flags.FlagValues,
    *,
    sizes: Sequence[int],
    max_memory: int | None,
    command: str,
) -> tuple[Any, Path]:
    """Returns the comparison and where its report was written."""
    from tfamp.comparison.runner import compare

    # Not after hours of training.
    for module in ("jinja2", "matplotlib.figure"):
        checks.require(module, extra="report", purpose="The report")
    out = Path(values.out or time.strftime("tfamp-report-%Y%m%d-%H%M%S"))
    policies = values.policies
    seeds = values.seeds
    lines = _Lines(None if values.resume else len(policies) * seeds)
    found = compare(
        target,
        policies=policies,
        seeds=seeds,
        epochs=values.epochs,
        tolerance=values.tolerance,
        metric=values.metric,
        better=values.better,
        latency_batch_sizes=sizes,
        profile_steps=values.profile_steps if values.profile else 0,
        max_memory_bytes=max_memory,
        timeout_seconds=values.timeout_seconds,
        directory=out / "runs",
        resume=values.resume,
        title=values.title,
        command=command,
        on_run=lines.show,
    )
    found.to_json(out / "report.json")
    found.to_markdown(out / "report.md")
    found.to_html(out / "report.html")
    return found, out / "report.html"


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
            f"{policy} is {word.replace('_', ' ')}: {verdict}"
            for word in fail_on
            if applies[word]
        ]
    return sentences


class _Lines:
    """Prints a line for each finished run where no bar on a terminal shows them.

    Args:
        total: Runs to come, None if unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total, self._done = total, 0
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
        print(f"{place} {run.policy}, seed {run.seed}: {text}", flush=True)


def _define() -> flags.FlagValues:
    values = _flags.new_flags()
    add = functools.partial(_flags.define, values)
    add(
        "list",
        "policies",
        ["float32", "auto"],
        "What to compare, such as float32,float32+xla,auto,keras:mixed_bfloat16.",
    )
    add("integer", "seeds", 3, "Runs of each policy.", lower_bound=1)
    add("integer", "epochs", 1, "Passes over the data.", lower_bound=1)
    add("string", "out", None, "Folder for report and runs; else a new one.")
    add("float", "tolerance", 0.005, "Loss of the metric that counts as none.")
    add("string", "metric", None, "Metric of quality; else the first one.")
    add("enum", "better", None, ["max", "min"], "Which metric is better.")
    add(
        "list",
        "fail_on",
        [],
        f"End with status 1 if a policy is one of {', '.join(_FAILURES)}.",
    )
    add("list", "latency_batch_sizes", ["1", "8", "32"], "Sizes to time.")
    add("bool", "profile", False, "Show operations by time, too.")
    add("integer", "profile_steps", 5, "Steps to profile.", lower_bound=1)
    add(
        "string",
        "max_memory",
        None,
        "Search for the largest batch that stays below, such as 16GB.",
    )
    add("float", "timeout_seconds", None, "The most that a run may take.")
    add("bool", "resume", False, "Go on with the runs in --out.")
    add("string", "title", None, "What the report is called.")
    return values


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            f"--latency-batch-sizes has {text!r}; expected whole numbers of at least 1"
        )
    return int(text)
