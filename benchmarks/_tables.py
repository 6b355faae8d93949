"""The table of each benchmark's figures, and what the summary says of them.

A result is benchmarks/results/NAME.json, or a list of results from several devices.
Neither TensorFlow nor a benchmark is imported here.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

Result = dict[str, Any]
Rows = list[list[str]]


def versions_of(result: Result) -> str:
    """Returns the versions in one line."""
    return ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "numpy")


def interval_text(found: Result, digits: int = 3) -> str:
    """Returns a ratio with its interval."""
    return ratio_text([found["ratio"], *found["interval"]], digits=digits)


def ratio_text(interval: Sequence[Any] | None, other: str = "", digits: int = 2) -> str:
    """Returns a ratio with its interval, or another text where there is none."""
    if interval is None:
        return other
    middle, low, high = interval
    if low is None or high is None:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def range_text(values: Iterable[float]) -> str:
    """Returns the smallest and the largest value, or the one that both are."""
    low, *_, high = (f"{value:.2f}" for value in sorted(values) * 2)
    return low if low == high else f"{low} to {high}"


def missed(*met: bool) -> str:
    """Returns what stands behind a figure that misses its goal."""
    return "" if all(met) else ", missed"


def least(goal: float, *met: bool, form: str = "g") -> str:
    """Returns a goal that figures are to reach, and whether one misses it."""
    return f"at least {goal:{form}}{missed(*met)}"


def most(goal: float, *met: bool, form: str = "g") -> str:
    """Returns a goal that figures are not to pass, and whether one does."""
    return f"at most {goal:{form}}{missed(*met)}"


def mebibytes(num_bytes: int) -> str:
    """Returns bytes in MiB."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def by_policy(result: Result) -> Iterator[tuple[str, str, Any]]:
    """Yields case, policy and figures of results that are kept so."""
    for case, policies in result["cases"].items():
        for policy, found in policies.items():
            if isinstance(found, dict):
                yield case, policy, found


@dataclasses.dataclass(frozen=True)
class Table:
    """How the figures of a benchmark are shown."""

    columns: str  # " | " between them
    rows: Callable[[Result], Rows]
    # What, what came out, the goal.
    summary: Callable[[Sequence[Result]], Iterable[tuple[str, str, str]]]
    measures: str  # folders and files of tfamp
    # What the text has a place for, beside the result's own values.
    words: Callable[[Result], dict[str, Any]] = lambda result: {}


def _enable_overhead(result: Result) -> Rows:
    rows = []
    for what, name in (("step", "training step"), ("build", "200-layer build")):
        found = result[what]
        times = [f"{found[f'{s}_milliseconds']:.4g} ms" for s in ("stock", "tfamp")]
        steps = f" of {found['turn_steps']} steps" if "turn_steps" in found else ""
        policy = result["policy"] if what == "step" else ""
        ratios = interval_text(found), f"{found['processor_ratio']:.3f}"
        rows.append([policy, name, *times, *ratios, f"{found['turns']}{steps}"])
    return rows


def _enable_summary(results: Sequence[Result]) -> Any:
    for key, what in (("step", "training step"), ("build", "build of 200 layers")):
        found = ", ".join(interval_text(result[key]) for result in results)
        met = [result[key]["met"] for result in results]
        goal = most(results[0][key]["goal"], *met, form=".2f")
        yield f"A {what} under tfamp over stock Keras", found, goal


def _loss_scale(result: Result) -> Rows:
    return [
        [
            *(*name.rsplit(", ", 1), f"{found['bare_milliseconds']:.2f} ms"),
            *(interval_text(found[side]) for side in ("keras", "tfamp")),
            ", ".join(map(str, found["first_call_seconds"].values())) + " s",
            str(found["turns"]),
        ]
        for name, found in result["cases"].items()
    ]


def _loss_scale_summary(results: Sequence[Result]) -> Any:
    cases = [each for result in results for each in result["cases"].items()]
    for mode in ("graph", "XLA"):
        own = [found for name, found in cases if name.endswith(mode)]
        ours, theirs = ([e[side]["ratio"] for e in own] for side in ("tfamp", "keras"))
        goal = most(1.2, max(ours) <= 1.2, form=".2f")
        if mode == "graph":
            is_below = (one < other for one, other in zip(ours, theirs, strict=True))
            goal = f"below Keras's{missed(*is_below)}"
        what = f"A step of Adam with a loss scale over a bare one, {mode}"
        yield what, f"{range_text(ours)} (Keras's: {range_text(theirs)})", goal


def _pipeline(result: Result) -> Rows:
    rates, rows = result["rates"], []
    for name, found in result["ratios"].items():
        ours, other = name.split(" / ")
        goal = "" if found["goal"] is None else f"{found['goal']:g}"
        ratio = interval_text(found, 1 if found["ratio"] >= 10 else 2)
        both = f"{rates[ours]:,} and {rates[other]:,}"
        rows.append([ours, other, both, ratio, goal + missed(found["met"])])
    return rows


def _pipeline_summary(results: Sequence[Result]) -> Any:
    for ours, other, _, ratio, goal in _pipeline(results[0]):
        if goal:
            yield f"Examples/s, {ours} over {other}", ratio, goal


def _training(result: Result) -> Rows:
    rows, keys = [], ("over_stock", "training_bytes", "latency")
    for name, model in result["models"].items():
        label = f"{name}, batch {model['batch_size']}"
        for policy, row in model["rows"].items():
            resolved, metric = row["resolved"], model["metric"]
            told = policy if resolved in policy else f"{policy} = {resolved}"
            ratios = [ratio_text(row.get(key)) for key in keys]
            rows.append(
                [
                    *(label, told, f"{row['examples_per_second']:,.0f}"),
                    *(ratio_text(row.get("ratio"), "reference"), *ratios),
                    *(f"{metric} {row['metric']:.4f}", row.get("answer", "")),
                ]
            )
            label = ""
    return rows


def _training_summary(results: Sequence[Result]) -> Any:
    for policy in ("auto", "mixed_bfloat16"):
        own = {n: each[policy] for n, each in results[0]["goals"].items()}
        found = ", ".join(f"{n} {ratio_text(each['ratio'])}" for n, each in own.items())
        goal = next(iter(own.values()))["goal"]
        met = [each["met"] for each in own.values()]
        what = f"Training, {policy} over stock mixed_bfloat16"
        yield what, found, least(goal, *met)


def _training_words(result: Result) -> dict[str, Any]:
    sentences = []
    for policy, what in (("auto", '"auto"'), ("mixed_bfloat16", "Our mixed_bfloat16")):
        each = {n: own[policy] for n, own in result["goals"].items() if policy in own}
        if not each:
            continue
        goal = next(iter(each.values()))["goal"]
        met = ", ".join(name for name, found in each.items() if found["met"])
        text = f"{what} was to reach {goal} of stock mixed_bfloat16 on each model. "
        text += f"Met: {met or 'none'}."
        for name, found in each.items():
            if not found["met"]:
                is_noise = "" if found["ruled_out"] else ", which the noise allows"
                text += f" {name}: {ratio_text(found['ratio'])}{is_noise}."
        sentences.append(text)
    return {"goals_text": "\n\n".join(sentences)}


def _callbacks(result: Result) -> Rows:
    rows = []
    for case, side, found in by_policy(result):
        own = result["cases"][case]
        told = f"{own['parameters']:,}", f"{own['step_milliseconds']} ms"
        ratios = interval_text(found), f"{found['processor']['ratio']:.3f}"
        rows.append([case, *told, side, *ratios])
    return rows


def _callbacks_summary(results: Sequence[Result]) -> Any:
    sides: dict[str, list[float]] = {}
    for _, side, found in by_policy(results[0]):
        sides.setdefault(side, []).append(found["ratio"])
    goal = results[0]["goal"]
    for side, ratios in sides.items():
        told = most(goal, max(ratios) <= goal)
        yield f"A step with {side} over one without", range_text(ratios), told


def _guilty_layers(result: Result) -> Rows:
    return [
        [dtype, *(f"{number} of {total}" for number, total in found.values())]
        for dtype, found in result["sensitivity"].items()
    ]


def _guilty_summary(results: Sequence[Result]) -> Any:
    for key, words in (("found", "faults found exactly"), ("alarms", "false alarms")):
        counts = [own[key] for own in results[0]["sensitivity"].values()]
        number, total = map(sum, zip(*counts, strict=True))
        yield f"Models with known faults: {words}", f"{number} of {total}", ""
    number, total = results[0]["triage"]
    yield "Failing steps whose cause and layer are named", f"{number} of {total}", ""


def _guilty_words(result: Result) -> dict[str, Any]:
    lines = [
        f"- {' '.join(str(row[k]) for k in ('case', 'dtype') if k in row)}, seed "
        f"{row['seed']}: expected {row['expected']} {row['wanted']}, got "
        f"{row['found']} {row['named']}"
        for row in result["missed"]
    ]
    number, total = result["triage"]
    return {"steps": f"{number} of {total}", "missed": "\n".join(lines) or "None."}


def _shadow_pass(result: Result) -> Rows:
    return [
        [
            *(case, f"{result['cases'][case]['parameters']:,}", dtype),
            *(f"{own['seconds']} s", f"{own['slowest']} s", str(own["steps"])),
        ]
        for case, dtype, own in by_policy(result)
    ]


def _shadow_summary(results: Sequence[Result]) -> Any:
    slowest = [own["slowest"] for _, _, own in by_policy(results[0])]
    what, goal = "Seconds of `tfamp.sensitivity` on ten million", results[0]["goal"]
    yield f"{what} parameters", range_text(slowest), most(goal, max(slowest) <= goal)


def _inference(result: Result) -> Rows:
    rows = []
    for case, own in result["cases"].items():
        for name, found in own["candidates"].items():
            if "failed" in found:
                rows.append([case, name, "", "", "", "", found["failed"]])
                continue
            speeds = [interval_text(found[size], 2) for size in ("1", "64")]
            right = f"{found['accuracy']:.4f}", str(found["flipped"])
            rows.append([case, name, f"{found['size']:.2f}", *speeds, *right])
        for name, found in own["stock"].items():
            speeds = [interval_text(found[size], 2) for size in ("1", "64")]
            rows.append([case, f"TensorFlow: {name}", "", *speeds, "", ""])
    for case, found in result["large"].items():
        agree = f"{found['agree']:.1%} of {found['number']} agree"
        size = f"{found['size']:.2f}"
        rows.append([case, found["exported"], size, "", "", agree, ""])
    return rows


def _inference_summary(results: Sequence[Result]) -> Any:
    result = results[0]
    speeds = "Predictions/s, int8 over a SavedModel and over the best float32"
    stored, chosen = [], []
    for case, own in result["cases"].items():
        stored.append(own["candidates"]["saved_model float32"]["over_weights"])
        for size, best in own["best"].items():
            chosen.append(own["candidates"][best["int8"]]["size"])
            goal = f"{best['goal']:g} and {best['goal_over_float32']:g}"
            reached = f"{best['over_saved_model']:.2f} and {best['over_float32']:.2f}"
            what = f"{speeds}, {case} at batch {size}"
            yield what, reached, goal + missed(best["met"])
    for name, sizes, limit in (
        ("Bytes of a float32 SavedModel over its weights", stored, 1.05),
        ("Bytes of the fastest int8 over the float32 .keras file", chosen, 0.27),
    ):
        if sizes:
            yield name, f"{max(sizes):.2f}", most(limit, max(sizes) <= limit)
    for case, own in result["large"].items():
        goal = least(own["required"], own["agree"] >= own["required"], form=".0%")
        weights = own.get("weights", "random weights")
        what = f"Predictions of {case}, {weights}, that int8 leaves as they are"
        yield what, f"{own['agree']:.1%}", goal
    chosen_well = "Choices of `auto` that are the fastest, or within 5 %"
    passed = "Models with a planted outlier channel whose int8 export passes"
    for own, key, what, form in (
        (result["auto"], "near", chosen_well, "{} of {}"),
        (result["planted"], "passed", passed, "{2:.0%}"),
    ):
        if own["number"]:
            share = own[key] / own["number"]
            goal = least(own["required"], share >= own["required"], form=".0%")
            yield what, form.format(own[key], own["number"], share), goal


def _inference_words(result: Result) -> dict[str, Any]:
    planted = result["planted"]
    kept, tried, seconds = 0, 0, 0.0
    for run in planted["runs"]:
        kept = max(kept, len(run["kept"]))
        tried = max(tried, run.get("tried", 3))
        seconds = max(seconds, run.get("search_seconds", run["seconds"]))
    return {
        "planted_text": (
            f"{planted['passed']} of {planted['number']} passed the gate with at most "
            f"2 layers kept, 3 exports and 10 s (most: {kept} layers, {tried} exports, "
            f"{seconds:g} s)."
        )
    }


_SERVERS = {
    "int8": "`tfamp serve`, ONNX int8",
    "saved_model": "`tfamp serve`, SavedModel float32",
    "fastapi": "FastAPI, ONNX int8",
}


def _serving(result: Result) -> Rows:
    return [
        [
            *(_SERVERS[name], f"{found['per_second']:,}"),
            f"{found['p50_milliseconds']:.2f} ms",
            f"{found['processor_microseconds']} µs",
            mebibytes(found["resident_bytes"]),
            interval_text(found, 2) if "ratio" in found else "",
        ]
        for name, found in result["rates"].items()
    ]


def _serving_summary(results: Sequence[Result]) -> Any:
    result = results[0]
    for name, found in result["rates"].items():
        if "goal" in found:
            what = f"Answers/s to {result['clients']} clients, `tfamp serve` in int8 "
            goal = least(found["goal"], found["met"])
            yield f"{what}over {_SERVERS[name]}", interval_text(found, 2), goal
    one, tail = result["one_client"], result["half_peak"]
    start, memory, times = result["start"], result["memory"], tail["milliseconds"]
    added = " and ".join(f"{ms:.2f} ms" for ms in one["added_milliseconds"].values())
    p99 = "none" if times["p99"] is None else f"{times['p99']:.2f} ms"
    held, limit = (f"{memory[key] / 1e6:.0f} MB" for key in ("bytes", "goal"))
    began = f"{start['seconds']:.2f} s", f"{start['goal']:g} s"
    rows = {
        "HTTP's part of a median answer to one client, JSON and bytes": (
            *(added, f"{one['goal']:g} ms", one),
        ),
        "99th percentile at half of the most it answers": (
            *(p99, f"{times['goal']:.2f} ms", tail),
        ),
        "Start of `tfamp serve` to its first answer": (*began, start),
        "Memory of `tfamp serve`, libraries and 8.7 MB of weights included": (
            *(held, limit, memory),
        ),
    }
    for what, (figure, goal, found) in rows.items():
        yield what, figure, f"at most {goal}{missed(found['met'])}"


def _serving_words(result: Result) -> dict[str, Any]:
    tail, one = result["half_peak"], result["one_client"]
    times, added = tail["milliseconds"], one["added_milliseconds"]
    return {
        "one_text": (
            f"One client waits {added['json']:.2f} ms (JSON) or {added['binary']:.2f} "
            f"ms (bytes) longer than the {one['in_process_milliseconds']:.2f} ms of "
            "a call in a process."
        ),
        "tail_text": (
            f"At {tail['rate']:,} requests a second, half of the most, the 99th "
            f"percentile is {times['p99']} ms. It is held to twice that of the runtime "
            f"alone ({times['own_p99']} ms) and the run of a batch of 64 that may be "
            f"ahead ({times['batch']} ms): {times['goal']} ms."
        ),
    }


def _tuner(result: Result) -> Rows:
    rows = []
    for name, runs in result["cases"].items():
        for run in runs:
            worse = [
                f"{run[key]:.4f}{missed(met)}"
                for key, met in zip(("fresh", "other_weights"), run["met"], strict=True)
            ]
            steps = run["bisection"]
            rows.append(
                [
                    *(name, run["policy"].removeprefix("mixed_")),
                    f"{len(run['guilty'])} of {run['layers']}",
                    *(str(len(run["float32"])), str(run["evaluations"])),
                    "over 60" if steps is None else str(steps),
                    *(*worse, f"{run['kept']:.2f}{'' if run['searched'] else ' *'}"),
                    *(f"{run['greedy_kept']:.2f}", f"{run['seconds']:.1f} s"),
                ]
            )
    return rows


def _tuner_summary(results: Sequence[Result]) -> Any:
    for name, goal in results[0]["goals"].items():
        limit = (most if name == "evaluations" else least)(
            goal["required"], goal["met"]
        )
        yield goal["what"], f"{goal['reached']:g}", limit


def _tuner_words(result: Result) -> dict[str, Any]:
    sentences = [
        f"{goal['what']}: required {goal['required']:g}, reached "
        f"{goal['reached']:g}{missed(goal['met'])}."
        for goal in result["goals"].values()
    ]
    runs = [run for own in result["cases"].values() for run in own]
    given_up = sum(run["is_float32"] for run in runs)
    dearer = sum(run["kept"] < run["greedy_kept"] for run in runs)
    told = f"Of {len(runs)} plans {given_up} are float32; greedy search saved more in "
    text = " ".join([*sentences, f"{told}{dearer}."])
    return {"number": len(result["cases"]), "goals_text": text}


def _fastest_policy(result: Result) -> Rows:
    kinds: dict[str, list[Result]] = {}
    for each in result["tries"]:
        kinds.setdefault(each["kind"], []).append(each)
    return [
        [
            *(kind, str(len(own)), str(sum(each["right"] for each in own))),
            f"{max(each['behind'] for each in own) - 1:.1%}",
            range_text(each["gain"] for each in own),
            f"{range_text(each['seconds'] for each in own)} s",
        ]
        for kind, own in kinds.items()
    ]


def _fastest_summary(results: Sequence[Result]) -> Any:
    result, large = results[0], results[0]["resnet50"]
    what = "Tries in which `measure_policies` picks the fastest, or one within 3 %"
    yield what, f"{result['right']:.2f}", least(result["required"], result["met"])
    goal = most(large["required"], large["met"])
    yield "Seconds of measuring ResNet50 at 96x96", f"{large['seconds']:g}", goal


def _fastest_words(result: Result) -> dict[str, Any]:
    number, tries = sum(each["right"] for each in result["tries"]), result["tries"]
    large = result["resnet50"]
    picks = sorted({each["picked"] for each in tries})
    return {
        "number": len(tries),
        "goals_text": (
            f"The fastest policy, or one within 3 % of it, was picked in {number} of "
            f"{len(tries)} tries; required: {result['required']:.0%}"
            f"{missed(result['met'])}. Measuring ResNet50 at 96x96 in batches of 16 "
            f"took {large['seconds']} s; required: {most(large['required'])} s"
            f"{missed(large['met'])}. Picked at least once: {', '.join(picks)}."
        ),
    }


def _memory(result: Result) -> Rows:
    rows = []
    for case, policy, found in by_policy(result):
        own = str(found["batch"]), mebibytes(found["predicted"])
        measured = " to ".join(mebibytes(found["measured"][at]) for at in (0, -1))
        rows.append([case, policy, *own, measured, f"{found['ratio']:.2f}"])
    return rows


def _memory_summary(results: Sequence[Result]) -> Any:
    ratios = [found["ratio"] for _, _, found in by_policy(results[0])]
    goal = results[0]["goal"]
    told = f"within {goal:.0%} of 1{missed(*(abs(r - 1) <= goal for r in ratios))}"
    yield "Memory of a step, predicted over measured", range_text(ratios), told


def _remat(result: Result) -> Rows:
    return [
        [
            *(case, policy, str(found["batch"])),
            *(mebibytes(found[key]) for key in ("plain_bytes", "remat_bytes")),
            *(f"{found[key]:.2f}" for key in ("memory", "memory_with_glibc", "time")),
            f"{found['off']:.1e}",
        ]
        for case, policy, found in by_policy(result)
    ]


def _remat_summary(results: Sequence[Result]) -> Any:
    goal = results[0]["goal"]
    keys = {"Memory": "memory", "Memory under glibc": "memory_with_glibc"}
    for what, key in (keys | {"Time": "time"}).items():
        values = [found[key] for _, _, found in by_policy(results[0])]
        told = most(goal, max(values) <= goal) if what in keys else ""
        title = f"{what} of a step with `tfamp.remat` over one without"
        yield title, range_text(values), told


def _beyond(result: Result) -> Rows:
    return [
        [name, each["what"], interval_text(each, 2), f"{each['goal']:g}"]
        for name, each in result["cases"].items()
    ]


def _beyond_summary(results: Sequence[Result]) -> Any:
    for name, each in results[0]["cases"].items():
        goal = f"{each['goal']:g}{missed(each['met'])}"
        yield f"{name}: {each['what']}", interval_text(each, 2), goal


# In the order of the page.
TABLES: dict[str, Table] = {
    "enable_overhead": Table(
        "Policy | What | Stock | tfamp | Ratio | Processor | Turns",
        *(_enable_overhead, _enable_summary, "dtypes keras_hooks policy.py models.py"),
    ),
    "loss_scale": Table(
        "Variables | Mode | Bare | Keras | tfamp | First call: bare, Keras, "
        "tfamp | Turns",
        *(_loss_scale, _loss_scale_summary, "loss_scale"),
    ),
    "pipeline": Table(
        "Pipeline | Against | Examples/s | Ratio | Goal",
        *(_pipeline, _pipeline_summary, "data"),
    ),
    "training": Table(
        "Model | Policy | Examples/s | Ratio | Over stock | Memory | "
        "Inference p50, batch 1 | Metric | Verdict",
        *(_training, _training_summary),
        "dtypes keras_hooks policy.py models.py loss_scale comparison trials",
        _training_words,
    ),
    "guilty_layers": Table(
        "dtype | Found exactly | Alarms on healthy models",
        *(_guilty_layers, _guilty_summary, "numerics", _guilty_words),
    ),
    "callbacks": Table(
        "Model | Parameters | Step | Callbacks | Ratio | Processor",
        *(_callbacks, _callbacks_summary, "callbacks"),
    ),
    "shadow_pass": Table(
        "Model | Parameters | dtype | Seconds | Slowest | In steps",
        *(_shadow_pass, _shadow_summary, "numerics"),
    ),
    "inference": Table(
        "Model | Exported | Size over .keras | Batch 1 | Batch 64 | Accuracy | Flipped",
        *(_inference, _inference_summary, "serving", _inference_words),
    ),
    "serving": Table(
        "Server | Answers/s | Median | Processor of an answer | Memory | "
        "`tfamp serve` over it",
        *(_serving, _serving_summary, "serving", _serving_words),
    ),
    "tuner": Table(
        "Model | Policy | Guilty | In float32 | Evaluations | Bisection | "
        "Worse on fresh | From another seed | Saving kept | Greedy | Time",
        *(_tuner, _tuner_summary, "tuning numerics", _tuner_words),
    ),
    "fastest_policy": Table(
        "Networks | Tries | Right | Furthest behind the fastest | Fastest "
        "over float32 | Measuring took",
        *(_fastest_policy, _fastest_summary, "tuning", _fastest_words),
    ),
    "beyond": Table(
        "Case | What | Ratio | Goal",
        *(_beyond, _beyond_summary, "tuning keras_hooks serving"),
    ),
    "memory": Table(
        "Step | Policy | Batch | Predicted | Measured, lowest to highest | "
        "Predicted / measured",
        *(_memory, _memory_summary, "memory graph"),
    ),
    "remat": Table(
        "Model | Policy | Batch | Plain | Remat | Memory | With glibc | Time "
        "| Losses off by",
        *(_remat, _remat_summary, "memory"),
    ),
}
