"""What the commands do once their flags are read: each asks one function of tfamp."""

import argparse
import contextlib
import itertools
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tfamp
from tfamp.cli.shown import show
from tfamp.records import checks, units
from tfamp.trials import parcel, targets
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant, in_force, short_names

if TYPE_CHECKING:
    from tfamp.comparison.result import Comparison

# What people call the answers of a comparison -> those answers.
_FAILURES = {
    "worse": ("worse",),
    "slower": ("slower",),
    "not_faster": ("slower", "equivalent, not faster"),
    "undecided": ("undecided",),
}
_BATCH_SIZE = 32


class _Built(NamedTuple):
    """A model with its data, None where there are none."""

    model: Any
    train: Any
    validation: Any


@contextlib.contextmanager
def _built(target: str, policy: str | None, data: str | None) -> Iterator[_Built]:
    """Yields what a target names, built under a policy that is in force in the block.

    None is for the policy that the program sets itself. What it prints goes to the
    error stream.
    """
    with in_force(Variant.parse(policy or "keras:float32")):
        with contextlib.redirect_stdout(sys.stderr):
            if target.endswith(".keras"):
                sys.path.insert(0, os.getcwd())  # where the model's classes may lie
                found = tfamp.load_model(target)
            else:
                build = targets.load(target, own_policy=policy is None, shuffled=False)
                found = parcel.call(build, seed=0, epochs=1)
            made = _Built(*parcel.parts(found, of=repr(target)))
            if data is not None:
                made = made._replace(train=targets.load(data)())
        yield made


def _needed(made: _Built, target: str) -> Any:
    """Returns the data to train on, which have to be there."""
    if made.train is None:
        raise TypeError(
            f"{target!r} has a model without data; expected (model, train), or a "
            "script that calls `fit`. Name the data by --data=module:function."
        )
    return made.train


def check(read: argparse.Namespace) -> int:
    """Prints what half precision would spoil; 1 if that is as bad as --fail_on."""
    with _built(read.target, read.policy, read.data) as made:
        policy = "auto" if read.policy is None else Variant.parse(read.policy).policy
        found = tfamp.check(made.model, made.train, policy=policy)
    show(read, found)
    return int(bool(found.errors or (read.fail_on == "warning" and found.warnings)))


def compare(read: argparse.Namespace) -> int:
    """Trains under each policy and writes a report, or times steps with --quick."""
    if read.quick:
        return _measure(read)
    for module in ("jinja2", "matplotlib.figure"):  # not after hours of training
        checks.require(module, extra="report", purpose="The report")
    out = Path(read.out or time.strftime("tfamp-report-%Y%m%d-%H%M%S"))
    total = len(read.policies) * read.seeds
    found = tfamp.compare(
        read.target,
        policies=read.policies,
        seeds=read.seeds,
        epochs=read.epochs,
        tolerance=read.tolerance,
        metric=read.metric,
        better=read.better,
        resume=read.resume,
        timeout_seconds=read.timeout_seconds,
        directory=out / "runs",
        command=shlex.join(["tfamp", "compare", *read.argv]),
        on_run=_run_lines(read.policies, total),
    )
    found.to_json(out / "report.json")
    found.to_html(out / "report.html")
    show(read, found, f"{found.table()}\nReport: {out / 'report.html'}")
    problems = _failures(found, read.fail_on)
    for problem in problems:
        read.complain(problem)
    return int(bool(problems))


def _failures(found: "Comparison", fail_on: Sequence[str]) -> list[str]:
    """Returns a sentence for each policy and word of --fail_on that applies to it."""
    problems = []
    for policy, verdict in found.verdicts.items():
        failed = any(r.policy == policy and not r.is_finished for r in found.runs)
        problems += [
            f"{found.label(policy)} is {word.replace('_', ' ')}: {verdict}"
            for word in fail_on
            if verdict.answer in _FAILURES.get(word, ())
            or (word == "failed" and failed)
        ]
    return problems


def _run_lines(policies: Sequence[str], total: int) -> Callable[[Run], None]:
    """Returns what prints a line for each run, where no terminal shows a bar."""
    names, began, numbers = short_names(policies), time.monotonic(), itertools.count(1)

    def tell(run: Run) -> None:
        number = next(numbers)
        if sys.stderr.isatty():
            return
        text = f"failed: {run.error}"
        if run.is_finished:
            metrics = "  ".join(f"{k} {v:.4f}" for k, v in run.final_metrics.items())
            text = f"{units.format_rate(run.examples_per_second)}  {metrics}"
        seconds = (time.monotonic() - began) / number
        left = units.format_seconds(seconds * (total - number))
        name = f"[{number}/{total}] {names.get(run.policy, run.policy)}"
        line = f"{name}, seed {run.seed}: {text}  ({left} left)"
        print(line, file=sys.stderr, flush=True)

    return tell


def _measure(read: argparse.Namespace) -> int:
    given = {}
    if read.policies != ["float32", "auto"]:
        given["policies"] = read.policies
    with _built(read.target, "float32", None) as made:
        data = _needed(made, read.target)
        found = tfamp.measure_policies(made.model, data, **given)
    show(read, found)
    return 0


def tune(read: argparse.Namespace) -> int:
    """Writes a plan that keeps a metric, judged by short trainings."""
    out = Path(read.out)
    if not out.parent.is_dir():
        raise ValueError(
            f"`--out` is {str(out)!r}, but there is no folder {str(out.parent)!r}; "
            "expected a file in one that is there. Make it, or name another."
        )

    def build() -> Any:
        # Functions that set seeds themselves get one that those in force decide.
        with contextlib.redirect_stdout(sys.stderr):
            load = targets.load(read.target)
            found = parcel.call(load, seed=random.randrange(2**31), epochs=1)
        return parcel.parts(found, of=repr(read.target))[0]

    with _built(read.target, "float32", read.data) as made:
        plan = tfamp.tune(
            build,
            _needed(made, read.target),
            policy=read.policy,
            metric=read.metric,
            tolerance=read.tolerance,
            max_evaluations=read.max_evaluations,
            validation=made.validation,
        )
    plan.to_json(out)
    reason = f"{plan.policy}: {plan.evidence['tuning']['reason']}."
    how = f"Plan: {out}; use it by `tfamp run --policy={out} script.py`, or by"
    how += f" `tfamp.enable({str(out)!r})`."
    show(read, plan, f"{plan.table()}\n{reason}\n{how}")
    return 0


def memory(read: argparse.Namespace) -> int:
    """Prints what a step holds, or searches for a batch size."""
    if read.find:
        found = tfamp.find_batch_size(
            read.target,
            policy=read.policy,
            max_memory_bytes=read.max_memory,
            target_batch_size=read.target_batch_size,
        )
        show(read, found)
        return 0
    with _built(read.target, read.policy, None) as made:
        estimate = _estimate(read, made)
    lines = [estimate.table()]
    if read.max_memory is not None:
        lines.append(_largest(estimate, read.max_memory))
    show(read, estimate, "\n".join(lines))
    return 0


def _estimate(read: argparse.Namespace, made: _Built) -> Any:
    from tfamp.trials.batches import batch_of

    data, size = None, _BATCH_SIZE
    if made.train is not None:
        batch = batch_of(made.train)
        size = batch.size
        data = batch.parts if isinstance(batch.parts, tuple) else (batch.parts,)
        data = data[:1] if read.inference else data
    return tfamp.estimate_memory(
        made.model,
        read.batch_size or size,
        training=not read.inference,
        measure=read.measure,
        data=data,
        sequence_length=read.sequence_length,
    )


def _largest(estimate: Any, limit: int) -> str:
    """Returns a line on the largest batch that fits."""
    try:
        size = f"{estimate.largest_batch(limit):,}"
    except ValueError as error:
        size = str(error)
    return f"Largest batch size that fits in {units.format_bytes(limit)}: {size}"


def triage(read: argparse.Namespace) -> int:
    """Prints why a step fails, of a batch or of a failure's bundle."""
    target, bundle = read.target, read.bundle
    if os.path.isdir(target):
        target, bundle = os.path.join(target, "model.keras"), bundle or target
    with _built(target, read.policy, read.data) as made:
        batch: Any = bundle
        if bundle is None:
            from tfamp.stepping.arguments import dataset_of, first_batch

            batches = dataset_of(_needed(made, target), _BATCH_SIZE)
            batch = first_batch(batches.skip(read.batch))
        found = tfamp.triage(made.model, batch)
    show(read, found)
    return 0


def export(read: argparse.Namespace) -> int:
    """Writes a saved model for a runtime."""
    source = Path(read.target)
    sys.path.insert(0, os.getcwd())  # where the model's classes and data may lie
    given: dict[str, Any] = {
        name: targets.load(text)() if (text := getattr(read, name)) else None
        for name in ("calibration", "validation")
    }
    found = tfamp.export(
        tfamp.load_model(source),
        read.out or source.with_suffix(""),
        format=read.format,
        dtype=read.dtype,
        keep_float32=read.keep_float32,
        **given,
    )
    show(read, found)
    return 0


def serve(read: argparse.Namespace) -> int:
    """Serves exported models until SIGTERM or Ctrl-C."""
    from tfamp.serving.server.main import serve

    def say(address: str) -> None:
        print(f"Serving at {address}; Ctrl-C or SIGTERM ends it.", flush=True)

    own = ("paths", "argv", "complain")
    given = {name: value for name, value in vars(read).items() if name not in own}
    serve(read.paths, on_start=say, **given)
    return 0
