"""Tables and words of the benchmarks of exported models and of their server."""

from typing import Any

from benchmarks._texts import Result, Rows, Tables, interval_text, mebibytes, missed

_NAMES = {
    "int8": "`tfamp serve`, ONNX int8",
    "saved_model": "`tfamp serve`, SavedModel float32",
    "fastapi": "FastAPI, ONNX int8",
}
_SIZES = ("1", "64")


def inference(result: Result) -> Rows:
    """Returns a row for each model and candidate."""
    rows = []
    for case, own in result["cases"].items():
        for name, found in own["candidates"].items():
            if "failed" in found:
                rows.append([case, name, "", "", "", "", found["failed"]])
                continue
            rows.append(
                [
                    *(case, name, f"{found['size']:.2f}"),
                    *(interval_text(found[size], 2) for size in _SIZES),
                    f"{found['accuracy']:.4f}",
                    str(found["flipped"]),
                ]
            )
        for name, found in own["stock"].items():
            speeds = [interval_text(found[size], 2) for size in _SIZES]
            rows.append([case, f"TensorFlow: {name}", "", *speeds, "", ""])
    for case, found in result["large"].items():
        agree = f"{found['agree']:.1%} of {found['number']} agree"
        size = f"{found['size']:.2f}"
        rows.append([case, found["exported"], size, "", "", agree, ""])
    return rows


def inference_summary(results: list[Result]) -> list[tuple[str, str, str]]:
    """Returns the rows of the summary."""
    rows = []
    for case, own in results[0]["cases"].items():
        for size, best in own["best"].items():
            goal = f"{best['goal']:g} and {best['goal_over_float32']:g}"
            what = "Predictions/s, int8 over a SavedModel and over the best float32"
            reached = f"{best['over_saved_model']:.2f} and {best['over_float32']:.2f}"
            rows.append(
                (f"{what}, {case} at batch {size}", reached, goal + missed(best["met"]))
            )
    cases = results[0]["cases"].values()
    stored = [own["candidates"]["saved_model float32"] for own in cases]
    chosen = [
        own["candidates"][best["int8"]]
        for own in cases
        for best in own["best"].values()
    ]
    for name, sizes, most in (
        (
            "Bytes of a float32 SavedModel over its weights",
            [found["over_weights"] for found in stored],
            1.05,
        ),
        (
            "Bytes of the fastest int8 over the float32 .keras file",
            [found["size"] for found in chosen],
            0.27,
        ),
    ):
        if sizes:
            met = max(sizes) <= most
            rows.append((name, f"{max(sizes):.2f}", f"at most {most:g}{missed(met)}"))
    for case, own in results[0]["large"].items():
        met = own["agree"] >= own["required"]
        goal = f"at least {own['required']:.0%}"
        weights = own.get("weights", "random weights")
        what = f"Predictions of {case}, {weights}, that int8 leaves as they are"
        rows.append((what, f"{own['agree']:.1%}", goal + missed(met)))
    auto = results[0]["auto"]
    if auto["number"]:
        met = auto["near"] >= auto["required"] * auto["number"]
        goal = f"at least {auto['required']:.0%}"
        what = "Choices of `auto` that are the fastest, or within 5 %"
        rows.append((what, f"{auto['near']} of {auto['number']}", goal + missed(met)))
    planted = results[0]["planted"]
    if planted["number"]:
        share = planted["passed"] / planted["number"]
        goal = f"at least {planted['required']:.0%}"
        met = share >= planted["required"]
        what = "Models with a planted outlier channel whose int8 export passes"
        rows.append((what, f"{share:.0%}", goal + missed(met)))
    return rows


def inference_words(result: Result) -> dict[str, Any]:
    """Returns what the text has a place for."""
    planted = result["planted"]
    runs = planted["runs"]
    most = {
        key: max((each(run) for run in runs), default=0)
        for key, each in (
            ("kept", lambda run: len(run["kept"])),
            ("tried", lambda run: run.get("tried", 3)),
            ("seconds", lambda run: run.get("search_seconds", run["seconds"])),
        )
    }
    return {
        "planted_text": (
            f"{planted['passed']} of {planted['number']} passed the gate with at most "
            f"2 layers kept, 3 exports and 10 s (most: {most['kept']} layers, "
            f"{most['tried']} exports, {most['seconds']:g} s)."
        )
    }


def serving(result: Result) -> Rows:
    """Returns a row for each server."""
    return [
        [
            _NAMES[name],
            f"{found['per_second']:,}",
            f"{found['p50_milliseconds']:.2f} ms",
            f"{found['processor_microseconds']} µs",
            mebibytes(found["resident_bytes"]),
            interval_text(found, 2) if "ratio" in found else "",
        ]
        for name, found in result["rates"].items()
    ]


def serving_summary(results: list[Result]) -> list[tuple[str, str, str]]:
    """Returns the rows of the summary."""
    result = results[0]
    rows = [
        (
            f"Answers/s to {result['clients']} clients, `tfamp serve` in int8 over "
            f"{_NAMES[name]}",
            interval_text(found, 2),
            f"at least {found['goal']:g}{missed(found['met'])}",
        )
        for name, found in result["rates"].items()
        if "goal" in found
    ]
    one, tail = result["one_client"], result["half_peak"]
    start, memory = result["start"], result["memory"]
    times = tail["milliseconds"]
    return [
        *rows,
        (
            "HTTP's part of a median answer to one client, JSON and bytes",
            " and ".join(f"{ms:.2f} ms" for ms in one["added_milliseconds"].values()),
            f"at most {one['goal']:g} ms{missed(one['met'])}",
        ),
        (
            "99th percentile at half of the most it answers",
            "none" if times["p99"] is None else f"{times['p99']:.2f} ms",
            f"at most {times['goal']:.2f} ms{missed(tail['met'])}",
        ),
        (
            "Start of `tfamp serve` to its first answer",
            f"{start['seconds']:.2f} s",
            f"at most {start['goal']:g} s{missed(start['met'])}",
        ),
        (
            "Memory of `tfamp serve`, libraries and 8.7 MB of weights included",
            f"{memory['bytes'] / 1e6:.0f} MB",
            f"at most {memory['goal'] / 1e6:.0f} MB{missed(memory['met'])}",
        ),
    ]


def serving_words(result: Result) -> dict[str, Any]:
    """Returns what the text has a place for."""
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


TABLES: Tables = {
    "inference": (
        (
            *("Model", "Exported", "Size over .keras", "Batch 1", "Batch 64"),
            *("Accuracy", "Flipped"),
        ),
        inference,
    ),
    "serving": (
        (
            *("Server", "Answers/s", "Median", "Processor of an answer", "Memory"),
            "`tfamp serve` over it",
        ),
        serving,
    ),
}
