"""The tables beside the figures, as rows of text: layers, runs, settings, exports."""

import dataclasses
import math
import re
from collections.abc import Callable

from tfamp.comparison import figures
from tfamp.comparison.evidence import Evidence
from tfamp.comparison.exports import ExportedModel
from tfamp.comparison.report import rows, sentences
from tfamp.records.units import format_bytes, format_seconds, join_words
from tfamp.trials.run_records import LayerDtype, Run

# Of a CPU's hundred instruction sets, those that decide how fast half precision is.
_TELLING = "bf16|fp16|amx"
# The best float32 is of another runtime for each export.
_RUNTIME = re.compile(r" \((\w+)\)")
# Layers of an integer export in float32 that a cell names.
_MOST_NAMED = 3
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


@dataclasses.dataclass(frozen=True)
class ExportRow:
    """A figure of every export; `is_main` where a short table has it."""

    label: str
    values: tuple[str, ...]
    is_main: bool = False


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
    metric = figures.metric_format(rows.metric_tolerance(evidence))

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
    allowed = figures.metric_format(rows.metric_tolerance(evidence))

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
        ("Tolerance", allowed(rows.metric_tolerance(evidence))),
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


def export_rows(evidence: Evidence) -> tuple[ExportRow, ...]:
    """Returns the rows of the table that has a column for each export.

    Rows that nothing is known of are left out.
    """
    exports = evidence.exports
    metrics = dict.fromkeys(each.metric for each in exports)
    sizes = sorted({each.batch_size for one in exports for each in one.latencies})
    others = dict.fromkeys(_other(name) for each in exports for name in each.speedups)
    pairs = sorted(others, key=lambda name: int(name.rpartition(" ")[2]))
    labels = [
        ("against float32", True),
        *((f"{name}, exported", True) for name in metrics),
        ("worse by", False),
        ("predictions flipped", False),
        *((f"p50, batch {size}", size == 1) for size in sizes),
        *((f"times {name}", name.startswith("SavedModel")) for name in pairs),
        ("size", True),
        ("first answer after", False),
        ("peak memory", False),
        ("in float32", False),
    ]
    columns = [_export_cells(each) for each in exports]
    found = []
    for label, is_main in labels:
        values = tuple(each.get(label, figures.MISSING) for each in columns)
        if {*values} - {figures.MISSING}:
            found.append(ExportRow(label, values, is_main))
    return tuple(found)


def _other(against: str) -> str:
    """Returns what exports were timed against, without the runtime of the best one."""
    return _RUNTIME.sub("", against)


def _export_cells(export: ExportedModel) -> dict[str, str]:
    """Returns what is known of an export, by the label of its row."""
    found = {"against float32": export.verdict}
    if export.exported_metric is not None:
        found[f"{export.metric}, exported"] = (
            f"{export.exported_metric:.4g} for {export.float32_metric:.4g}"
        )
    if export.worsening is not None and export.bound is not None:
        found["worse by"] = f"{export.worsening:.2%}, at most {export.bound:.2%}"
    if not export.error:
        found["predictions flipped"] = f"{export.flipped:,} of {export.num_examples:,}"
    for each in export.latencies:
        found[f"p50, batch {each.batch_size}"] = format_seconds(each.p50_seconds)
    for against, ratio in export.speedups.items():
        runtime = _RUNTIME.search(against)
        which = f", {runtime[1]}" if runtime else ""
        between = f" ({figures.ends(ratio)})" if figures.is_known(ratio) else ""
        text = f"{figures.ratio(ratio.estimate)}{between}{which}"
        found.setdefault(f"times {_other(against)}", text)
    if export.size_bytes is not None:
        found["size"] = format_bytes(export.size_bytes)
        if export.float32_bytes:
            part = export.size_bytes / export.float32_bytes
            found["size"] += f", {part:.2f} of the weights"
    if export.cold_start_seconds is not None:
        found["first answer after"] = format_seconds(export.cold_start_seconds)
    if export.peak_bytes is not None:
        found["peak memory"] = format_bytes(export.peak_bytes)
    if export.kept:
        rest = len(export.kept) - _MOST_NAMED
        more = [f"{rest} more"] if rest > 0 else []
        found["in float32"] = join_words([*export.kept[:_MOST_NAMED], *more])
    return found


def export_sentences(evidence: Evidence) -> tuple[str, ...]:
    """Returns what was exported, and why some could not be."""
    if not evidence.exports:
        return ()
    first = evidence.exports[0]
    return (
        f"Exported: the model of {evidence.label(first.policy)} with seed "
        f"{first.seed}, compared with itself in float32.",
        *(
            f"{each.name} could not be exported: {each.error}"
            for each in evidence.exports
            if each.error
        ),
    )
