"""How fast `tfamp serve` answers, over FastAPI and over a SavedModel.

An MLP of three layers of 2048, trained on digits, is exported to ONNX in int8 and to a
float32 SavedModel. 16 clients ask `tfamp serve` with either, and a plain FastAPI
example with the ONNX file, for one row as JSON, in turns. Then: what HTTP adds to a
call for one client, the server's memory and its start, and its 99th percentile at half
of the most that it answers.

Time: five minutes on two CPU cores. Use an idle machine: the clients run on the same
cores. Needs tfamp[serve,onnx] and fastapi.
"""

import concurrent.futures
import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import types
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import tfamp
from benchmarks._runner import ROOT, ratio, take_turns
from benchmarks.inference import Digits, mlp, trained

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
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        stdout=subprocess.DEVNULL,
    )
    try:
        while not _answers(port):
            is_late = time.perf_counter() - start > _DEADLINE
            if process.poll() is not None or is_late:
                raise RuntimeError(f"{command} ended, or gave no answer.")
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
    try:
        return ask(port, np.zeros((1, 64), np.float32), 1, 0.01).num_answers > 0
    except (OSError, ValueError):
        return False


def resident_bytes(pid: int) -> int:
    """Returns what a process holds in memory, of which libraries are a part."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask(port: int, x: np.ndarray, clients: int, seconds: float, **how: Any) -> Any:
    """Returns what clients get that wait for each answer, as JSON unless `binary`."""
    url = f"http://127.0.0.1:{port}/v2/models/model"
    if how.pop("binary", False):
        options = {"clients": clients, "seconds": seconds} | how
        return tfamp.latency_check(url, x, timeout_seconds=_DEADLINE, **options)
    with urllib.request.urlopen(url, timeout=_DEADLINE) as answer:
        (about,) = json.load(answer)["inputs"]
    entry = {"name": about["name"], "datatype": "FP32", "shape": list(x.shape)}
    body = json.dumps({"inputs": [{**entry, "data": x.ravel().tolist()}]})
    headers = {"Content-Type": "application/json"}
    taken: list[float] = []
    ends = time.perf_counter() + seconds

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE)
        while (began := time.perf_counter()) < ends:
            connection.request("POST", "/v2/models/model/infer", body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise ValueError(answer.read())
            answer.read()
            taken.append(time.perf_counter() - began)
        connection.close()

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for each in [pool.submit(work) for _ in range(clients)]:
            each.result()
    found = {"answers_per_second": len(taken) / seconds, "num_answers": len(taken)}
    return types.SimpleNamespace(p50=float(np.median(taken)), **found)


def commands(folder: Path) -> dict[str, tuple[list[str], int]]:
    """Returns how each server is started, and its port."""
    found = {}
    for name in ("int8", "saved_model"):
        port = free_port()
        own = [f"model={folder / name}", f"--port={port}"]
        found[name] = (["-m", "tfamp", "serve", *own], port)
    port = free_port()
    own = ["-m", "benchmarks.serving", str(folder / "int8"), str(port)]
    return {**found, "fastapi": (own, port)}


def exports(folder: Path, width: int, data: Digits) -> None:
    """Writes the MLP in int8 for ONNX, and in float32 as a SavedModel."""
    model = trained(mlp(width), data, 3)
    int8 = {"dtype": "int8", "scheme": "static", "calibration": data.x[:128]}
    tfamp.export(model, folder / "int8", format="onnx", write_failed=True, **int8)
    tfamp.export(model, folder / "saved_model", format="saved_model", write_failed=True)


def processor_seconds(pid: int) -> float:
    """Returns the processor's time that a process has taken."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def compare_rates(
    servers: Mapping[str, tuple[int, int]], x: np.ndarray, turns: int, seconds: float
) -> dict[str, Any]:
    """Returns the answers a second of each server, and ratios of int8's over others.

    Servers are process and port, by name; a turn takes some seconds.
    """

    def side(pid: int, port: int) -> Any:
        def turn() -> tuple[float, float, float]:
            before = processor_seconds(pid)
            found = ask(port, x, CLIENTS, seconds)
            taken = (processor_seconds(pid) - before) / found.num_answers
            return found.answers_per_second, found.p50, taken

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
    sides = [
        lambda: tfamp.latency_check(model, x, seconds=seconds).p50,
        lambda: ask(port, x, 1, seconds).p50,
        lambda: ask(port, x, 1, seconds, binary=True).p50,
    ]
    for each in sides:
        each()
    found = take_turns(sides, turns)[..., 0]
    added = {
        name: round(1e3 * float(np.median(found[:, at] - found[:, 0])), 3)
        for at, name in enumerate(("json", "binary"), start=1)
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
    peak = ask(port, x, CLIENTS, seconds, binary=True).answers_per_second
    own = tfamp.latency_check(model, x, seconds=seconds).p99
    batch = np.repeat(x, _MAX_BATCH, axis=0)
    limit = tfamp.latency_check(model, batch, seconds=seconds).p50
    rate, length = peak / 2, 4 * seconds
    load = ask(port, x, 1, length, binary=True, rate=rate)
    goal = None if own is None or limit is None else MAX_TAIL * own + limit
    times = {"own_p99": own, "batch": limit, "p50": load.p50, "p99": load.p99}
    return {
        "peak_per_second": round(peak),
        "rate": round(rate),
        "milliseconds": {
            name: None if each is None else round(1e3 * each, 3)
            for name, each in (times | {"goal": goal}).items()
        },
        "errors": load.errors,
        "met": None not in (load.p99, goal) and load.p99 <= goal and not load.errors,
    }


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
        servers = {
            name: (stack.enter_context(serving(command, port))[0], port)
            for name, (command, port) in started.items()
        }
        model = tfamp.load_exported(folder / "int8")
        rates = compare_rates(servers, x, turns, seconds)
        port = servers["int8"][1]
        added = compare_latencies(model, port, x, turns, seconds)
        own_tail = tail(model, port, x, seconds)
        for name, (pid, _) in servers.items():
            rates[name]["resident_bytes"] = resident_bytes(pid)
    start, held = float(np.median(cold)), rates["int8"]["resident_bytes"]
    took = {"seconds": round(start, 3), "goal": MAX_START_SECONDS}
    took["met"] = start <= MAX_START_SECONDS
    memory = {"bytes": held, "goal": MAX_BYTES, "met": held <= MAX_BYTES}
    found = {"rates": rates, "one_client": added, "half_peak": own_tail}
    found |= {"start": took, "memory": memory}
    return {"turns": turns, "clients": CLIENTS, **found}


def serve_plainly(path: str, port: int) -> None:
    """Serves an exported model as examples of FastAPI have it."""
    import fastapi
    import pydantic
    import uvicorn

    app, model = fastapi.FastAPI(), tfamp.load_exported(path)
    (spec,) = model.signature.inputs

    class Tensor(pydantic.BaseModel):
        name: str
        datatype: str
        shape: list[int]
        data: list[float]

    class Asked(pydantic.BaseModel):
        inputs: list[Tensor]

    @app.get("/v2/models/model")
    def about() -> dict[str, list[dict[str, object]]]:
        return {"inputs": [{"name": spec.name, "datatype": "FP32", "shape": [-1, 64]}]}

    @app.post("/v2/models/model/infer")
    def predict(asked: Asked) -> dict[str, list[Tensor]]:
        (given,) = asked.inputs
        y = model.predict(np.array(given.data, "float32").reshape(given.shape))
        data = y.ravel().tolist()
        shape = list(y.shape)
        return {"outputs": [Tensor(name="y", datatype="FP32", shape=shape, data=data)]}

    uvicorn.run(app, port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    serve_plainly(sys.argv[1], int(sys.argv[2]))
