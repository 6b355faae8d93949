"""Requests at moments that were drawn before: the next does not wait for an answer.

A generator that waits sends least while the server is slowest, and so misses what it
is meant to measure ("coordinated omission"). Here a latency counts from the moment at
which the request was due, whatever kept it from being sent.

The generators on PyPI that are kept up, such as locust, wait for answers; those that do
not wait, such as wrk2 and vegeta, cannot be installed by pip.
"""

import asyncio
import collections
import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

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


class _Connection:
    """A connection that asks one request after the other."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self) -> int:
        """Returns the status of an answer, read to its end."""
        target = self._target
        if self._streams is None:
            self._streams = await asyncio.open_connection(target.host, target.port)
        reader, writer = self._streams
        writer.write(target.request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        _, found, rest = head.partition(b"content-length:")
        if not found:
            raise ConnectionError("an answer without Content-Length")
        await reader.readexactly(int(rest.partition(b"\r\n")[0]))
        if b"connection: close" in head:
            self.close()
        return int(head.split(maxsplit=2)[1])

    def close(self) -> asyncio.StreamWriter | None:
        """Closes it; the next request opens it again. Returns what to wait for."""
        if self._streams is None:
            return None
        writer = self._streams[1]
        self._streams = None
        writer.close()
        return writer


class Connections:
    """Connections to a server, used again as long as they are good.

    Args:
        target: What they ask.
        limit: How many there may be; more requests than that wait, and it counts.
        timeout_seconds: How long an answer may take, from when it was due.
    """

    def __init__(self, target: Target, limit: int, timeout_seconds: float) -> None:
        self._idle = [_Connection(target) for _ in range(limit)]
        self._timeout_seconds = timeout_seconds
        self._free = asyncio.Semaphore(limit)

    async def ask(self, due: float) -> str:
        """Returns "200", or what a request came to instead."""
        try:
            remaining = self._timeout_seconds - (time.perf_counter() - due)
            return await asyncio.wait_for(self._ask(), max(remaining, 1e-3))
        except asyncio.TimeoutError:
            return "timeout"

    async def _ask(self) -> str:
        async with self._free:
            connection = self._idle.pop()
            is_good = False
            try:
                status = await connection.ask()
                is_good = True
                return str(status)
            except (OSError, EOFError, ValueError) as error:
                return type(error).__name__
            finally:
                if not is_good:
                    connection.close()
                self._idle.append(connection)

    async def close(self) -> None:
        """Closes all of them, and waits until they are."""
        streams = [each.close() for each in self._idle]
        for writer in filter(None, streams):
            with contextlib.suppress(OSError):
                await writer.wait_closed()


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


async def peak(connections: Connections, clients: int, seconds: float) -> float:
    """Returns how many requests a second clients get answered that do wait."""
    count = 0
    start = time.perf_counter()

    async def ask() -> None:
        nonlocal count
        while (now := time.perf_counter()) < start + seconds:
            count += await connections.ask(now) == "200"

    await asyncio.gather(*(ask() for _ in range(clients)))
    return count / (time.perf_counter() - start)
