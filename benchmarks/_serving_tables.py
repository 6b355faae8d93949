"""The table and the words of the benchmark of the server."""

from typing import Any

from benchmarks._texts import Result, Rows, Tables, interval_text, mebibytes, missed

_NAMES = {
    "int8": "`tfamp serve`, ONNX int8",
    "saved_model": "`tfamp serve`, SavedModel float32",
    "fastapi": "FastAPI, ONNX int8",
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


def summary(results: list[Result]) -> list[tuple[str, str, str]]:
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


def words(result: Result) -> dict[str, Any]:
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
            f"ahead ({times['batch']} ms): {times['goal']} ms. The clients themselves "
            f"were up to {times['generator_late_p99']} ms late."
        ),
    }


TABLES: Tables = {
    "serving": (
        (
            *("Server", "Answers/s", "Median", "Processor of an answer", "Memory"),
            "`tfamp serve` over it",
        ),
        serving,
    ),
}
