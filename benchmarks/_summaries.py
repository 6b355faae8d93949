"""The summary of each benchmark: what was measured, what came out, and the goal."""

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import _serving_tables, _training_tables
from benchmarks._texts import (
    Result,
    by_policy,
    interval_text,
    missed,
    range_text,
    ratio_text,
)

Row = tuple[str, str, str]


def _cases(results: Sequence[Result]) -> list[Any]:
    return [found for result in results for found in result["cases"].values()]


def _predictions(what: str, results: Sequence[Result]) -> list[Row]:
    ratios = [found["ratio"] for _, _, found in by_policy(results[0])]
    goal = f"within {results[0]['goal']:.0%} of 1"
    return [(f"{what}, predicted over measured", range_text(ratios), goal)]


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
            range_text(each[side]["ratio"] for each in own)
            for side in ("tfamp", "keras")
        )
        what = f"A step of Adam with a loss scale over a bare one, {mode}"
        rows.append((what, f"{ours} (Keras's: {theirs})", goal))
    return rows


def _of_pipeline(results: Sequence[Result]) -> list[Row]:
    return [
        (
            f"Examples/s, {name.replace(' / ', ' over ')}",
            interval_text(found, 1 if found["ratio"] >= 10 else 2),
            f"{found['goal']:g}{missed(found['met'])}",
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
        goal += missed(*(each["met"] for each in own.values()))
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
    "callbacks_cost": lambda results: [
        (
            "A step with Throughput and DeviceStats over one without",
            range_text(found["both"]["ratio"] for found in _cases(results)),
            f"at most {results[0]['goal']}",
        )
    ],
    "guilty_layers": lambda results: _found("Models with known faults", results),
    "guilty_layers_further": lambda results: _found("Further models", results),
    "guards": lambda results: [
        (
            "A step with NanRecovery over one without",
            range_text(found["NanRecovery"]["ratio"] for found in _cases(results)),
            f"at most {results[0]['goal']}"
            + missed(*(found["met"] for found in _cases(results))),
        )
    ],
    "shadow_pass": lambda results: [
        (
            "Seconds of `tfamp.sensitivity` on ten million parameters",
            range_text(
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
            f"{found['goal']}{missed(found['met'])}",
        )
        for case, size, found in by_policy(results[0])
        if size != "bytes" and found["goal"]
    ],
    "inference": _serving_tables.inference_summary,
    "serving": _serving_tables.serving_summary,
    "tuner": lambda results: [
        (
            goal["what"],
            f"{goal['reached']:g}",
            f"at {'most' if name == 'evaluations' else 'least'} {goal['required']:g}"
            + missed(goal["met"]),
        )
        for name, goal in results[0]["goals"].items()
    ],
    "fastest_policy": lambda results: [
        (
            "Tries in which `measure_policies` picks the fastest, or one within 3 %",
            f"{results[0]['right']:.2f}",
            f"at least {results[0]['required']:g}{missed(results[0]['met'])}",
        ),
        (
            "Seconds of measuring ResNet50 at 96x96",
            f"{results[0]['resnet50']['seconds']:g}",
            f"at most {results[0]['resnet50']['required']:g}"
            + missed(results[0]["resnet50"]["met"]),
        ),
    ],
    "memory": lambda results: _predictions("Memory of a step", results),
    "remat": lambda results: [
        (
            "Memory of a step with `tfamp.remat` over one without",
            range_text(found["memory"] for _, _, found in by_policy(results[0])),
            f"at most {results[0]['goal']}",
        ),
        (
            "Time of a step with `tfamp.remat` over one without",
            range_text(found["time"] for _, _, found in by_policy(results[0])),
            "",
        ),
    ],
    "scale": _training_tables.scale_summary,
}
