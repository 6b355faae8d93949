"""`bench_serve`: servers at growing rates, in turns, by requests that do not wait.

A generator that waits sends least while the server is slowest, and so misses what it
is meant to measure ("coordinated omission"). Here requests are due at moments that were
drawn before, and a latency counts from then, whatever kept a request from being sent.

The generators on PyPI that are kept up, such as locust, wait for answers; those that do
not wait, such as k6 and vegeta, cannot be installed by pip.
"""

import collections
import contextlib
import gc
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.serving.load_test import target
from tfamp.serving.load_test.clients import Answer, Clients
from tfamp.serving.load_test.result import Burst, Load, LoadTest

# Of the most that the first server answers: where it is bored, and where it is not.
_SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
_CLIENTS = 16
_PEAK_SECONDS = 1.0
_WARM_UP = 20
_MAX_CONNECTIONS = 256


def bench_serve(
    urls: Sequence[str],
    *,
    rates: Sequence[float] | None = None,
    seconds: float = 5.0,
    protocol: str | None = None,
    batch_size: int = 1,
    timeout_seconds: float = 10.0,
    token: str | None = None,
    seed: int = 0,
) -> LoadTest:
    """Measures latencies of servers at given rates, whatever they answer.

    Requests are due at moments that were drawn before, the same for every server, and
    latencies count from these. Of several servers, or several models of one, each rate
    is asked of one after the other, in an order that turns.

    Args:
        urls: Models of servers, such as "http://127.0.0.1:8000/v2/models/digits".
        rates: Requests a second; by default 10 % to 90 % of what 16 clients get from
            the first server.
        seconds: How long each rate lasts.
        protocol: "binary" or "json" of the Open Inference Protocol; None is binary.
        batch_size: Examples in each request.
        timeout_seconds: How long an answer may take.
        token: What requests bear, if anything.
        seed: Of the moments.

    Raises:
        OSError: A server cannot be reached.
        ValueError: An argument is out of its range, or a server has no such model.
    """
    if protocol is not None:
        checks.choice("protocol", protocol, target.PROTOCOLS)
    checks.positive_int("batch_size", batch_size)
    checks.positive("seconds", seconds)
    checks.positive("timeout_seconds", timeout_seconds)
    for rate in rates or ():
        checks.positive("rates", rate)
    if not urls:
        raise ValueError("`urls` is empty; expected a model of a server at least.")
    found = [
        target.find(url, protocol=protocol, batch_size=batch_size, token=token)
        for url in urls
    ]
    loads = _measured(found, rates, seconds, timeout_seconds, seed)
    protocols = " and ".join(dict.fromkeys(each.protocol for each in found))
    return LoadTest(protocols, batch_size, float(seconds), tuple(loads))


def _measured(
    targets: Sequence[target.Target],
    rates: Sequence[float] | None,
    seconds: float,
    timeout_seconds: float,
    seed: int,
) -> list[Load]:
    """Returns what each target came to at each rate."""
    pools = [Clients(each, _MAX_CONNECTIONS, timeout_seconds) for each in targets]
    loads = []
    try:
        for pool in pools:
            ask_at(pool, [0.0] * _WARM_UP)
        if rates is None:
            most, _ = peak(pools[0], _CLIENTS, _PEAK_SECONDS)
            rates = [max(1.0, share * most) for share in _SHARES]
        pairs = list(zip(targets, pools, strict=True))
        with progress("Asking", len(rates) * len(pairs), unit="rates") as advance:
            for number, rate in enumerate(sorted(rates)):
                due = moments(rate, seconds, seed + number)
                for each, pool in pairs[:: -1 if number % 2 else 1]:
                    burst = ask_at(pool, due)
                    loads.append(Load.of(each.label, rate, burst))
                    advance(len(loads))
    finally:
        for pool in pools:
            pool.close()
    return loads


def moments(rate: float, seconds: float, seed: int) -> list[float]:
    """Returns when requests are due: of clients that know nothing of one another.

    Their gaps are exponential, with a mean of `1 / rate` (a Poisson process).

    Example:
        >>> due = moments(100.0, 2.0, seed=0)
        >>> 150 < len(due) < 250 and due == sorted(due) and due[-1] < 2.0
        True
    """
    rng = np.random.default_rng(seed)
    found: list[float] = []
    last = 0.0
    while True:
        last += float(rng.exponential(1 / rate))
        if last >= seconds:
            return found
        found.append(last)


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage, which stops a large process for 0.2 s."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collections()
def ask_at(clients: Clients, due: Sequence[float]) -> Burst:
    """Asks at moments, seconds from now and in order; waits for the last answer."""
    answers: list[Answer] = []
    lateness: list[float] = []
    start = time.perf_counter()
    for moment in due:
        while time.perf_counter() < start + moment:
            answers += clients.wait(start + moment)
        clients.ask(start + moment)
        lateness.append(time.perf_counter() - start - moment)
    while clients.is_busy:
        answers += clients.wait(math.inf)
    latencies = [each.ended - each.due for each in answers if each.status == "200"]
    errors = collections.Counter(
        each.status for each in answers if each.status != "200"
    )
    seconds = time.perf_counter() - start
    return Burst(seconds, tuple(latencies), tuple(lateness), dict(errors))


@no_collections()
def peak(clients: Clients, number: int, seconds: float) -> tuple[float, list[float]]:
    """Returns the answers a second that clients get that do wait, and latencies.

    A `number` of requests are under way at a time.
    """
    latencies: list[float] = []
    start = time.perf_counter()
    for _ in range(number):
        clients.ask(time.perf_counter())
    while clients.is_busy:
        for each in clients.wait(math.inf):
            if each.status == "200":
                latencies.append(each.ended - each.due)
            if (now := time.perf_counter()) < start + seconds:
                clients.ask(now)
    return len(latencies) / (time.perf_counter() - start), latencies
