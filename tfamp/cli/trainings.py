"""Commands that train: `compare`, `measure` and `tune`."""

import dataclasses
import itertools
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tfamp
from tfamp.cli.command import (
    STATUS,
    Call,
    Command,
    Flag,
    Outcome,
    UsageError,
    some_of,
)
from tfamp.cli.tools import TARGET, Built, built, one_policy
from tfamp.comparison.result import Comparison
from tfamp.records import checks, units
from tfamp.trials import parcel
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant, short_names

# What a policy is compared with, and what is built under.
_FLOAT32 = Variant("float32")
_AUTO = "auto"
_HALF = ("mixed_float16", "mixed_bfloat16")
_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# Words of --fail_on.
_FAILURES = ("worse", "slower", "not_faster", "undecided", "failed")


def _compare(call: Call) -> Outcome:
    # Not after hours of training.
    for module in ("jinja2", "matplotlib.figure"):
        checks.require(module, extra="report", purpose="The report")
    values = call.values
    out = Path(values["out"] or time.strftime("tfamp-report-%Y%m%d-%H%M%S"))
    total = None if values["resume"] else len(values["policies"]) * values["seeds"]
    file = sys.stderr if values["json"] == "-" else sys.stdout
    found = tfamp.compare(
        call.argument,
        directory=out / "runs",
        command=shlex.join(["tfamp", "compare", *call.argv]),
        on_run=_run_lines(values["policies"], total, file),
        **call.given,
    )
    found.to_json(out / "report.json")
    found.to_markdown(out / "report.md")
    found.to_html(out / "report.html")
    problems = failures(found, values["fail_on"])
    text = f"{found.table()}\nReport: {out / 'report.html'}"
    return Outcome(found, text, problems, is_bad=bool(problems))


def failures(found: Comparison, fail_on: Sequence[str]) -> list[str]:
    """Returns a sentence for each policy and word of --fail_on that applies to it."""
    sentences = []
    for policy, verdict in found.verdicts.items():
        runs = (run for run in found.runs if run.policy == policy)
        applies = {
            "worse": verdict.answer == "worse",
            "slower": verdict.speed_effect == "worse",
            "not_faster": verdict.speed_effect != "better",
            "undecided": verdict.answer == "undecided",
            "failed": not all(run.is_finished for run in runs),
        }
        sentences += [
            f"{found.label(policy)} is {word.replace('_', ' ')}: {verdict}"
            for word in fail_on
            if applies[word]
        ]
    return sentences


def _run_lines(
    policies: Sequence[str], total: int | None, file: Any
) -> Callable[[Run], None]:
    """Returns what prints a line for each finished run, if no bar on a terminal does.

    Where the `total` of runs is known, it is told how long the rest takes.
    """
    names, began, numbers = short_names(policies), time.monotonic(), itertools.count(1)

    def show(run: Run) -> None:
        number = next(numbers)
        if sys.stderr.isatty():
            return
        text = f"failed: {run.error}"
        if run.is_finished:
            metrics = "  ".join(f"{k} {v:.4f}" for k, v in run.final_metrics.items())
            text = f"{units.format_rate(run.examples_per_second)}  {metrics}"
        place = f"[{number}]"
        if total is not None:
            seconds = (time.monotonic() - began) / number
            left = units.format_seconds(seconds * (total - number))
            place, text = f"[{number}/{total}]", f"{text}  ({left} left)"
        name = names.get(run.policy, run.policy)
        print(f"{place} {name}, seed {run.seed}: {text}", file=file, flush=True)

    return show


def _measure(call: Call) -> Outcome:
    needs_data = call.values["data"] is None
    with built(call.argument, _FLOAT32, needs_data=needs_data) as made:
        return Outcome(
            tfamp.measure_policies(made.model, _train(call, made), **call.given)
        )


def _tune(call: Call) -> Outcome:
    values = call.values
    out = Path(values["out"])
    if not out.parent.is_dir():
        raise UsageError(
            f"`--out` is {str(out)!r}, but there is no folder {str(out.parent)!r}; "
            "expected a file in one that is there. Make it, or name another"
        )
    with built(call.argument, _FLOAT32, needs_data=values["data"] is None) as made:
        named, metric = values["validation"], values["metric"]
        plan = tfamp.tune(
            made.model if values["trained"] else _builder(call.argument),
            _train(call, made),
            policy=values["policy"],
            metric=parcel.load(metric) if metric and ":" in metric else metric,
            validation=parcel.load(named)() if named else made.validation,
            **call.given,
        )
    plan.to_json(out)
    tuning = plan.evidence["tuning"]
    number = len(tuning["evaluations"]) + (tuning["confirmed"] is not None)
    lines = (
        plan.table(),
        f"{plan.policy}: {tuning['reason']}.",
        f"{tuning['metric']} by {tuning['judged_by']}: {number} evaluations, "
        f"{units.format_seconds(tuning['seconds'])}.",
        f"Plan: {out}; train under it with `tfamp.enable(policy={str(out)!r})`.",
    )
    return Outcome(plan, "\n".join(lines))


def _train(call: Call, made: Built) -> Any:
    """Returns what the function of --data gives, or what came with the model."""
    named = call.values["data"]
    return made.train if named is None else parcel.load(named)()


def _builder(target: str) -> Callable[[], Any]:
    """Returns a function that builds a model alone, as `tfamp.tune` takes it.

    A function that sets seeds itself gets one that those in force decide, so that each
    of the trainings begins elsewhere.
    """
    build = parcel.load(target)

    def build_model() -> Any:
        found = parcel.call(build, seed=random.randrange(2**31), epochs=1)
        return parcel.parts(found, of=repr(target))[0]

    return build_model


def _policy_or_plan(name: str, text: str) -> str:
    if text.endswith(".json"):
        return one_policy(name, text).policy
    return checks.choice(name, text, (_AUTO, *_HALF))


_DATA = Flag(
    *("data", "string", None),
    "module:data, a function that returns what `fit` takes; else data of the build.",
)
_MORE = (
    f"`{TARGET}` names a function that returns a compiled model with its data, "
    "(model, train) or (model, train, validation), or the model alone where --data "
    f"names another for the data.\n\n{STATUS}"
)
_COMPARE = Command(
    "compare",
    "tfamp.compare",
    _compare,
    (
        Flag("seeds", "integer", 3, "Runs of each policy.", 1),
        Flag("out", "string", None, "Folder for report and runs; else a new one."),
        Flag(
            *("fail_on", some_of(*_FAILURES), []),
            f"End with status 1 if a policy is one of {', '.join(_FAILURES)}.",
        ),
        Flag("resume", "bool", False, "Go on with the runs in --out."),
    ),
    without=("batch_size", "directory", "command", "on_run"),
    more="Writes report.html, report.json and report.md. `module:build` names a "
    "function that returns a compiled model with its data, (model, train, validation); "
    "it gets `seed` and `epochs` where it has arguments of these names. Ctrl-C keeps "
    "the runs that are finished.\n\nEnds with status 0, 1 if --fail_on applies or the "
    "runs fail, 2 if called wrongly.",
    argument=TARGET,
    interrupted="stopped before two runs could be compared; `--resume` with the same "
    "--out goes on.",
)
_MEASURE = Command(
    "measure",
    "tfamp.measure_policies",
    _measure,
    (
        _DATA,
        Flag(
            *("policies", some_of(*_POLICIES), list(_POLICIES)),
            "What to time beside float32, such as mixed_bfloat16,mixed_float16.",
        ),
    ),
    without=("data",),
    more="`tfamp.enable()` takes the answer from then on, `tfamp doctor` lists what "
    f"was measured. {_MORE}",
    argument=TARGET,
)
_TUNE = Command(
    "tune",
    "tfamp.tune",
    _tune,
    (
        Flag(
            *("policy", _policy_or_plan, _AUTO),
            "mixed_float16, mixed_bfloat16, that of them that suits this machine "
            "(auto), or the file of a plan to start from.",
        ),
        _DATA,
        Flag(
            *("validation", "string", None),
            "module:data, likewise, to take the metric of; else that of the build, "
            "without it the data.",
        ),
        Flag(
            *("metric", "string", None),
            "A metric of Keras by name, or module:function of targets and outputs; "
            "else the loss.",
        ),
        Flag(
            *("tolerance", "float", 0.005),
            "Loss of the metric that counts as none: of accuracies as it is, of losses "
            "and errors relative to float32.",
        ),
        Flag("max_evaluations", "integer", 12, "Plans to try at most.", 2),
        Flag("seeds", "integer", 3, "Short trainings of a plan.", 2),
        Flag("out", "string", "plan.json", "File that gets the plan."),
        Flag(
            *("trained", "bool", False),
            "The function returns a trained model, whose outputs are compared.",
        ),
    ),
    without=("data", "policy", "metric", "validation"),
    more="Writes a plan that `tfamp.enable(policy=FILE)` takes. Plans are judged by "
    "short trainings of what the function builds, or by outputs with --trained. "
    f"{_MORE}",
    argument=TARGET,
    interrupted="stopped before a plan was found.",
)
COMMANDS = {
    "compare": _COMPARE,
    "measure": _MEASURE,
    "measure_policies": dataclasses.replace(_MEASURE, name="measure_policies"),
    "tune": _TUNE,
}
