"""Requests at moments that were drawn before: the next does not wait for an answer.

A generator that waits sends least while the server is slowest, and so misses what it
is meant to measure ("coordinated omission"). Here a latency counts from the moment at
which the request was due, whatever kept it from being sent.

The generators on PyPI that are kept up, such as locust, wait for answers; those that do
not wait, such as k6 and vegeta, cannot be installed by pip.
"""

import asyncio
import collections
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfamp.serving.load_test.connections import Connection
from tfamp.serving.load_test.target import Target

# Timers of an event loop fire up to a millisecond late: the rest is waited for awake.
_AWAKE_SECONDS = 0.0015


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


class Connections:
    """Connections to a server, used again as long as they are good.

    Args:
        target: What they ask.
        limit: How many there may be; more requests than that wait, and it counts.
        timeout_seconds: How long an answer may take, from when it was due.
    """

    def __init__(self, target: Target, limit: int, timeout_seconds: float) -> None:
        self._idle = [Connection(target) for _ in range(limit)]
        self._all = tuple(self._idle)
        self._timeout_seconds = timeout_seconds
        self._free = asyncio.Semaphore(limit)

    async def ask(self, due: float) -> str:
        """Returns "200", or what a request came to instead."""
        until = due + self._timeout_seconds
        async with self._free:
            if time.perf_counter() >= until:
                return "timeout"
            connection = self._idle.pop()
            try:
                return await connection.ask(until)
            finally:
                self._idle.append(connection)

    def close(self) -> None:
        """Closes all of them."""
        for each in self._all:
            each.close()


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


async def ask_at(connections: Connections, due: Sequence[float]) -> Burst:
    """Asks at the moments that are given and waits for the last answer.

    Args:
        connections: To the server.
        due: Seconds from now, in order.
    """
    latencies: list[float] = []
    lateness: list[float] = []
    errors: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()

    async def ask(moment: float) -> None:
        lateness.append(time.perf_counter() - moment)
        status = await connections.ask(moment)
        if status == "200":
            latencies.append(time.perf_counter() - moment)
        else:
            errors[status] += 1

    tasks = set()
    for moment in due:
        while (rest := start + moment - time.perf_counter()) > 0:
            await asyncio.sleep(max(0.0, rest - _AWAKE_SECONDS))
        task = asyncio.create_task(ask(start + moment))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    while tasks:
        await asyncio.wait(tasks)
    seconds = time.perf_counter() - start
    return Burst(seconds, tuple(latencies), tuple(lateness), dict(errors))


async def peak(
    connections: Connections, clients: int, seconds: float
) -> tuple[float, list[float]]:
    """Returns the answers a second that clients get that do wait, and latencies."""
    latencies: list[float] = []
    start = time.perf_counter()

    async def ask() -> None:
        while (now := time.perf_counter()) < start + seconds:
            if await connections.ask(now) == "200":
                latencies.append(time.perf_counter() - now)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return len(latencies) / (time.perf_counter() - start), latencies
