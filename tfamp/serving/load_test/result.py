"""What a load test found: latencies by rate, for each server."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfamp.records import console
from tfamp.records.record import Record, TableRecord
from tfamp.records.units import format_seconds
from tfamp.serving.load_test.arrivals import Burst

# A percentile says something where so many requests lie beyond it.
_BEYOND = 1
# Above it the generator's own lateness is part of what it shows.
_MAX_LATENESS = 0.002


@dataclasses.dataclass(frozen=True)
class Load(Record):
    """A server at one rate. Latencies are seconds from when a request was due.

    Args:
        target: Address and model.
        rate: Requests due in a second.
        answered_per_second: Requests answered with 200 in a second.
        num_requests: Requests due.
        p50: Median latency of those answered; None where none was.
        p99: 99th percentile; None of fewer than 100 answers.
        p999: 99.9th percentile; None of fewer than 1000 answers.
        errors: Status, "timeout" or error -> how many.
        lateness_p99: 99th percentile of how late the generator itself sent.
    """

    target: str
    rate: float
    answered_per_second: float
    num_requests: int
    p50: float | None
    p99: float | None
    p999: float | None
    errors: dict[str, int]
    lateness_p99: float

    @classmethod
    def of(cls, target: str, rate: float, burst: Burst) -> "Load":
        """Returns what the requests at one rate came to."""
        count = len(burst.latencies)

        def percentile(part: float) -> float | None:
            if count == 0 or count * (1 - part) < _BEYOND - 1e-9 and part > 0.5:
                return None
            return float(np.quantile(burst.latencies, part))

        late = float(np.quantile(burst.lateness, 0.99)) if burst.lateness else 0.0
        return cls(
            target=target,
            rate=rate,
            answered_per_second=count / burst.seconds,
            num_requests=len(burst.lateness),
            p50=percentile(0.5),
            p99=percentile(0.99),
            p999=percentile(0.999),
            errors=burst.errors,
            lateness_p99=late,
        )


@dataclasses.dataclass(frozen=True)
class LoadTest(TableRecord):
    """Servers, or exports, under the same load, in turns.

    Args:
        protocol: "binary", "json" or "predict"; of servers with several, all of them.
        batch_size: Examples in a request.
        seconds: Of each rate.
        loads: Each server at each rate.
    """

    protocol: str
    batch_size: int
    seconds: float
    loads: tuple[Load, ...]

    @property
    def targets(self) -> tuple[str, ...]:
        """The servers, in the order that they were named in."""
        return tuple(dict.fromkeys(load.target for load in self.loads))

    def of(self, target: str) -> tuple[Load, ...]:
        """Returns what one server came to, by rate."""
        own = (load for load in self.loads if load.target == target)
        return tuple(sorted(own, key=lambda load: load.rate))

    def ordered(self) -> list[Load]:
        """Returns all loads by rate, those of a rate in the order of the servers."""
        place = {target: number for number, target in enumerate(self.targets)}
        return sorted(self.loads, key=lambda load: (load.rate, place[load.target]))

    def notes(self) -> tuple[str, ...]:
        """Returns what the figures have to be read with."""
        late = max((load.lateness_p99 for load in self.loads), default=0.0)
        found = []
        if late > _MAX_LATENESS:
            found.append(
                f"The generator itself sent up to {format_seconds(late)} late (99 % of "
                "requests): latencies hold that, too. Give it a core of its own."
            )
        if any(load.p999 is None for load in self.loads):
            found.append(
                "A percentile needs a request beyond it: p99.9 a thousand answers. "
                "Raise `seconds` where it is missing."
            )
        return tuple(found)

    def table(self) -> str:
        """Returns a line for each rate and server, those of a rate together."""
        columns = {
            **{"rate": console.RIGHT, "server": console.FOLD},
            **dict.fromkeys(("answered/s", "p50", "p99", "p99.9"), console.RIGHT),
            "errors": console.FOLD,
        }
        rows = [row_of(load) for load in self.ordered()]
        table = console.table(columns, rows)
        return console.text_of(table, *self.notes())


def row_of(load: Load) -> Sequence[str]:
    """Returns the cells of a server at one rate."""
    return (
        *(f"{load.rate:,.0f}", load.target, f"{load.answered_per_second:,.0f}"),
        *map(_time, (load.p50, load.p99, load.p999)),
        ", ".join(f"{count:,} {what}" for what, count in load.errors.items()) or "none",
    )


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
