"""Models that are served in tests, and a client of the ASGI application itself.

Run as a program, `python -m tests.served_models PATH --max_queue=8` serves `Means`,
without any runtime.
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

    def __init__(self, factor=2.0, *, inputs=(X,), outputs=(Y,), **options):
        signature = Signature(tuple(inputs), tuple(outputs))
        super().__init__("onnx", None, signature, None, **options)
        self.factor, self.batches = factor, []

    def run(self, inputs):
        first = next(iter(inputs.values()))
        self.batches.append(len(first))
        if (first == -1e6).any():
            raise RuntimeError("minus a million is more than this model takes")
        return {spec.name: first * self.factor for spec in self.signature.outputs}


class Means(LoadedModel):
    """Answers the mean of each channel of photos, as long as its folder lets it."""

    def __init__(self, folder):
        photos = TensorSpec("photos", (None, None, None, 3), "float32")
        means = TensorSpec("means", (None, 3), "float32")
        super().__init__("onnx", folder, Signature((photos,), (means,)), None)

    @staticmethod
    def written(folder):
        folder.mkdir()
        (folder / "export.json").touch()
        return folder

    def run(self, inputs):
        if (self.path / "lost").exists():
            raise RuntimeError("the device is lost")
        while (self.path / "stuck").exists():
            time.sleep(0.1)
        return {"means": inputs["photos"].mean((1, 2))}


def served(tmp_path, model, **options):
    """Returns an application that serves one model as "m"."""
    from tfamp.serving.server.main import application

    folder = Means.written(tmp_path / "m")
    return application([str(folder)], load=lambda _: model, **options)


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

    (path, *flags) = sys.argv[1:]
    options = dict(word.removeprefix("--").split("=") for word in flags)
    serve(
        [path],
        load=Means,
        on_start=lambda address: print(address, flush=True),
        **{"port": 0, **{name: json.loads(value) for name, value in options.items()}},
    )
