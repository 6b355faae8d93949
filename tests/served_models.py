"""Models that are served in tests, and a client of the ASGI application itself.

Run as a program, `python -m tests.served_models PATH... --max_queue=8` serves folders
of small models of its own, without any runtime.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tfamp.serving.runtimes.signature import LoadedModel, Signature, TensorSpec

ROOT = Path(__file__).parents[1]
# Enough for a machine that runs a suite beside it.
DEADLINE = 60
X = TensorSpec("x", (None, 3), "float32")
Y = TensorSpec("y", (None, 3), "float32")


class Scaled(LoadedModel):
    """Answers its input times a factor, and notes the batches that it was run on."""

    def __init__(self, factor=2.0, *, inputs=(X,), outputs=(Y,), seconds=0.0):
        super().__init__(
            "onnx", Path("."), Signature(tuple(inputs), tuple(outputs)), None
        )
        self.factor, self.seconds = factor, seconds
        self.batches = []

    def run(self, inputs):
        first = next(iter(inputs.values()))
        self.batches.append(len(first))
        if self.seconds and (first != 1).any():  # not at the start
            time.sleep(self.seconds)
        if (first == -1e6).any():
            raise RuntimeError("minus a million is more than this model takes")
        return {spec.name: first * self.factor for spec in self.signature.outputs}


def write(folder, factor, **options):
    """Writes a model as `load` reads it; the folder appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / "beside"
    beside.write_text(json.dumps({"factor": factor, **options}))
    beside.rename(folder / "export.json")
    return folder


def load(folder):
    """Reads what `write` wrote."""
    return Scaled(**json.loads((folder / "export.json").read_text()))


@contextlib.contextmanager
def serving(*command):
    """Yields the process of a server and its address, killed after ten minutes."""
    process = subprocess.Popen(
        list(map(str, command)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    timer = threading.Timer(600, process.kill)
    timer.start()
    try:
        line = process.stdout.readline()
        if "http://" not in line:
            process.kill()
            raise RuntimeError(f"no server: {line}{process.stderr.read()}")
        yield process, line.partition("http://")[2].split(";")[0].strip()
    finally:
        process.kill()
        process.communicate()
        timer.cancel()


async def ask(app, path, body=None, *, headers=(), parts=None):
    """Returns the status, the headers and the body of an answer.

    The body is bytes, or sent as JSON; or it comes in parts, of which None never ends.
    """
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    rest = list(parts if parts is not None else [body or b""])
    sent = []

    async def receive():
        if rest and rest[0] is None:
            await asyncio.sleep(60)
        part = rest.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(rest)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET" if body is None and parts is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "server": ("here", 80),
        "headers": [(k.lower().encode(), v.encode()) for k, v in headers],
    }
    await app(scope, receive, send)
    start, last = sent[0], sent[-1]
    found = {k.decode(): v.decode() for k, v in start["headers"]}
    return start["status"], found, last["body"]


def numbers(text):
    """Returns the value of each metric of a page, by its line without the value."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines)}


if __name__ == "__main__":
    from tfamp.serving.server.main import serve

    flags = [word[2:].split("=") for word in sys.argv[1:] if word.startswith("--")]
    serve(
        [word for word in sys.argv[1:] if not word.startswith("--")],
        load=load,
        on_start=lambda address: print(address, flush=True),
        **{"port": 0, **{name: json.loads(value) for name, value in flags}},
    )
    print("tensorflow" in sys.modules, flush=True)
