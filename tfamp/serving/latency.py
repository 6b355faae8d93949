"""`latency_check`: how long answers take, of a model here or behind an address.

Clients that wait for each answer send least while a model is slowest. At a given `rate`
requests are due at moments that were drawn before, and a latency counts from then.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import math
import os
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tfamp.records import checks, units
from tfamp.records.record import TableRecord
from tfamp.serving.runtimes import load_exported, signature
from tfamp.serving.runtimes.signature import DATATYPES, LoadedModel, TensorSpec

if TYPE_CHECKING:
    import keras

_DTYPES = {text: dtype for dtype, text in DATATYPES.items() if dtype != "string"}
_WARM_UP = 10
_MOST_AT_ONCE = 64  # requests under way at a given rate; more wait, and it counts
# How many answers it takes to tell a percentile from the slowest few.
_QUANTILES = {"p50": 1, "p90": 10, "p99": 100}
_BROKEN = (OSError, http.client.HTTPException)


@dataclasses.dataclass(frozen=True)
class Latency(TableRecord):
    """How long a model takes to answer; quantiles are None below so many answers."""

    p50: float | None  # seconds within which half of all answers came
    p90: float | None  # of nine in ten; None below 10 answers
    p99: float | None  # of 99 in 100; None below 100 answers
    answers_per_second: float
    num_answers: int
    errors: dict[str, int]  # status or error -> how many requests got it
    clients: int | None = None  # who asked at a time, each waiting for its answer
    rate: float | None = None  # requests a second that were due

    def table(self) -> str:
        """Returns a line."""
        found = ((name, getattr(self, name)) for name in _QUANTILES)
        told = [f"{name} {units.format_seconds(x)}" for name, x in found if x]
        how = f"{self.clients} at a time" if self.clients else f"{self.rate:g}/s due"
        told.append(f"{self.answers_per_second:,.0f} answers/s, {how}")
        told += [f"{count:,} times {what}" for what, count in self.errors.items()]
        return ", ".join(told)


def latency_check(
    model_or_url: "str | os.PathLike[str] | keras.Model | LoadedModel",
    x: Any,
    *,
    clients: int = 1,
    rate: float | None = None,
    seconds: float = 2.0,
    token: str | None = None,
    timeout_seconds: float = 10.0,
) -> Latency:
    """Measures how long answers to one request take, and how many come in a second.

    Args:
        model_or_url: A Keras model, what `tfamp.export` wrote or `tfamp.load_exported`
            returned, or an address: "http://127.0.0.1:8000/v2/models/digits".
        x: What each request asks for, one batch, as `LoadedModel.predict` takes it.
        clients: How many ask at a time, each of which waits for its answer.
        rate: Requests a second, which do not wait, in the place of `clients`.
        seconds: How long to ask.
        token: What requests to a server bear, if anything.
        timeout_seconds: How long an answer of a server may take.
    """
    checks.positive_int("clients", clients)
    checks.positive("seconds", seconds)
    if rate is not None:
        checks.positive("rate", rate)
    with contextlib.ExitStack() as stack:
        if isinstance(model_or_url, str) and "://" in model_or_url:
            ask = _asking(model_or_url, x, token, timeout_seconds, stack)
        else:
            model: Any = model_or_url
            if not isinstance(model, LoadedModel):
                model = load_exported(model)
                if not isinstance(model_or_url, (str, os.PathLike)):
                    from tfamp.stepping.unchanged import unchanged

                    # Layers may count their calls.
                    stack.enter_context(unchanged(model_or_url))
            inputs = model.prepared(x)

            def ask() -> str:
                model.run(inputs)
                return ""

        for _ in range(_WARM_UP):
            if error := ask():
                told = f"{model_or_url!r} answers {error} to `x`. Compare it with what "
                raise ValueError(f"{told}the model takes.")
        found: list[tuple[float, str]] = []
        start, moments = time.perf_counter(), iter(time.perf_counter, math.inf)
        if rate is not None:
            number = int(2 * rate * seconds) + 20
            gaps = np.random.default_rng(0).exponential(1 / rate, number)
            moments = iter((start + np.cumsum(gaps)).tolist())

        def work() -> None:
            while (moment := next(moments, math.inf)) < start + seconds:
                time.sleep(max(0.0, moment - time.perf_counter()))
                error = ask()
                found.append((time.perf_counter() - moment, error))

        threads = clients if rate is None else _MOST_AT_ONCE
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(work) for _ in range(threads)]:
                each.result()
        took = time.perf_counter() - start
    taken = [latency for latency, error in found if not error]
    quantiles: dict[str, Any] = dict.fromkeys(_QUANTILES)
    for name, least in _QUANTILES.items():
        if len(taken) >= least:
            quantiles[name] = float(np.percentile(taken, int(name[1:])))
    return Latency(
        **quantiles,
        answers_per_second=len(taken) / took,
        num_answers=len(taken),
        errors=dict(collections.Counter(error for _, error in found if error)),
        clients=clients if rate is None else None,
        rate=rate,
    )


def _asking(
    url: str, x: Any, token: str | None, timeout: float, stack: contextlib.ExitStack
) -> Callable[[], str]:
    """Returns what sends one request to an address; it gives "", or what is wrong."""
    parts = urllib.parse.urlsplit(url)
    name = "HTTPConnection" if parts.scheme == "http" else "HTTPSConnection"
    kind = getattr(http.client, name)
    path = parts.path.rstrip("/").removesuffix("/infer")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    own = threading.local()

    def answer(method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        if not hasattr(own, "connection"):
            own.connection = kind(parts.netloc, timeout=timeout)
            stack.callback(own.connection.close)
        try:
            own.connection.request(method, path, body, headers)
            with own.connection.getresponse() as response:
                return response.status, response.read()
        except _BROKEN:
            own.connection.close()  # It is opened again for the next request.
            raise

    specs = []
    try:
        _, text = answer("GET", path, None)
    except _BROKEN as error:
        raise OSError(f"{url!r} cannot be reached: {error}. Start it.") from error
    try:
        for each in json.loads(text)["inputs"]:
            shape = tuple(None if n < 0 else int(n) for n in each["shape"])
            specs.append(TensorSpec(each["name"], shape, _DTYPES[each["datatype"]]))
    except (ValueError, KeyError, TypeError) as error:
        told = f"{url!r} answers {text[:200]!r}; expected the metadata of a model"
        raise ValueError(f"{told}. Write http://HOST/v2/models/NAME.") from error
    entries, raw = [], b""
    for spec, array in zip(specs, signature.prepared(x, specs).values(), strict=True):
        entry: dict[str, Any] = {"name": spec.name, "shape": list(array.shape)}
        if array.dtype == object:  # texts
            entry["data"] = array.ravel().tolist()
        else:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            raw += array.tobytes()
        entries.append({**entry, "datatype": DATATYPES[spec.dtype]})
    content = {"inputs": entries, "parameters": {"binary_data_output": True}}
    head = json.dumps(content).encode()
    headers["Inference-Header-Content-Length"] = str(len(head))

    def ask() -> str:
        try:
            status, _ = answer("POST", f"{path}/infer", head + raw)
        except _BROKEN as error:
            return type(error).__name__
        return "" if status == 200 else str(status)

    return ask
