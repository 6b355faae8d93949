"""Training under several policies, compared by `tfamp.compare`, model by model.

For each model: examples/s under float32, float32 with XLA, "auto", and mixed_bfloat16
with tfamp and with stock Keras, each run in a fresh process, the policies in turns.
Goals: "auto" at least 0.99 of stock mixed_bfloat16, and our mixed_bfloat16 within 3 %
of stock's; quality within 0.5 % where a model is trained to its end.

Time: about half an hour on two CPU cores. Use an idle machine.
"""

import json
import math
import os
from typing import Any

import tfamp
from benchmarks import _runner

MIN_AUTO, MIN_OURS = 0.99, 0.97
STOCK, OURS = "keras:mixed_bfloat16", "mixed_bfloat16"
POLICIES = ("float32", "float32+xla", "auto", OURS, STOCK)
# Name -> function, epochs, what a reader should know of it.
MODELS = {
    "mlp": ("benchmarks._models:mlp", 3, "3 x 2048, batch 256"),
    "cnn": ("benchmarks._models:cnn", 3, "64-128-256, 32x32, batch 64"),
    "transformer": ("benchmarks._models:transformer", 3, "3 x 256, 128 tokens"),
    "resnet50": ("benchmarks._models:resnet50", 3, "96x96, batch 16"),
    "digits": ("recipes.train_digits:build", 12, "recipes/train_digits.py"),
    "tabular": ("recipes.train_tabular:build", 40, "recipes/train_tabular.py"),
    "text": ("benchmarks._models:text", 1, "recipes/train_text.py, 150 steps"),
}
MEASURES = {
    "ratio": "examples_per_second",
    "training_bytes": "training_bytes",
    "latency": "latency_p50_batch_1",
}
# XLA takes minutes to compile it for a CPU.
_NOT_COMPILED = ("resnet50",)
FLAGS = (
    ("list", "models", list(MODELS), "Which."),
    ("list", "policies", list(POLICIES), "Which."),
    ("integer", "seeds", 3, "Runs of each policy."),
)


def told(run: Any) -> None:
    """Prints what a run did."""
    rate = f"{run.examples_per_second:,.0f} examples/s"
    print(f"  {run.policy}, seed {run.seed}: {rate} {run.error}", flush=True)


def figures(found: Any) -> dict[str, Any]:
    """Returns what the table shows of a comparison."""
    rows = {}
    for policy in found.policies:
        runs = found.finished(policy)
        if not runs:
            continue
        rates = sorted(run.examples_per_second for run in runs)
        metrics = [run.final_metrics[found.metric] for run in runs]
        row: dict[str, Any] = {
            "examples_per_second": round(rates[len(rates) // 2], 1),
            "resolved": runs[0].resolved_policy,
            "metric": round(sum(metrics) / len(metrics), 4),
        }
        if policy != found.reference:
            row["answer"] = found.verdicts[policy].answer
            for key, measure in MEASURES.items():
                row[key] = _interval(found.ratio(measure, policy))
        if STOCK in found.policies and policy in ("auto", OURS):
            own = found.ratio("examples_per_second", policy, STOCK)
            row["over_stock"] = _interval(own)
        rows[policy] = row
    context = found.context
    return {
        "reference": found.reference,
        "metric": found.metric,
        "seeds": len(found.seeds),
        "batch_size": found.runs[0].batch_size,
        "rows": rows,
        "notes": list(found.notes),
        "device": f"{context.devices[0].name}, {context.num_cores} cores",
        "versions": {k: v for k, v in context.versions.items() if v},
    }


def goals(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns for each model whether each goal was met, and by which figure."""
    checked: dict[str, dict[str, Any]] = {}
    for name, model in results.items():
        for policy, least in (("auto", MIN_AUTO), (OURS, MIN_OURS)):
            found = model["rows"].get(policy, {}).get("over_stock")
            if found is not None:
                # Missed only where the whole interval lies below.
                checked.setdefault(name, {})[policy] = {
                    "ratio": found,
                    "goal": least,
                    "met": found[0] >= least,
                    "ruled_out": found[2] is not None and found[2] < least,
                }
    return checked


def _interval(interval: Any) -> list[float | None]:
    """Returns estimate and ends; of one seed there are no ends."""
    values = (interval.estimate, interval.low, interval.high)
    if len({math.isfinite(value) for value in values}) > 1:
        values = (interval.estimate, None, None)
    return [None if value is None else round(value, 3) for value in values]


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures; models that are not measured now keep those they have."""
    os.chdir(_runner.ROOT)
    models = {name: MODELS[name] for name in settings.models}
    policies, seeds = settings.policies, settings.seeds
    if settings.smoke:
        models = {"tiny": ("benchmarks._models:tiny", 3, "smoke")}
        policies, seeds = ["float32", STOCK], 1
    path = _runner.RESULTS / "training.json"
    kept = json.loads(path.read_text())["models"] if settings.record else {}
    found = {name: model for name, model in kept.items() if name in MODELS}
    for name, (target, epochs, text) in models.items():
        print(f"{name}: {text}", flush=True)
        some = [p for p in policies if name not in _NOT_COMPILED or "xla" not in p]
        how = {"policies": some, "seeds": seeds, "epochs": epochs, "on_run": told}
        found[name] = figures(tfamp.compare(target, **how))
        result = {"models": found, "goals": goals(found)}
        if settings.record:  # after each, since all of them take long
            before = json.loads(path.read_text())
            _runner.record("training", before | result)
    return result
