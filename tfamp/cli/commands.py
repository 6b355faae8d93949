"""What the commands do once their flags are read: each asks one function of tfamp."""

import argparse
import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tfamp
from tfamp.cli.shown import show
from tfamp.records import checks, units
from tfamp.trials import parcel, targets
from tfamp.trials.run_records import Run
from tfamp.trials.variant import Variant, in_force

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
    train: Any = None
    validation: Any = None


@contextlib.contextmanager
def _built(
    target: str, policy: str | None, data: str | None = None, *, needs_data: bool = True
) -> Iterator[_Built]:
    """Yields what a target names, built under a policy that is in force in the block.

    None is for the policy that the program sets itself. What it prints goes to the
    error stream.
    """
    with in_force(Variant.parse(policy or "keras:float32")):
        with contextlib.redirect_stdout(sys.stderr):
            if target.endswith(".keras"):
                found = _saved(target)
            else:
                build = targets.load(target, own_policy=policy is None, shuffled=False)
                found = parcel.call(build, seed=0, epochs=1)
            made = _Built(*parcel.parts(found, of=repr(target)))
            if data is not None:
                made = made._replace(train=targets.load(data)())
        if needs_data and made.train is None:
            raise TypeError(
                f"{target!r} has a model without data; expected (model, train), or a "
                "script that calls `fit`. Name the data by --data=module:function."
            )
        yield made


def _saved(path: str) -> Any:
    sys.path.insert(0, os.getcwd())  # where the model's classes and data may lie
    return tfamp.load_model(path)


def check(read: argparse.Namespace) -> int:
    """Prints what half precision would spoil; 1 if that is as bad as --fail_on."""
    with _built(read.target, read.policy, read.data, needs_data=False) as made:
        policy = "auto" if read.policy is None else Variant.parse(read.policy).policy
        found = tfamp.check(made.model, made.train, policy=policy)
    show(read, found)
    return int(bool(found.errors or (read.fail_on == "warning" and found.warnings)))


def compare(read: argparse.Namespace) -> int:
    """Trains under each policy and writes a report, or times steps with --quick."""
    if read.quick:
        is_default = read.policies == ["float32", "auto"]
        given = {} if is_default else {"policies": read.policies}
        with _built(read.target, "float32") as made:
            show(read, tfamp.measure_policies(made.model, made.train, **given))
        return 0
    for module in ("jinja2", "matplotlib.figure"):  # not after hours of training
        checks.require(module, extra="report", purpose="The report")
    out = Path(read.out or time.strftime("tfamp-report-%Y%m%d-%H%M%S"))
    numbers, total = itertools.count(1), len(read.policies) * read.seeds

    def tell(run: Run) -> None:
        """Prints a line for a run, where no terminal shows a bar."""
        number, text = next(numbers), f"failed: {run.error}"
        if run.is_finished:
            metrics = "  ".join(f"{k} {v:.4f}" for k, v in run.final_metrics.items())
            text = f"{units.format_rate(run.examples_per_second)}  {metrics}"
        line = f"[{number}/{total}] {run.policy}, seed {run.seed}: {text}"
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)

    names = "policies seeds epochs tolerance metric better resume"
    found = tfamp.compare(
        read.target,
        **{name: getattr(read, name) for name in names.split()},
        directory=out / "runs",
        command=shlex.join(["tfamp", "compare", *read.argv]),
        on_run=tell,
    )
    found.to_json(out / "report.json")
    found.to_html(out / "report.html")
    show(read, found, f"{found.table()}\nReport: {out / 'report.html'}")
    status = 0
    for policy, verdict in found.verdicts.items():
        failed = any(r.policy == policy and not r.is_finished for r in found.runs)
        for word in read.fail_on:
            is_so = verdict.answer in _FAILURES.get(word, ())
            if is_so or (word == "failed" and failed):
                status = 1
                name = f"{found.label(policy)} is {word.replace('_', ' ')}"
                read.complain(f"{name}: {verdict}")
    return status


def tune(read: argparse.Namespace) -> int:
    """Writes a plan that keeps a metric of a model that is trained for a moment."""
    out = Path(read.out)
    if not out.parent.is_dir():
        raise ValueError(
            f"`--out` is {str(out)!r}, but there is no folder {str(out.parent)!r}; "
            "expected a file in one that is there. Make it, or name another."
        )

    names = "policy metric tolerance max_evaluations"
    given = {name: getattr(read, name) for name in names.split()}
    with _built(read.target, "float32", read.data) as made:
        # What is not saved is trained for a moment first.
        is_saved = read.target.endswith(".keras")
        subject = made.model if is_saved else lambda: made.model
        given["validation"] = made.validation
        plan = tfamp.tune(subject, made.train, **given)
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
    with _built(read.target, read.policy, needs_data=False) as made:
        data, size = None, _BATCH_SIZE
        if made.train is not None:
            batch = parcel.batch_of(made.train)
            size = batch.size
            data = batch.parts if isinstance(batch.parts, tuple) else (batch.parts,)
            data = data[:1] if read.inference else data
        estimate = tfamp.estimate_memory(
            made.model,
            read.batch_size or size,
            training=not read.inference,
            measure=read.measure,
            data=data,
        )
    text, limit = estimate.table(), read.max_memory
    if limit is not None:
        try:
            largest = f"{estimate.largest_batch(limit):,}"
        except ValueError as error:
            largest = str(error)
        fits = f"Largest batch size that fits in {units.format_bytes(limit)}"
        text = f"{text}\n{fits}: {largest}"
    show(read, estimate, text)
    return 0


def triage(read: argparse.Namespace) -> int:
    """Prints why a step fails, of a batch or of a failure's bundle."""
    target, batch = read.target, read.bundle
    if os.path.isdir(target):
        target, batch = os.path.join(target, "model.keras"), batch or target
    needed = {"needs_data": batch is None}
    with _built(target, read.policy, read.data, **needed) as made:
        if batch is None:
            from tfamp.stepping.arguments import dataset_of, first_batch

            batch = first_batch(dataset_of(made.train, _BATCH_SIZE).skip(read.batch))
        found = tfamp.triage(made.model, batch)
    show(read, found)
    return 0


def export(read: argparse.Namespace) -> int:
    """Writes a saved model for a runtime."""
    given: dict[str, Any] = {
        name: targets.load(text)() if (text := getattr(read, name)) else None
        for name in ("calibration", "validation")
    }
    given |= {name: getattr(read, name) for name in ("format", "dtype", "keep_float32")}
    out = read.out or Path(read.target).with_suffix("")
    show(read, tfamp.export(_saved(read.target), out, **given))
    return 0
