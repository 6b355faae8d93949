"""Requests at moments that were drawn before: the next does not wait for an answer.

A generator that waits sends least while the server is slowest, and so misses what it
is meant to measure ("coordinated omission"). Here a latency counts from the moment at
which the request was due, whatever kept it from being sent.

The generators on PyPI that are kept up, such as locust, wait for answers; those that do
not wait, such as k6 and vegeta, cannot be installed by pip.
"""

import collections
import contextlib
import gc
import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tfamp.serving.load_test.clients import Answer, Clients


class Burst(NamedTuple):
    """What came of the requests at one rate.

    Args:
        seconds: From the first moment that was due to the last answer.
        latencies: Seconds of each request that was answered with 200, from the moment
            that it was due.
        lateness: Seconds by which the generator itself sent each too late.
        errors: What the others came to -> how many: a status, "timeout", an error.
    """

    seconds: float
    latencies: tuple[float, ...]
    lateness: tuple[float, ...]
    errors: dict[str, int]


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
    """Asks at the moments that are given and waits for the last answer.

    Args:
        clients: Of the server.
        due: Seconds from now, in order.
    """
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

    Args:
        clients: Of the server.
        number: Requests that are under way at a time.
        seconds: How long they go on asking.
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
