"""The table of each benchmark's figures, for the terminal and for RESULTS.md.

Here are texts only: neither TensorFlow nor a benchmark is imported.
"""

from collections.abc import Sequence

from benchmarks import _serving_tables, _training_tables
from benchmarks._texts import (
    Result,
    Rows,
    Tables,
    by_policy,
    interval_text,
    mebibytes,
    ratio_text,
    versions_of,
)


def of(name: str, result: Result) -> list[tuple[str, Sequence[str], Rows]]:
    """Returns title, columns and rows of each table of a result."""
    if name not in TABLES:
        return []
    columns, rows = TABLES[name]
    title = f"{name}; {result['device']}; {versions_of(result)}"
    found: list[tuple[str, Sequence[str], Rows]] = [(title, columns, rows(result))]
    if "input_wait" in result:
        columns = ("Pipeline", "Throughput says", "1 - step alone / step")
        waits = [
            [case, f"{wait['told']:.2f}", f"{wait['waited']:.2f}"]
            for case, wait in result["input_wait"].items()
        ]
        found.append(("Part of the time that is waited for input", columns, waits))
    return found


def enable_overhead(result: Result) -> Rows:
    """Returns a row for the step and one for the build."""
    rows = []
    for what, name in (("step", "training step"), ("build", "200-layer build")):
        found = result[what]
        times = [f"{found[f'{s}_milliseconds']:.4g} ms" for s in ("stock", "tfamp")]
        steps = f" of {found['turn_steps']} steps" if "turn_steps" in found else ""
        rows.append(
            [
                *(result["policy"] if what == "step" else "", name, *times),
                *(interval_text(found), f"{found['processor_ratio']:.3f}"),
                f"{found['turns']}{steps}",
            ]
        )
    return rows


def loss_scale(result: Result) -> Rows:
    """Returns a row for each kind of variables and mode."""
    return [
        [
            *name.rsplit(", ", 1),
            f"{found['bare_milliseconds']:.2f} ms",
            *(interval_text(found[side]) for side in ("keras", "tfamp")),
            ", ".join(map(str, found["first_call_seconds"].values())) + " s",
            str(found["turns"]),
        ]
        for name, found in result["cases"].items()
    ]


def pipeline(result: Result) -> Rows:
    """Returns a row for each comparison."""
    rates, rows = result["rates"], []
    for name, found in result["ratios"].items():
        ours, other = name.split(" / ")
        goal = "" if found["goal"] is None else f"{found['goal']:g}"
        digits = 1 if found["ratio"] >= 10 else 2
        rows.append(
            [
                *(ours, other, f"{rates[ours]:,} and {rates[other]:,}"),
                interval_text(found, digits),
                goal + ("" if found["met"] else ", missed"),
            ]
        )
    return rows


def training(result: Result) -> Rows:
    """Returns a row for each model and policy."""
    rows = []
    for name, model in result["models"].items():
        label = f"{name}, batch {model['batch_size']}"
        for policy, row in model["rows"].items():
            same = row["resolved"] in policy
            rows.append(
                [
                    label,
                    policy if same else f"{policy} = {row['resolved']}",
                    f"{row['examples_per_second']:,.0f}",
                    ratio_text(row.get("ratio"), "reference"),
                    *(
                        ratio_text(row.get(key))
                        for key in ("over_stock", "training_bytes", "latency")
                    ),
                    f"{model['metric']} {row['metric']:.4f}",
                    row.get("answer", ""),
                ]
            )
            label = ""
    return rows


def callbacks(result: Result) -> Rows:
    """Returns a row for each model that was trained with and without callbacks."""
    rows = []
    for case, found in result["cases"].items():
        sides = [own for own in found.values() if isinstance(own, dict)]
        size = [f"{found['parameters']:,}"] if "parameters" in found else []
        rows.append(
            [
                *(case, *size, f"{found['step_milliseconds']} ms"),
                *map(interval_text, sides),
                f"{sides[-1]['processor']['ratio']:.3f}",
            ]
        )
    return rows


def guilty_layers(result: Result) -> Rows:
    """Returns a row for each half and dtype."""
    return [
        [split, dtype, *(f"{right} of {total}" for right, total in counts.values())]
        for split in ("develop", "final")
        for dtype, counts in result.get(split, {}).get("sensitivity", {}).items()
    ]


def shadow_pass(result: Result) -> Rows:
    """Returns a row for each model and dtype."""
    return [
        [
            *(case, f"{found['parameters']:,}", dtype, f"{own['seconds']} s"),
            *(f"{own['slowest']} s", str(own["steps"])),
        ]
        for case, found in result["cases"].items()
        for dtype, own in found.items()
        if isinstance(own, dict)
    ]


def freeze(result: Result) -> Rows:
    """Returns a row for each model and batch size."""
    rows = []
    for case, size, found in by_policy(result):
        if size != "bytes":
            ratios = [
                f"{own['ratio']:.2f} {own['interval']}"
                for own in found.values()
                if isinstance(own, dict)
            ]
            milliseconds = f"{found['float32_milliseconds']} ms"
            rows.append([case, size, milliseconds, *ratios, str(found["goal"] or "")])
    return rows


def memory(result: Result) -> Rows:
    """Returns a row for each step and policy."""
    return [
        [
            *(case, policy, str(found["batch"]), mebibytes(found["predicted"])),
            " to ".join(mebibytes(found["measured"][index]) for index in (0, -1)),
            f"{found['ratio']:.2f}",
        ]
        for case, policy, found in by_policy(result)
    ]


def remat(result: Result) -> Rows:
    """Returns a row for each model and policy."""
    return [
        [
            *(case, policy, str(found["batch"])),
            *(mebibytes(found[key]) for key in ("plain_bytes", "remat_bytes")),
            *(f"{found[key]:.2f}" for key in ("memory", "memory_with_glibc", "time")),
            f"{found['off']:.1e}",
        ]
        for case, policy, found in by_policy(result)
    ]


_PREDICTED = ("Step", "Policy", "Batch", "Predicted")
_GUILTY = ("Half", "dtype", "found exactly", "reason right, of those")
# Benchmark -> columns and rows of its table.
TABLES: Tables = {
    "enable_overhead": (
        ("Policy", "What", "Stock", "tfamp", "Ratio", "Processor", "Turns"),
        enable_overhead,
    ),
    "loss_scale": (
        (
            *("Variables", "Mode", "Bare", "Keras", "tfamp"),
            *("First call: bare, Keras, tfamp", "Turns"),
        ),
        loss_scale,
    ),
    "pipeline": (("Pipeline", "Against", "Examples/s", "Ratio", "Goal"), pipeline),
    "training": (
        (
            *("Model", "Policy", "Examples/s", "Ratio", "Over stock", "Memory"),
            *("Inference p50, batch 1", "Metric", "Verdict"),
        ),
        training,
    ),
    "callbacks_cost": (
        ("Model", "Step", "Throughput", "DeviceStats", "Both", "Both, processor"),
        callbacks,
    ),
    "guards": (
        ("Model", "Parameters", "Step", "NanRecovery", "NanRecovery, processor"),
        callbacks,
    ),
    "guilty_layers": ((*_GUILTY, "alarms on controls"), guilty_layers),
    "guilty_layers_further": ((*_GUILTY, "alarms on controls"), guilty_layers),
    "shadow_pass": (
        ("Model", "Parameters", "dtype", "Seconds", "Slowest", "In steps"),
        shadow_pass,
    ),
    "freeze": (
        (
            *("Model", "Batch", "float32", "Keras mixed_bfloat16"),
            *("tfamp mixed_bfloat16", "Frozen", "Goal"),
        ),
        freeze,
    ),
    "memory": (
        (*_PREDICTED, "Measured, lowest to highest", "Predicted / measured"),
        memory,
    ),
    "remat": (
        (
            *("Model", "Policy", "Batch", "Plain", "Remat", "Memory", "With glibc"),
            *("Time", "Losses off by"),
        ),
        remat,
    ),
    **_serving_tables.TABLES,
    **_training_tables.TABLES,
}
