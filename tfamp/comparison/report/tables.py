"""The tables beside the figures, as rows of text: layers, runs, settings."""

import dataclasses
import math
import re
from collections.abc import Callable

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.report import rows, sentences
from tfamp.records.units import format_bytes, format_seconds, join_words
from tfamp.trials.run_records import LayerDtype, Run

# Of a CPU's hundred instruction sets, those that decide how fast half precision is.
_TELLING = "bf16|fp16|amx"
RUN_COLUMNS = ("examples/s", "step", "first step", "metric", "skipped")


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """A layer under each policy: what it computes in, and which rule decided.

    A dtype has that of the weights beside it where that is another; the rule is told
    where the policies agree on it.
    """

    path: str
    class_name: str
    dtypes: tuple[str, ...]
    rule: str
    differs: bool


@dataclasses.dataclass(frozen=True)
class RunRow:
    """A run as one line of the table of runs, with its figures by `RUN_COLUMNS`."""

    policy: str
    seed: int
    status: str
    values: tuple[str, ...]
    error: str
    notes: tuple[str, ...]


def layer_policies(evidence: Evidence) -> tuple[str, ...]:
    """Returns the policies whose layers are known, the reference first."""
    order = (evidence.reference, *evidence.candidates)
    return tuple(policy for policy in order if _layers(evidence, policy))


def layer_rows(evidence: Evidence) -> tuple[LayerRow, ...]:
    """Returns the dtypes of each layer under each policy, in the model's order."""
    columns = [_layers(evidence, policy) for policy in layer_policies(evidence)]
    by_path = [{layer.path: layer for layer in column} for column in columns]
    paths = dict.fromkeys(path for column in by_path for path in column)
    found = []
    for path in paths:
        each = [column.get(path) for column in by_path]
        known = [layer for layer in each if layer is not None]
        rules = dict.fromkeys(layer.rule for layer in known[1:] or known)
        found.append(
            LayerRow(
                path,
                known[0].class_name,
                tuple(_dtype(layer) for layer in each),
                join_words(tuple(filter(None, rules)), "or"),
                len({layer.compute_dtype for layer in known}) > 1,
            )
        )
    return tuple(found)


def run_rows(evidence: Evidence) -> tuple[RunRow, ...]:
    """Returns a row for each run, the reference's first, then by seed."""
    order = {p: i for i, p in enumerate((evidence.reference, *evidence.candidates))}
    runs = sorted(
        evidence.runs, key=lambda run: (order.get(run.policy, len(order)), run.seed)
    )
    rates = figures.format_for("per second", [r.examples_per_second for r in runs])
    steps = figures.format_for("seconds", [r.step.median for r in runs if r.step])
    starts = figures.format_for("seconds", [r.first_step_seconds for r in runs])
    metric = figures.metric_format(evidence.tolerance)

    def values(run: Run) -> tuple[str, ...]:
        if not run.is_finished:
            return (figures.MISSING,) * len(RUN_COLUMNS)
        final = rows.final(evidence, run)
        return (
            rates(run.examples_per_second or None),
            steps.with_unit(run.step.median if run.step else None),
            starts.with_unit(run.first_step_seconds or None),
            metric(final) if math.isfinite(final) else "not a number",
            str(run.skipped_steps),
        )

    def notes(run: Run) -> tuple[str, ...]:
        bad = run.num_nonfinite_weights
        own = (f"{bad:,} of its weights are NaN or inf at the end.",) if bad else ()
        return (*own, *run.notes)

    return tuple(
        RunRow(evidence.label(r.policy), r.seed, r.status, values(r), r.error, notes(r))
        for r in runs
    )


def setting_rows(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    """Returns what was trained and where, as names and values."""
    runs = [run for run in evidence.runs if run.is_finished]
    better = "larger" if evidence.better == "max" else "smaller"
    allowed = figures.metric_format(evidence.tolerance)

    def several(of: Callable[[Run], str]) -> str:
        """Returns a setting of the runs, all of them where they differ."""
        return join_words(list(dict.fromkeys(map(of, runs))))

    seconds = sorted(run.build_seconds for run in runs if run.build_seconds)
    ends = dict.fromkeys(map(format_seconds, (*seconds[:1], *seconds[-1:])))
    found = [
        (
            "Seeds" if len(evidence.seeds) > 1 else "Seed",
            join_words([*map(str, evidence.seeds)]),
        ),
        ("Judged by", f"{evidence.metric} ({better} is better)"),
        ("Tolerance", allowed(evidence.tolerance)),
        ("Batch", several(lambda run: f"{run.batch_size:,}")),
        ("Steps", several(lambda run: f"{run.num_steps:,}")),
        ("Epochs", several(lambda run: f"{run.num_epochs:,}")),
        ("Warm-up left out", several(lambda run: f"{run.warmup_steps:,} steps")),
        ("Parameters", several(lambda run: f"{run.num_parameters:,}")),
        ("Model and data made in", " to ".join(ends)),
    ]
    if evidence.context is None:
        return tuple((name, value) for name, value in found if value)
    context = evidence.context
    found.append(("Date", context.date))
    for device in context.devices:
        details = [
            device.kind.upper(),
            format_bytes(device.memory_bytes) if device.memory_bytes else "",
            "a slice of it (MIG)" if device.partition else "",
            ", ".join(f for f in device.features if re.search(_TELLING, f)),
        ]
        found.append(("Device", f"{device.name} ({', '.join(filter(None, details))})"))
    threads = (
        f"{context.intra_op_threads or 'TensorFlow decides'} in an operation, "
        f"{context.inter_op_threads or 'TensorFlow decides'} operations at a time"
    )
    # Nothing else rounds to TF32.
    has_gpu = any(device.kind == "gpu" for device in context.devices)
    versions = [f"{k} {v}" for k, v in context.versions.items() if v]
    found += [
        ("Driver", context.driver),
        ("System", context.system),
        ("Cores", str(context.num_cores)),
        ("Threads", threads),
        ("TF32", ("on" if context.tf32 else "off") if has_gpu else ""),
        ("oneDNN", "on" if context.onednn else "off"),
        ("Versions", ", ".join(versions)),
        ("Environment", "\n".join(f"{k}={v}" for k, v in context.variables.items())),
    ]
    return tuple((name, value) for name, value in found if value)


def chosen(evidence: Evidence) -> tuple[str, ...]:
    """Returns what automatic policies came to, and why, one sentence each."""
    found = []
    for policy in (evidence.reference, *evidence.candidates):
        for run in evidence.finished(policy)[:1]:
            name = evidence.label(policy)
            if sentences.named(evidence, policy) != name:
                why = run.reason.strip().rstrip(".")
                reason = f": {why}" if why else ""
                found.append(f"{name} came to {run.resolved_policy}{reason}.")
    return tuple(found)


def _layers(evidence: Evidence, policy: str) -> tuple[LayerDtype, ...]:
    runs = evidence.finished(policy)
    return next((run.layers for run in runs if run.layers), ())


def _dtype(layer: LayerDtype | None) -> str:
    if layer is None:
        return figures.MISSING
    if layer.variable_dtype in (layer.compute_dtype, ""):
        return layer.compute_dtype
    return f"{layer.compute_dtype}, weights {layer.variable_dtype}"
