"""How fast `tfamp serve` answers, over FastAPI and over a SavedModel.

An MLP of three layers of 2048, trained on digits, is exported to ONNX in int8 and to a
float32 SavedModel. 16 clients ask `tfamp serve` with either, and a plain FastAPI
example with the ONNX file, for one row as JSON, in turns. Then: what HTTP adds to a
call for one client, the server's memory and its start, and its 99th percentile at half
of the most that it answers.

Time: five minutes on two CPU cores. Use an idle machine: the clients run on the same
cores. Needs tfamp[serve,onnx] and fastapi.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tfamp
from benchmarks._runner import ROOT
from benchmarks._turns import ratio, take_turns
from benchmarks.inference import Digits, mlp, trained
from tfamp.serving import load_test
from tfamp.serving.load_test.clients import Clients
from tfamp.serving.load_test.target import Target

FLAGS = (
    ("integer", "turns", 9, "Turns of each server."),
    ("float", "seconds", 1.5, "Of a turn."),
)
CLIENTS = 16
GOALS = {"fastapi": 2.0, "saved_model": 2.0}
MAX_ADDED_SECONDS, MAX_BYTES, MAX_START_SECONDS, MAX_TAIL = 1e-3, 120e6, 0.5, 2.0
_MAX_BATCH = 64
_STARTS = 7
_DEADLINE = 60.0


def free_port() -> int:
    """Returns a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextlib.contextmanager
def serving(command: list[str], port: int) -> Iterator[tuple[int, float]]:
    """Yields the process of a server and the seconds to its first answer."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _answers(port):
            if process.poll() is not None:
                raise RuntimeError(f"{command} ended with {process.returncode}.")
            if time.perf_counter() - start > _DEADLINE:
                raise RuntimeError(f"{command} gave no answer in {_DEADLINE:g} s.")
            time.sleep(0.005)
        yield process.pid, time.perf_counter() - start
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.0] * 64}
    body = json.dumps({"inputs": [entry]}).encode()
    address = f"http://127.0.0.1:{port}/v2/models/model/infer"
    request = urllib.request.Request(
        address, body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def resident_bytes(pid: int) -> int:
    """Returns what a process holds in memory, of which libraries are a part."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def requests(x: np.ndarray, name: str) -> dict[str, bytes]:
    """Returns a request for one row of an input as JSON, and one as bytes."""
    raw = x.tobytes()
    entry = {"name": name, "datatype": "FP32", "shape": list(x.shape)}
    row = json.dumps({"inputs": [{**entry, "data": x.ravel().tolist()}]}).encode()
    entry["parameters"] = {"binary_data_size": len(raw)}
    asked = {"inputs": [entry], "parameters": {"binary_data_output": True}}
    head = json.dumps(asked).encode()
    return {
        "json": _request("/v2/models/model/infer", row),
        "binary": _request(
            *("/v2/models/model/infer", head + raw),
            f"Inference-Header-Content-Length: {len(head)}\r\n",
        ),
    }


def _request(path: str, body: bytes, headers: str = "") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"{headers}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def ask(
    port: int, request: bytes, clients: int, seconds: float
) -> tuple[float, list[float]]:
    """Returns the answers a second of clients that wait for each, and latencies."""
    target = Target("", "127.0.0.1", port, request)
    with contextlib.closing(Clients(target, clients, _DEADLINE)) as asked:
        return load_test.peak(asked, clients, seconds)


def commands(folder: Path) -> dict[str, tuple[list[str], int]]:
    """Returns how each server is started, and its port."""
    found = {}
    for name, export in (("int8", "int8"), ("saved_model", "saved_model")):
        port = free_port()
        own = [f"model={folder / export}", f"--port={port}"]
        found[name] = (["-m", "tfamp", "serve", *own], port)
    port = free_port()
    own = ["-m", "benchmarks._fastapi_server", str(folder / "int8"), str(port)]
    return {**found, "fastapi": (own, port)}


def exports(folder: Path, width: int, data: Digits) -> None:
    """Writes the MLP in int8 for ONNX, and in float32 as a SavedModel."""
    model = trained(mlp(width), data, 3)
    for name, options in (
        ("int8", {"dtype": "int8", "scheme": "static", "calibration": data.x[:128]}),
        ("saved_model", {}),
    ):
        format = "onnx" if name == "int8" else name
        tfamp.export(model, folder / name, format=format, write_failed=True, **options)


def processor_seconds(pid: int) -> float:
    """Returns the processor's time that a process has taken."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def compare_rates(
    servers: Mapping[str, tuple[int, int]],
    request: bytes,
    turns: int,
    seconds: float,
) -> dict[str, Any]:
    """Returns the answers a second of each server, and ratios of int8's over others.

    Args:
        servers: Process and port, by name.
        request: What is asked.
        turns: Of each server.
        seconds: Of a turn.
    """

    def side(pid: int, port: int) -> Any:
        def turn() -> tuple[float, float, float]:
            before = processor_seconds(pid)
            per_second, latencies = ask(port, request, CLIENTS, seconds)
            taken = (processor_seconds(pid) - before) / len(latencies)
            return per_second, float(np.median(latencies)), taken

        turn()
        return turn

    found = take_turns([side(*each) for each in servers.values()], turns)
    own = dict(zip(servers, np.moveaxis(found, 1, 0), strict=True))
    rates = {
        name: {
            "per_second": round(float(np.median(each[:, 0]))),
            "p50_milliseconds": round(1e3 * float(np.median(each[:, 1])), 2),
            "processor_microseconds": round(1e6 * float(np.median(each[:, 2]))),
        }
        for name, each in own.items()
    }
    for name, goal in GOALS.items():
        if name in own:
            over = ratio(own["int8"][:, 0], own[name][:, 0])
            rates[name] |= {**over, "goal": goal, "met": over["ratio"] >= goal}
    return rates


def compare_latencies(
    model: tfamp.LoadedModel, port: int, x: np.ndarray, turns: int, seconds: float
) -> dict[str, Any]:
    """Returns what one client waits longer for than a call in this process takes."""
    name = model.signature.inputs[0].name
    inputs = {name: x}

    def inside() -> float:
        until, taken = time.perf_counter() + seconds, []
        while (start := time.perf_counter()) < until:
            model.run(inputs)
            taken.append(time.perf_counter() - start)
        return float(np.median(taken))

    def side(request: bytes) -> Any:
        return lambda: float(np.median(ask(port, request, 1, seconds)[1]))

    asked = requests(x, name)
    sides = [inside, *map(side, asked.values())]
    for each in sides:
        each()
    found = take_turns(sides, turns)[..., 0]
    added = {
        name: round(1e3 * float(np.median(found[:, at] - found[:, 0])), 3)
        for at, name in enumerate(asked, start=1)
    }
    worst = max(added.values())
    return {
        "in_process_milliseconds": round(1e3 * float(np.median(found[:, 0])), 3),
        "added_milliseconds": added,
        "goal": 1e3 * MAX_ADDED_SECONDS,
        "met": worst <= 1e3 * MAX_ADDED_SECONDS,
    }


def tail(
    model: tfamp.LoadedModel, port: int, x: np.ndarray, seconds: float
) -> dict[str, Any]:
    """Returns the 99th percentile at half of the peak rate, and what it is held to.

    A request waits for the run ahead of it at most, which has up to 64 examples.
    """
    name = model.signature.inputs[0].name
    request = requests(x, name)["binary"]
    peak, _ = ask(port, request, CLIENTS, seconds)

    def taken(batch: np.ndarray) -> list[float]:
        found, until = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < until:
            model.run({name: batch})
            found.append(time.perf_counter() - start)
        return found

    own = float(np.quantile(taken(x), 0.99))
    limit = float(np.median(taken(np.repeat(x, _MAX_BATCH, axis=0))))
    url = f"http://127.0.0.1:{port}/v2/models/model"
    (load,) = load_test.bench_serve([url], rates=[peak / 2], seconds=4 * seconds).loads
    goal = MAX_TAIL * own + limit
    return {
        "peak_per_second": round(peak),
        "rate": round(load.rate),
        "milliseconds": {
            **{"own_p99": round(1e3 * own, 3), "batch": round(1e3 * limit, 3)},
            **{"p50": _rounded(load.p50), "p99": _rounded(load.p99)},
            "generator_late_p99": _rounded(load.lateness_p99),
            "goal": round(1e3 * goal, 3),
        },
        "errors": load.errors,
        "met": load.p99 is not None and load.p99 <= goal and not load.errors,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def measure(settings: Any) -> dict[str, Any]:
    """Returns the figures."""
    turns, seconds, width, starts = settings.turns, settings.seconds, 2048, _STARTS
    data = Digits.load()
    if settings.smoke:
        turns, seconds, width, starts = 2, 0.2, 16, 1
    x = data.x_test[:1]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        exports(folder, width, data)
        started = commands(folder)
        cold = []
        for _ in range(starts):
            with serving(*started["int8"]) as (_, took):
                cold.append(took)
        pids = {}
        for name, (command, port) in started.items():
            pids[name], _ = stack.enter_context(serving(command, port))
        ports = {name: port for name, (_, port) in started.items()}
        servers = {name: (pids[name], ports[name]) for name in ports}
        model = tfamp.load_exported(folder / "int8")
        asked = requests(x, model.signature.inputs[0].name)["json"]
        rates = compare_rates(servers, asked, turns, seconds)
        port = ports["int8"]
        added = compare_latencies(model, port, x, turns, seconds)
        own_tail = tail(model, port, x, seconds)
        for name, pid in pids.items():
            rates[name]["resident_bytes"] = resident_bytes(pid)
    start, held = float(np.median(cold)), rates["int8"]["resident_bytes"]
    return {
        "turns": turns,
        "clients": CLIENTS,
        "rates": rates,
        "one_client": added,
        "half_peak": own_tail,
        "start": {
            "seconds": round(start, 3),
            "goal": MAX_START_SECONDS,
            "met": start <= MAX_START_SECONDS,
        },
        "memory": {"bytes": held, "goal": MAX_BYTES, "met": held <= MAX_BYTES},
    }
