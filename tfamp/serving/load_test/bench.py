"""`bench_serve`: servers at growing rates, in turns."""

from collections.abc import Sequence

from tfamp.records import checks
from tfamp.records.console import progress
from tfamp.serving.load_test import arrivals, target
from tfamp.serving.load_test.clients import Clients
from tfamp.serving.load_test.result import Load, LoadTest

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
        urls: Models of servers, such as "http://127.0.0.1:8000/v2/models/digits", or
            "http://127.0.0.1:8501/v1/models/digits" of TensorFlow Serving.
        rates: Requests a second; by default 10 % to 90 % of what 16 clients get from
            the first server.
        seconds: How long each rate lasts.
        protocol: "binary" or "json" of the Open Inference Protocol, or "predict" of
            TensorFlow Serving; by default "predict" at /v1 and "binary" at /v2.
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
            arrivals.ask_at(pool, [0.0] * _WARM_UP)
        if rates is None:
            most, _ = arrivals.peak(pools[0], _CLIENTS, _PEAK_SECONDS)
            rates = [max(1.0, share * most) for share in _SHARES]
        pairs = list(zip(targets, pools, strict=True))
        with progress("Asking", len(rates) * len(pairs), unit="rates") as advance:
            for number, rate in enumerate(sorted(rates)):
                due = arrivals.moments(rate, seconds, seed + number)
                for each, pool in pairs[:: -1 if number % 2 else 1]:
                    burst = arrivals.ask_at(pool, due)
                    loads.append(Load.of(each.label, rate, burst))
                    advance(len(loads))
    finally:
        for pool in pools:
            pool.close()
    return loads
